"""The codecs: a raw payload to its stored form and back, within lengths that the caller sets.

The stored form is docs/formats/object.md's, "Payload". Both directions write into memory of the
caller's and take at most a slice of their own. `Codec.NONE` is no business of this module: those
bytes are moved, never coded. numpy comes in with the bit-shuffling codec's library alone, at its
first use, because a worker of a tier without it should stay small.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvdepot.core.objectfile import Codec
from kvdepot.server.storage.base import IoOutcome

SLICE_BYTES: Final = 1 << 20
"""Raw bytes of a slice: part of the format. Small enough for a core's cache, large enough for a codec."""
_LENGTH = struct.Struct("<I")
_CHUNK_HEADER = struct.Struct("<BBBBIII")  # of Blosc 1: format, codec format, flags, element size, raw, block, stored
_CHUNK_FORMAT = 2
_CHUNK_LZ4_FORMAT = 1
_CHUNK_FLAGS = frozenset({0x24, 0x34})  # LZ4 (1 << 5) and bit shuffle (4), with or without split blocks (0x10)
_ELEMENT_BYTES = 2
_LEVEL = 5

Encode = Callable[[memoryview], bytes]
Decode = Callable[[memoryview, memoryview], bool]


def encode(codec: Codec, raw: Sequence[memoryview], into: memoryview) -> int:
    """Fill `into` with the stored form of the raw parts, in order; how many bytes that are.

    0: it does not fit there, and `into` holds anything. The caller passes `worth_bytes_max` of the raw
    length and stores with `Codec.NONE` then.
    """
    encode_slice, _ = _coders(codec)
    end = 0
    for pieces in _slices(raw):
        piece = _joined(pieces)
        coded = encode_slice(piece)
        stored = coded if len(coded) < len(piece) else piece
        start, end = end + _LENGTH.size, end + _LENGTH.size + len(stored)
        if end > len(into):
            return 0
        _LENGTH.pack_into(into, start - _LENGTH.size, len(stored))
        into[start:end] = stored
    return end


def decode(codec: Codec, stored: memoryview, raw: Sequence[memoryview]) -> IoOutcome:
    """Fill the raw parts, whose lengths together are the raw length, from exactly `stored`.

    OK, or CODEC for anything that is not the stored form of so many bytes; the parts then hold anything.
    """
    _, decode_slice = _coders(codec)
    at = 0
    for pieces in _slices(raw):
        if at + _LENGTH.size > len(stored):
            return IoOutcome.CODEC
        (length,) = _LENGTH.unpack_from(stored, at)
        at += _LENGTH.size
        if not _fill(decode_slice, stored[at : at + length], length, pieces):
            return IoOutcome.CODEC
        at += length
    return IoOutcome.OK if at == len(stored) else IoOutcome.CODEC


def _fill(decode_slice: Decode, stored: memoryview, length: int, pieces: list[memoryview]) -> bool:
    """Decode one slice into the places it belongs to, nearly always one. Return whether the bytes were a slice."""
    raw_bytes = sum(map(len, pieces))
    if len(stored) != length or not 0 < length <= raw_bytes:
        return False
    target = pieces[0] if len(pieces) == 1 else memoryview(bytearray(raw_bytes))
    if length == raw_bytes:
        target[:] = stored
    elif not decode_slice(stored, target):
        return False
    if len(pieces) > 1:
        start = 0
        for piece in pieces:
            piece[:] = target[start : start + len(piece)]
            start += len(piece)
    return True


def _slices(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the parts, in order, into slices of SLICE_BYTES. Yield each slice as the places that it lies in."""
    pieces: list[memoryview] = []
    room = SLICE_BYTES
    for part in parts:
        start = 0
        while start < len(part):
            piece = part[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield pieces
                pieces, room = [], SLICE_BYTES
    if pieces:
        yield pieces


def _joined(pieces: list[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _coders(codec: Codec) -> tuple[Encode, Decode]:
    if codec is Codec.LZ4:
        return _lz4()
    if codec is Codec.BITSHUFFLE_LZ4:
        return _bitshuffle()
    raise ValueError(f"payloads of codec {codec!r} are moved, not coded")


def _lz4() -> tuple[Encode, Decode]:
    from lz4 import block

    def encode_slice(raw: memoryview) -> bytes:
        stored: bytes = block.compress(raw, store_size=False)
        return stored

    def decode_slice(stored: memoryview, raw: memoryview) -> bool:
        try:
            decoded = block.decompress(stored, uncompressed_size=len(raw))
        except block.LZ4BlockError:
            return False
        if len(decoded) != len(raw):
            return False
        raw[:] = decoded
        return True

    return encode_slice, decode_slice


def _bitshuffle() -> tuple[Encode, Decode]:
    from numcodecs import blosc

    blosc.use_threads = False  # a worker is one thread; the pool decides how many there are

    def encode_slice(raw: memoryview) -> bytes:
        stored: bytes = blosc.compress(raw, b"lz4", _LEVEL, blosc.BITSHUFFLE, 0, _ELEMENT_BYTES)
        return stored

    def decode_slice(stored: memoryview, raw: memoryview) -> bool:
        if not _is_chunk(stored, len(raw)):
            return False
        try:
            blosc.decompress(stored, raw)
        except (RuntimeError, ValueError):
            return False
        return True

    return encode_slice, decode_slice


def _is_chunk(stored: memoryview, raw_bytes: int) -> bool:
    """Return whether the header of a chunk has exactly the lengths that are known.

    The library believes a chunk's own lengths. So it only gets chunks whose lengths are the known ones.
    """
    if len(stored) < _CHUNK_HEADER.size:
        return False
    version, codec_version, flags, element_bytes, raw, block, length = _CHUNK_HEADER.unpack_from(stored)
    return (
        (version, codec_version, element_bytes) == (_CHUNK_FORMAT, _CHUNK_LZ4_FORMAT, _ELEMENT_BYTES)
        and flags in _CHUNK_FLAGS
        and (raw, length) == (raw_bytes, len(stored))
        and 0 < block <= raw_bytes
    )
