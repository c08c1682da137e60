"""An arena in memory, for copies that need no daemon."""

from __future__ import annotations

import os
from typing import Final

from kvdepot.client.arena_map import ArenaMap
from kvdepot.core.arena import ArenaLayout, Superblock

ARENA_BYTES: Final = 16 << 20


def make_arena(size_bytes: int = ARENA_BYTES, arena_id: int = 7) -> tuple[ArenaMap, int]:
    layout = ArenaLayout.plan(size_bytes, rows=1024, lent_rows=1024)
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, layout.size_bytes)
    os.pwrite(descriptor, Superblock(arena_id, layout, 1, b"\0" * 16).pack(), 0)
    return ArenaMap(descriptor), descriptor
