"""The codecs: any payload comes back, any bytes are refused within the caller's lengths (P6: no bombs)."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.objectfile import Codec
from kvdepot.server.io.codecs import SLICE_BYTES, decode, encode
from kvdepot.server.storage.base import IoOutcome

CODECS = [codec for codec in Codec if codec is not Codec.NONE]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def bf16_like(words: int, seed: int) -> bytes:
    """Random mantissas under few exponents: what a bit shuffle is for."""
    draw = random.Random(seed)
    return b"".join(
        struct.pack("<H", draw.choice((0x3E80, 0x3F00, 0xBF00)) | draw.randrange(128)) for _ in range(words)
    )


def encoded(codec: Codec, raw: bytes, room: int | None = None) -> bytes:
    into = bytearray(len(raw) + 4 * (len(raw) // SLICE_BYTES + 1) if room is None else room)
    return bytes(into[: encode(codec, [memoryview(raw)], memoryview(into))])


def decoded(codec: Codec, stored: bytes, raw_bytes: int) -> tuple[IoOutcome, bytes]:
    raw = bytearray(raw_bytes)
    return decode(codec, memoryview(stored), [memoryview(raw)]), bytes(raw)


def cut(buffer: bytearray, places: list[int]) -> list[memoryview]:
    borders = [0, *sorted(place % (len(buffer) + 1) for place in places), len(buffer)]
    return [memoryview(buffer)[start:end] for start, end in pairwise(borders)]


payloads = st.binary(min_size=1, max_size=9000) | st.builds(bf16_like, st.integers(1, 3000), st.integers(0, 9))


@each_codec
@given(raw=payloads)
def test_any_payload_comes_back(codec: Codec, raw: bytes) -> None:
    assert decoded(codec, encoded(codec, raw), len(raw)) == (IoOutcome.OK, raw)


@each_codec
@pytest.mark.parametrize("extra", [-1, 0, 1, 4097])
def test_payloads_around_slice_borders_come_back_however_they_are_cut(codec: Codec, extra: int) -> None:
    draw = random.Random(extra)
    for slices in (1, 2):
        raw = bytearray((bf16_like(1 << 13, 1) * 256)[: slices * SLICE_BYTES + extra])
        into = bytearray(len(raw))
        for places in ([], [1], [SLICE_BYTES], [draw.randrange(len(raw)) for _ in range(4)]):
            stored_bytes = encode(codec, cut(raw, places), memoryview(into))
            assert 0 < stored_bytes < len(raw)
            back = bytearray(len(raw))
            targets = cut(back, [place // 2 for place in places])
            assert decode(codec, memoryview(into)[:stored_bytes], targets) is IoOutcome.OK
            assert back == raw


@each_codec
def test_what_does_not_shrink_is_kept_as_it_is_and_never_grows_but_by_the_lengths(codec: Codec) -> None:
    noise = random.Random(5).randbytes(SLICE_BYTES + 10)
    stored = encoded(codec, noise)
    assert len(stored) == len(noise) + 8
    assert decoded(codec, stored, len(noise)) == (IoOutcome.OK, noise)


@each_codec
@given(room=st.integers(0, 6000))
def test_encoding_stays_within_its_room(codec: Codec, room: int) -> None:
    raw = bf16_like(2048, 3)
    whole = encoded(codec, raw)
    assert encoded(codec, raw, room) == (whole if room >= len(whole) else b"")


def test_the_bit_shuffle_shrinks_what_lz4_alone_does_not() -> None:
    raw = bf16_like(1 << 17, 7)
    assert len(encoded(Codec.LZ4, raw)) > 0.95 * len(raw)
    assert len(encoded(Codec.BITSHUFFLE_LZ4, raw)) < 0.75 * len(raw)


@pytest.mark.requirement("P6")
@each_codec
@given(stored=st.binary(max_size=3000), raw_bytes=st.integers(0, 5000))
def test_any_bytes_are_an_outcome(codec: Codec, stored: bytes, raw_bytes: int) -> None:
    assert decoded(codec, stored, raw_bytes)[0] in (IoOutcome.OK, IoOutcome.CODEC)


@pytest.mark.requirement("P6")
@each_codec
@given(raw=payloads, wrong=st.integers(0, 10_000))
def test_another_raw_length_is_refused(codec: Codec, raw: bytes, wrong: int) -> None:
    if wrong != len(raw):
        assert decoded(codec, encoded(codec, raw), wrong)[0] is IoOutcome.CODEC


@pytest.mark.requirement("P6")
@each_codec
@given(length=st.integers(0, 10_000), tail=st.binary(max_size=20))
def test_a_cut_or_prolonged_payload_is_refused(codec: Codec, length: int, tail: bytes) -> None:
    raw = bf16_like(4096, 2)
    whole = encoded(codec, raw)
    if length < len(whole):
        assert decoded(codec, whole[:length], len(raw))[0] is IoOutcome.CODEC
    if tail:
        assert decoded(codec, whole + tail, len(raw))[0] is IoOutcome.CODEC


@pytest.mark.requirement("P6")
@each_codec
def test_damaged_payloads_are_an_outcome_and_touch_nothing_beside_the_target(codec: Codec) -> None:
    draw = random.Random(f"damage-{codec}")
    raw = bf16_like(20_000, 4)
    whole = encoded(codec, raw)
    margin = b"\xa5" * 64
    for _ in range(3000):
        stored = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8, 64))):
            stored[draw.randrange(4, draw.choice((64, len(stored))))] = draw.randrange(256)
        around = bytearray(margin + bytes(len(raw)) + margin)
        outcome = decode(codec, memoryview(stored), [memoryview(around)[64 : 64 + len(raw)]])
        assert outcome in (IoOutcome.OK, IoOutcome.CODEC)
        assert around[:64] == margin == around[-64:]


@pytest.mark.requirement("P6")
@each_codec
@pytest.mark.parametrize("length", [0, 1, 5, 15, 16, 0xFFFF_FFFF, 0x8000_0000, 0x7FFF_FFFF])
def test_hostile_slice_lengths_cost_no_memory(codec: Codec, length: int) -> None:
    raw_bytes = 4 * SLICE_BYTES
    raw = bytearray(raw_bytes)
    hostile = struct.pack("<I", length) + struct.pack("<BBBBIII", 2, 1, 0x24, 2, 0xFFFF_FFFF, 1 << 30, length) * 4
    decode(codec, memoryview(hostile), [memoryview(raw)])  # imports the library
    tracemalloc.start()
    try:
        assert decode(codec, memoryview(hostile), [memoryview(raw)]) is IoOutcome.CODEC
        assert tracemalloc.get_traced_memory()[1] < 2 * SLICE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(0, "B", 3), (1, "B", 2), (2, "B", 0x04), (2, "B", 0x26), (3, "B", 4), (4, "I", 1 << 30), (4, "I", 0),
     (8, "I", 0), (8, "I", 1 << 31), (12, "I", 1 << 31), (12, "I", 16)],
)  # fmt: skip
def test_a_chunk_that_contradicts_what_is_known_never_reaches_its_library(offset: int, form: str, value: int) -> None:
    raw = bf16_like(4096, 6)
    stored = bytearray(encoded(Codec.BITSHUFFLE_LZ4, raw))
    struct.pack_into("<" + form, stored, 4 + offset, value)
    assert decoded(Codec.BITSHUFFLE_LZ4, bytes(stored), len(raw))[0] is IoOutcome.CODEC


@each_codec
def test_threads_of_a_worker_do_not_disturb_each_other(codec: Codec) -> None:
    payloads = [bf16_like(1 << 14, seed) * 20 for seed in range(4)]

    def there_and_back(raw: bytes) -> bool:
        return all(decoded(codec, encoded(codec, raw), len(raw)) == (IoOutcome.OK, raw) for _ in range(10))

    with ThreadPoolExecutor(len(payloads)) as pool:
        assert all(pool.map(there_and_back, payloads))


def test_codec_none_is_moved_not_coded() -> None:
    with pytest.raises(ValueError, match="moved"):
        encode(Codec.NONE, [], memoryview(b""))


@pytest.mark.parametrize(("used", "loaded"), [("LZ4", False), ("BITSHUFFLE_LZ4", True)])
def test_a_worker_loads_numpy_only_for_the_bit_shuffle(used: str, loaded: bool) -> None:
    program = (
        "import sys; from kvdepot.core.objectfile import Codec; from kvdepot.server.io.codecs import encode\n"
        "assert 'numpy' not in sys.modules\n"
        f"encode(Codec.{used}, [memoryview(bytes(9000))], memoryview(bytearray(9000)))\n"
        f"assert ('numpy' in sys.modules) is {loaded}"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
