"""The objects of tests/golden/object-v1 and -v2, as values; the files were written once and are never rewritten."""

from __future__ import annotations

import struct
from hashlib import shake_128
from pathlib import Path

from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.objectfile import (
    Codec,
    ObjectHeader,
    ObjectName,
    object_bytes,
    payload_sum,
    worth_bytes_max,
)
from kvdepot.server.io.codecs import SLICE_BYTES, encode
from kvdepot.server.io.macs import with_mac

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "object-v1"
FILES = {codec: FOLDER / f"{codec.name.lower().replace('_', '-')}.kvd" for codec in Codec}
KEYED_FILES = {codec: FOLDER.with_name("object-v2") / path.name for codec, path in FILES.items()}
KEYS = KeyRing((bytes(range(32)),))
"""Of the objects of version 2."""


def golden_payload(codec: Codec) -> bytes:
    """Codec none: an odd length. The others: a slice that shrinks, and a short one that does not."""
    noise = shake_128(b"kvdepot golden object").digest(6_001)
    if codec is Codec.NONE:
        return noise
    period = b"".join(struct.pack("<H", 0x3F00 | index * 37 & 0xFF) for index in range(509))
    return (period * (SLICE_BYTES // len(period) + 1))[:SLICE_BYTES] + noise


def golden_name(codec: Codec) -> ObjectName:
    return ObjectName(
        namespace=bytes(range(16)), key=bytes(range(16, 32)), parent=bytes(range(32, 48)),
        kind=1 + codec, boundary_tokens=768, raw_bytes=len(golden_payload(codec)),
    )  # fmt: skip


def stored_form(codec: Codec, raw: bytes) -> bytes:
    if codec is Codec.NONE:
        return raw
    into = bytearray(worth_bytes_max(len(raw)))
    return bytes(into[: encode(codec, [memoryview(raw)], memoryview(into))])


def golden_object(codec: Codec, keys: KeyRing = NO_KEYS) -> bytes:
    """The whole file, as the code of today writes it."""
    raw = golden_payload(codec)
    stored = stored_form(codec, raw)
    header = ObjectHeader(
        golden_name(codec), codec, len(stored), payload_sum([raw]), payload_sum([stored]),
        sequence=0x0102030405060708, created_at=1_795_000_000,
    )  # fmt: skip
    header = with_mac(header, [memoryview(stored)], keys)
    return (header.pack() + stored).ljust(object_bytes(len(stored)), b"\0")
