"""Objects of a keyed directory: written with a MAC, and refused without the right one, on real files (P6, S5)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash
from kvdepot.core.object_keys import NO_KEYS, KeyRing, key_id
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    PLAIN_VERSION,
    Codec,
    ObjectDamageError,
    ObjectHeader,
    object_bytes,
    payload_sum,
)
from kvdepot.server.io import codecs
from kvdepot.server.io.jobs import PublishFile
from kvdepot.server.io.macs import mac_of, with_mac
from kvdepot.server.io.perform import perform
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_rig import MIB, PAGE, object_name, pattern
from tests.rigs.shared_files import Files

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
KEYED = KeyRing((NEW, OLD))
RAW_BYTES = 5 * PAGE + 7


def stored(files: Files, keys: KeyRing = KEYED, *, seed: int = 1, codec: Codec = Codec.NONE) -> PublishFile:
    """Publish an object with these keys. Return the job of a node with `KEYED`."""
    job = files.job(seed, RAW_BYTES, codec, keys=keys)
    answer = files.publish(job)
    assert (answer.outcome, answer.already_there) == (IoOutcome.OK, False), answer
    return replace(job, keys=KEYED)


def read(files: Files, job: PublishFile, keys: KeyRing) -> tuple[IoOutcome, bytes]:
    return files.read(replace(job, keys=keys))


def header_of(files: Files, job: PublishFile) -> ObjectHeader:
    return ObjectHeader.unpack(files.path(job).read_bytes()[:HEADER_BYTES])


def forged(data: bytes) -> bytes:
    """Other bytes under right checksums, as somebody writes them who has no key, and keeps id and MAC."""
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    payload = b"POISON" * header.name.raw_bytes
    payload = payload[: header.name.raw_bytes]
    total = payload_sum([payload])
    header = replace(header, codec=Codec.NONE, stored_bytes=len(payload), raw_sum=total, stored_sum=total)
    return (header.pack() + payload).ljust(object_bytes(len(payload)), b"\0")


@pytest.mark.requirement("S5", "P6")
@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.parametrize("raw_bytes", [1, PAGE, 3 * MIB + 5])
def test_what_was_published_with_a_key_is_read_back_with_it(files: Files, codec: Codec, raw_bytes: int) -> None:
    job = files.stored(1, raw_bytes, codec, keys=KEYED)
    assert files.read(job) == (IoOutcome.OK, pattern(raw_bytes, 1))
    assert perform(replace(files.read_job(job), extents=None), files.context).outcome is IoOutcome.OK
    header = header_of(files, job)
    assert header.key_id == key_id(NEW)


@pytest.mark.requirement("S5", "P6")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4], ids=lambda codec: codec.name)
def test_right_checksums_do_not_make_a_forged_object_a_hit(files: Files, codec: Codec) -> None:
    job = stored(files, codec=codec)
    data = forged(files.path(job).read_bytes())
    files.path(job).write_bytes(data)
    assert read(files, job, KEYED)[0] is IoOutcome.FORGED
    assert not files.path(job).exists()
    (aside,) = files.files(layout.QUARANTINE)
    assert aside.endswith(".forged.kvd") and (files.directory / aside).read_bytes() == data


@pytest.mark.requirement("S5", "P6")
def test_verifying_finds_the_forged_object_too(files: Files) -> None:
    job = stored(files)
    files.path(job).write_bytes(forged(files.path(job).read_bytes()))
    assert perform(replace(files.read_job(job), extents=None), files.context).outcome is IoOutcome.FORGED


def test_nothing_that_was_forged_reaches_a_codec(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    job = files.stored(1, MIB, Codec.BITSHUFFLE_LZ4, keys=KEYED)
    data = files.path(job).read_bytes()
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    assert header.codec is Codec.BITSHUFFLE_LZ4
    coded = bytes(header.stored_bytes)
    page = replace(header, stored_sum=payload_sum([coded])).pack()
    files.path(job).write_bytes((page + coded).ljust(len(data), b"\0"))
    monkeypatch.setattr(codecs, "decode", lambda *_: pytest.fail("decoded"))
    assert read(files, job, KEYED)[0] is IoOutcome.FORGED


@pytest.mark.requirement("S5", "P6")
def test_no_flipped_bit_of_header_or_payload_passes_under_right_checksums() -> None:
    """Of each byte one bit, and of the fields that a MAC concerns each bit."""
    payload = pattern(PAGE, 1)
    total = payload_sum([payload])
    header = ObjectHeader(object_name(1, len(payload)), Codec.NONE, len(payload), total, total, 0, 1_795_000_000)
    page = with_mac(header, [memoryview(payload)], KEYED).pack()
    _check(page, payload)
    bits = [8 * at + at % 8 for at in range(24, HEADER_BYTES)] + list(range(8 * 24, 8 * 208))
    for bit in bits:
        changed = bytearray(page)
        changed[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(ObjectDamageError):
            _check(_summed(changed), payload)
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1 << at % 8
        with pytest.raises(ObjectDamageError):
            _check(page, bytes(changed))


def _summed(page: bytearray) -> bytes:
    page[16:24] = xxhash.xxh3_64_intdigest(bytes(page[:16] + page[24:])).to_bytes(8, "little")
    return bytes(page)


def _check(page: bytes, payload: bytes) -> None:
    """Check what a reader checks, checksum of the payload apart: a forger has it right."""
    header = ObjectHeader.unpack(page)
    mac = mac_of(header, page, KEYED)
    assert mac is not None
    for _ in mac.over([memoryview(payload)]):
        pass
    mac.check(header)


@pytest.mark.requirement("S5", "P6")
def test_an_object_that_was_moved_to_another_name_is_no_hit(files: Files) -> None:
    """As it is, and with a header that says the other name."""
    job, other = stored(files, seed=1), stored(files, seed=4)
    data = files.path(job).read_bytes()
    files.path(other).write_bytes(data)
    assert read(files, other, KEYED)[0] is IoOutcome.IDENTITY
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    files.path(other).parent.mkdir(exist_ok=True)
    files.path(other).write_bytes(replace(header, name=other.name).pack() + data[HEADER_BYTES:])
    assert read(files, other, KEYED)[0] is IoOutcome.FORGED


@pytest.mark.requirement("S5", "P6")
def test_a_forged_object_is_not_left_alone_because_of_what_it_claims(files: Files) -> None:
    """A parent that differs is a client's word, if somebody with a key wrote it down."""
    job = stored(files)
    header = header_of(files, job)
    claimed = replace(header, name=replace(header.name, parent=b"another-parent.."))
    data = claimed.pack() + files.path(job).read_bytes()[HEADER_BYTES:]
    for keys in (KEYED, NO_KEYS):
        files.path(job).write_bytes(data)
        wanted = IoOutcome.FORGED if keys else IoOutcome.FOREIGN
        assert read(files, job, keys)[0] is wanted
        assert files.path(job).exists() is not bool(keys)
    files.path(job).write_bytes(data)
    again = files.publish(replace(job, temporary=".tmp/other-1.tmp"))
    assert (again.outcome, again.already_there) == (IoOutcome.OK, False)
    assert read(files, job, KEYED) == (IoOutcome.OK, pattern(RAW_BYTES, 1))


def test_one_with_other_claims_by_somebody_with_a_key_stays(files: Files) -> None:
    job = stored(files)
    wrong = replace(job, name=replace(job.name, parent=b"another-parent.."), temporary=".tmp/other-1.tmp")
    assert read(files, wrong, KEYED)[0] is IoOutcome.FOREIGN
    assert files.publish(wrong).outcome is IoOutcome.FOREIGN
    assert read(files, job, KEYED) == (IoOutcome.OK, pattern(RAW_BYTES, 1))


MISSES: dict[str, tuple[KeyRing, KeyRing, IoOutcome]] = {
    "no MAC": (NO_KEYS, KEYED, IoOutcome.UNKEYED),
    "reader without a key": (KEYED, NO_KEYS, IoOutcome.UNKNOWN_KEY),
    "reader with another key": (KEYED, KeyRing((OTHER,)), IoOutcome.UNKNOWN_KEY),
    "reader who has retired the key": (KeyRing((OLD,)), KeyRing((NEW,), (key_id(OLD),)), IoOutcome.UNKNOWN_KEY),
}


@pytest.mark.requirement("S5", "P6")
@pytest.mark.parametrize("case", MISSES)
def test_an_object_of_other_keys_is_a_miss_and_stays_where_it_is(files: Files, case: str) -> None:
    writer, reader, outcome = MISSES[case]
    job = stored(files, writer)
    before = files.path(job).stat()
    for _ in range(2):
        assert read(files, job, reader)[0] is outcome
        assert perform(replace(files.read_job(job), extents=None, keys=reader), files.context).outcome is outcome
    after = files.path(job).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not files.files(layout.QUARANTINE)
    assert read(files, job, writer) == (IoOutcome.OK, pattern(RAW_BYTES, 1))


REPLACED: dict[str, tuple[KeyRing, KeyRing, bool]] = {
    "no MAC, by a node with a key": (NO_KEYS, KEYED, True),
    "a retired key": (KeyRing((OLD,)), KeyRing((NEW,), (key_id(OLD),)), True),
    "a key that may be another node's": (KeyRing((OLD,)), KeyRing((NEW,)), False),
    "a key, by a node without any": (KEYED, NO_KEYS, False),
}


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("case", REPLACED)
def test_a_node_replaces_what_nobody_can_use_and_nothing_else(files: Files, case: str) -> None:
    writer, publisher, replaced = REPLACED[case]
    job = stored(files, writer)
    inode = files.path(job).stat().st_ino
    answer = files.publish(replace(job, keys=publisher, temporary=".tmp/other-1.tmp"))
    assert answer.outcome is (IoOutcome.OK if replaced else IoOutcome.UNKNOWN_KEY)
    assert (files.path(job).stat().st_ino != inode) is replaced
    assert read(files, job, publisher if replaced else writer) == (IoOutcome.OK, pattern(RAW_BYTES, 1))
    assert not files.files(layout.QUARANTINE) and not files.files(layout.TEMPORARIES)


@pytest.mark.requirement("S5", "P6", "T3")
@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.parametrize("what", ["forged", "header alone", "cut", "rotten"])
def test_a_store_replaces_a_planted_file_that_has_the_id_of_a_key(files: Files, codec: Codec, what: str) -> None:
    """Ids of keys are public. A store that relied on a header alone would find the object there again and again."""
    job = stored(files, codec=codec)
    path = files.path(job)
    data = path.read_bytes()
    planted = {
        "forged": forged(data), "header alone": data[:HEADER_BYTES].ljust(len(data), b"\0"),
        "cut": data[: len(data) // 2], "rotten": _rotten(data),
    }  # fmt: skip
    path.write_bytes(planted[what])
    answer = files.publish(replace(job, temporary=".tmp/other-1.tmp"))
    assert (answer.outcome, answer.already_there) == (IoOutcome.OK, False)
    assert answer.replaced in (IoOutcome.FORGED, IoOutcome.CORRUPT, IoOutcome.TOO_SHORT)
    assert what != "forged" or answer.replaced is IoOutcome.FORGED
    assert len(files.files(layout.QUARANTINE)) == 1
    assert read(files, job, KEYED) == (IoOutcome.OK, pattern(RAW_BYTES, 1))
    again = files.publish(replace(job, temporary=".tmp/other-2.tmp"))
    assert (again.already_there, again.replaced) == (True, IoOutcome.OK)


def _rotten(data: bytes) -> bytes:
    at = HEADER_BYTES + 100
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.requirement("T3")
def test_an_object_of_a_key_for_reading_is_already_there(files: Files) -> None:
    job = stored(files, KeyRing((OLD,)))
    os.utime(files.path(job), (1_000, 1_000))
    answer = files.publish(replace(job, temporary=".tmp/other-1.tmp"))
    assert (answer.outcome, answer.already_there) == (IoOutcome.OK, True)
    assert header_of(files, job).key_id == key_id(OLD)


def test_without_keys_an_object_is_written_as_before_there_were_any(files: Files) -> None:
    job = stored(files, NO_KEYS)
    page = files.path(job).read_bytes()[:HEADER_BYTES]
    assert int.from_bytes(page[8:12], "little") == PLAIN_VERSION
    assert not any(page[160:])


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], IoOutcome]] = {
    "cut": (lambda data: data[: len(data) // 2], IoOutcome.TOO_SHORT),
    "bit of the payload": (lambda data: data[:9_000] + bytes([data[9_000] ^ 1]) + data[9_001:], IoOutcome.CORRUPT),
    "bit of the MAC": (lambda data: data[:170] + bytes([data[170] ^ 1]) + data[171:], IoOutcome.HEADER),
}


@pytest.mark.requirement("S5", "P6")
@pytest.mark.parametrize("damage", DAMAGES)
def test_rot_is_told_apart_from_forgery(files: Files, damage: str) -> None:
    change, outcome = DAMAGES[damage]
    job = stored(files)
    files.path(job).write_bytes(change(files.path(job).read_bytes()))
    assert read(files, job, KEYED)[0] is outcome
