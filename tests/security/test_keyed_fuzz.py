"""Key files and keyed objects as an attacker may write them, for some seconds each (S5, P6, I1)."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from kvdepot.core.arena import PAGE_BYTES
from kvdepot.core.object_keys import KEYS_MAX, RETIRED_MAX, KeyRing, key_id, parse_keys
from kvdepot.core.objectfile import HEADER_BYTES, Codec, ObjectHeader, object_bytes, payload_sum
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_rig import pattern
from tests.rigs.seeds import drawn, steps_until
from tests.rigs.shared_files import Files

SECONDS: Final = 4.0
KEYS: Final = KeyRing((b"n" * 32, b"o" * 32))
RAW_BYTES: Final = 3 * PAGE_BYTES + 7
Forgery = Callable[[random.Random, bytes, bytes], bytes]


def rounds(least: int, enough: Callable[[], object]) -> Iterator[int]:
    """Yield numbers: so many at least, until the rounds have met what the test is about, and for `SECONDS`."""
    until, number = time.monotonic() + SECONDS, 0
    for number in steps_until(enough, least):
        yield number
    while time.monotonic() < until:
        number += 1
        yield number


# --- key files


def _word(rng: random.Random) -> str:
    digits = rng.choice((16, 64, 64, 64, 15, 63, 65, 0))
    word = "".join(rng.choices("0123456789abcdefABCDEF", k=digits))
    return word if rng.random() < 0.9 else word + rng.choice("xZ \u0660\x00-_")


def _line(rng: random.Random, words: list[str]) -> str:
    words.append(rng.choice(words) if words and rng.random() < 0.1 else _word(rng))
    prefix = rng.choice(("", "", "", "retired ", "Retired ", "retired\t", " ", "\ufeff"))
    return prefix + words[-1] + rng.choice(("", "", " # of the first node", "#", " retired"))


@pytest.mark.requirement("S5")
@pytest.mark.parametrize("seed", drawn(range(1)))
def test_a_key_file_gives_the_keys_that_stand_there_or_an_error_that_repeats_none(seed: int) -> None:
    rng, outcomes = random.Random(seed), Counter[bool]()
    for _ in rounds(1_000, lambda: all(outcomes[parsed] > 50 for parsed in (True, False))):
        words: list[str] = []
        text = rng.choice(("\n", "\r\n", "\n\n")).join(_line(rng, words) for _ in range(rng.randrange(1, 5)))
        try:
            ring = parse_keys(text)
        except ValueError as error:
            outcomes[False] += 1
            assert not any(len(word) > 8 and word.lower() in str(error).lower() for word in words if len(word) >= 60)
            continue
        outcomes[True] += 1
        assert 0 < len(ring.keys) <= KEYS_MAX and len(ring.retired) <= RETIRED_MAX
        assert len(set(ring.keys)) == len(ring.keys) and not {key_id(key) for key in ring.keys} & {*ring.retired}
        assert all(key.hex() in text.lower() for key in ring.keys)
        assert not any(key.hex() in f"{ring}{ring.shown}" for key in ring.keys)
        again = "".join(f"{key.hex()}\n" for key in ring.keys) + "".join(
            f"retired {one.hex()}\n" for one in ring.retired
        )
        assert parse_keys(again) == ring


# --- objects


def _other_header(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change fields of the header, under a right checksum."""
    header, theirs = (ObjectHeader.unpack(page[:HEADER_BYTES]) for page in (data, other))
    name = header.name
    changes = (
        {"mac": rng.randbytes(32)}, {"mac": theirs.mac}, {"key_id": rng.randbytes(8)}, {"key_id": bytes(8)},
        {"key_id": key_id(KEYS.keys[rng.randrange(2)])}, {"raw_sum": theirs.raw_sum}, {"stored_sum": theirs.stored_sum},
        {"stored_bytes": rng.randrange(1, name.raw_bytes + 1)}, {"codec": rng.choice(list(Codec))},
        {"created_at": rng.randrange(2**40)}, {"sequence": rng.randrange(2**40)},
        {"name": replace(name, parent=rng.randbytes(16))}, {"name": replace(name, boundary_tokens=512)},
        {"name": theirs.name}, {"name": replace(name, raw_bytes=name.raw_bytes + 1)},
    )  # fmt: skip
    chosen = rng.sample(changes, rng.randrange(1, 4))
    for one in chosen:
        header = replace(header, **one)  # type: ignore[arg-type]
    return header.pack() + data[HEADER_BYTES:]


def _other_payload(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change the payload, under right checksums, and keep id and MAC."""
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    payload = rng.randbytes(header.name.raw_bytes)
    total = payload_sum([payload])
    header = replace(header, codec=Codec.NONE, stored_bytes=len(payload), raw_sum=total, stored_sum=total)
    return (header.pack() + payload).ljust(object_bytes(len(payload)), b"\0")


def _bits(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(rng.choice((HEADER_BYTES, len(data))))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _length(rng: random.Random, data: bytes, other: bytes) -> bytes:
    length = rng.randrange(2 * len(data))
    return data[:length].ljust(length, b"\0")


def _spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.choice((HEADER_BYTES, rng.randrange(len(data))))
    return other[:at] + data[at:] if rng.random() < 0.5 else data[:at] + other[at:]


FORGERIES: Final[tuple[Forgery, ...]] = (_other_header, _other_payload, _bits, _length, _spliced)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.context.close()
    files.close()


@pytest.mark.requirement("S5", "P6", "I1", "T3")
@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.parametrize("seed", drawn(range(1)))
def test_whatever_lies_in_the_place_of_a_keyed_object_is_never_served_and_never_stays(
    files: Files, codec: Codec, seed: int
) -> None:
    """A store ends with an object that is served, unless the header names a key that another node may have."""
    rng, outcomes = random.Random(seed), Counter[str]()
    job, other = (files.stored(number, RAW_BYTES, codec, keys=KEYS) for number in (1, 4))
    data, theirs = files.path(job).read_bytes(), files.path(other).read_bytes()
    right = (IoOutcome.OK, pattern(RAW_BYTES, 1))
    wanted = {"forged", "corrupt", "header", "too_short", "unknown_key", "replaced forged", "replaced corrupt"}
    for number in rounds(100, lambda: wanted <= {*outcomes}):
        planted = rng.choice(FORGERIES)(rng, data, theirs)
        files.path(job).write_bytes(planted)
        if number % 2:
            read = files.read(job)
            assert read == right or read[0] is not IoOutcome.OK
            outcomes[read[0]] += 1
            if not files.path(job).exists():
                files.path(job).write_bytes(planted)
        answer = files.publish(files.job(1, RAW_BYTES, codec, keys=KEYS))
        if answer.outcome is IoOutcome.UNKNOWN_KEY:
            assert ObjectHeader.unpack(planted[:HEADER_BYTES]).key_id not in map(key_id, KEYS.keys)
            files.path(job).unlink()
            continue
        assert answer.outcome is IoOutcome.OK, answer
        outcomes[f"replaced {answer.replaced}"] += not answer.already_there
        assert files.read(job) == right
