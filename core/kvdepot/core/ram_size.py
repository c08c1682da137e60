"""How the daemon's memory divides into processes, tables and data: `[ram] capacity` includes everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvdepot.core.arena import FILE_ALIGN_BYTES, ArenaLayout

PROCESS_RESERVE_BYTES: Final = 160 << 20
"""Private memory of the daemon and its checksum worker (docs/adr/0005).

Measured 2026-11-21: 50 MiB with an empty index, 7 more with 60,000 objects; the rest is for 4 MiB messages in flight.
"""
RESERVE_DIVISOR: Final = 64
"""Per byte of capacity: two page tables of 8 bytes a page (measured 14 MiB for 3.8 GiB), and the index's nodes."""

ROOM_ALIGN_BYTES: Final = 32 << 20
"""Of the end of what is used of a part. Engines pin whole pieces of this size."""

_GIB: Final = 1 << 30


def arena_bytes_of(capacity_bytes: int, tiers_reserve_bytes: int = 0) -> int:
    """Return the size of the arena file within a capacity.

    `tiers_reserve_bytes`: private memory of the tiers below RAM.
    """
    arena = capacity_bytes - PROCESS_RESERVE_BYTES - tiers_reserve_bytes - capacity_bytes // RESERVE_DIVISOR
    return arena // FILE_ALIGN_BYTES * FILE_ALIGN_BYTES


def kept_parts(found: ArenaLayout, asked: ArenaLayout, freed_from: Sequence[int] = ()) -> tuple[int, ...]:
    """Return how many bytes of each part of an arena may be used where another size is asked for.

    All of a part that is smaller than asked. Of a larger one as much as is asked for, in whole pieces, so that the
    daemon keeps within its capacity. Empty if the arena cannot be used: other parts, or nothing is left of one.

    `freed_from`: nothing from this byte of each part on may be used again. Empty: all may.
    """
    if len(found.parts) != len(asked.parts):
        return ()
    rooms = [min(one, other) for one, other in zip(found.parts, asked.parts, strict=True)]
    rooms[rooms.index(max(rooms))] -= max(found.overhead_bytes - asked.overhead_bytes, 0)  # larger tables
    for part, whole in enumerate(found.parts):
        if rooms[part] < whole:
            rooms[part] -= rooms[part] % ROOM_ALIGN_BYTES
    if freed_from:
        rooms = [min(one, other) for one, other in zip(rooms, freed_from, strict=True)]
    return tuple(rooms) if min(rooms) > 0 else ()


def capacity_for(data_bytes: int) -> int:
    """Return the least whole number of GiB, in bytes, whose arena has room for `data_bytes` of objects."""
    capacity = _GIB
    while (missing := data_bytes - ArenaLayout.plan(arena_bytes_of(capacity)).data_bytes) > 0:
        capacity += -(-missing // _GIB) * _GIB
    return capacity
