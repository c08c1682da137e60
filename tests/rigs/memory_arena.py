"""An arena in memory, for copies that need no daemon."""

from __future__ import annotations

import mmap
import os
from typing import Final
from weakref import WeakKeyDictionary

from kvdepot.client.arena_map import ArenaMap
from kvdepot.core.arena import ArenaLayout, GenerationsHeader, Superblock, generations

ARENA_BYTES: Final = 16 << 20
_granted: WeakKeyDictionary[ArenaMap, memoryview] = WeakKeyDictionary()


def make_arena(size_bytes: int = ARENA_BYTES, arena_id: int = 7) -> tuple[ArenaMap, int]:
    """Return an arena whose data has `size_bytes`, and the descriptor of the data."""
    rows = 1024
    layout = ArenaLayout.plan(ArenaLayout.plan(64 << 20, rows, rows).overhead_bytes + size_bytes, rows, rows)
    tables, column, data = arena_files(layout, arena_id)
    made = ArenaMap(data, column, layout.data_bytes)
    _granted[made] = generations(memoryview(mmap.mmap(column, layout.generations_bytes)), rows)
    os.close(tables)
    os.close(column)
    return made, data


def granted(arena: ArenaMap) -> memoryview:
    """Return the generations of an arena of `make_arena`, writable, as the daemon has them."""
    return _granted[arena]


def arena_files(layout: ArenaLayout, arena_id: int) -> tuple[int, int, int]:
    """Return descriptors of the tables, the generations and the data. The first two have their first pages."""
    tables, column, data = os.memfd_create("tables"), os.memfd_create("generations"), os.memfd_create("data")
    os.ftruncate(tables, layout.tables_bytes)
    os.ftruncate(column, layout.generations_bytes)
    os.ftruncate(data, layout.data_bytes)
    os.pwrite(tables, Superblock(arena_id, layout, 1, b"\0" * 16).pack(), 0)
    os.pwrite(column, GenerationsHeader(arena_id, layout.rows).pack(), 0)
    return tables, column, data
