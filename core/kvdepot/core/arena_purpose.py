"""The purpose of an arena: a digest of what the operator asked for, in the superblock's page.

An arena of another size than the configuration has now is kept if its purpose is the same: then only the tiers below
RAM have changed. It has a checksum of its own, and versions that do not know it leave it as it is.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

NO_PURPOSE: Final = bytes(16)
_OFFSET: Final = 2048
"""After the superblock, whatever number of parts it has."""
_PURPOSE: Final = struct.Struct("<8s16s")
_MAGIC: Final = b"KVDASKED"


def with_purpose(superblock: bytes, purpose: bytes, arena_id: int) -> bytes:
    """Return the bytes of a superblock, with this purpose of 16 bytes after them."""
    if purpose == NO_PURPOSE:
        return superblock
    packed = _PURPOSE.pack(_MAGIC, purpose)
    return superblock.ljust(_OFFSET, b"\0") + packed + _checksum(packed, arena_id)


def purpose_in(page: bytes | memoryview, arena_id: int) -> bytes:
    """Return the purpose in the page of a superblock; NO_PURPOSE if it has none, or a damaged one."""
    end = _OFFSET + _PURPOSE.size
    packed = bytes(page[_OFFSET:end])
    if bytes(page[end : end + 8]) != _checksum(packed, arena_id) or not packed.startswith(_MAGIC):
        return NO_PURPOSE
    return packed[len(_MAGIC) :]


def _checksum(packed: bytes, arena_id: int) -> bytes:
    return xxhash.xxh3_64_intdigest(packed, arena_id).to_bytes(8, "little")
