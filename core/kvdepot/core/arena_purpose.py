"""What follows the superblock in its page: why an arena has this size, and what of its memory was freed since.

The purpose is a digest of what the operator asked for. An arena of another size than the configuration has now is kept
if its purpose is the same: then only the tiers below RAM have changed. Purpose and freed memory have a checksum each.
Versions that do not know them leave them as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import xxhash

NO_PURPOSE: Final = bytes(16)
_OFFSET: Final = 2048
"""After the superblock, whatever number of parts it has."""
_PURPOSE: Final = struct.Struct("<8s16s")
_MAGIC: Final = b"KVDASKED"
_FREED_OFFSET: Final = _OFFSET + _PURPOSE.size + 8
_FREED: Final = struct.Struct("<8sQ")
_FREED_MAGIC: Final = b"KVDFREED"


def with_purpose(superblock: bytes, purpose: bytes, freed_from: Sequence[int], arena_id: int) -> bytes:
    """Return the bytes of a superblock, with this purpose of 16 bytes after them.

    `freed_from`: for each part of the data, from which byte on its memory was freed. Empty: nothing was.
    """
    if purpose == NO_PURPOSE:
        return superblock
    page = superblock.ljust(_OFFSET, b"\0") + _summed(_PURPOSE.pack(_MAGIC, purpose), arena_id)
    if not freed_from:
        return page + bytes(_FREED.size)
    packed = _FREED.pack(_FREED_MAGIC, len(freed_from)) + struct.pack(f"<{len(freed_from)}Q", *freed_from)
    return page + _summed(packed, arena_id)


def purpose_in(page: bytes | memoryview, arena_id: int) -> bytes:
    """Return the purpose in the page of a superblock; NO_PURPOSE if it has none, or a damaged one."""
    packed = bytes(page[_OFFSET : _OFFSET + _PURPOSE.size + 8])
    if not packed.startswith(_MAGIC) or packed != _summed(packed[:-8], arena_id):
        return NO_PURPOSE
    return packed[len(_MAGIC) : -8]


def freed_in(page: bytes | memoryview, arena_id: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Return from which byte on the memory of each part was freed; empty if the page does not say so of these parts."""
    packed = bytes(page[_FREED_OFFSET : _FREED_OFFSET + _FREED.size + 8 * len(parts) + 8])
    if not packed.startswith(_FREED.pack(_FREED_MAGIC, len(parts))) or packed != _summed(packed[:-8], arena_id):
        return ()
    freed_from = struct.unpack_from(f"<{len(parts)}Q", packed, _FREED.size)
    return tuple(map(min, zip(freed_from, parts, strict=True)))


def _summed(packed: bytes, arena_id: int) -> bytes:
    return packed + xxhash.xxh3_64_intdigest(packed, arena_id).to_bytes(8, "little")
