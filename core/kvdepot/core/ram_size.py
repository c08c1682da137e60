"""How the daemon's memory divides into processes, tables and data: `[ram] capacity` includes everything."""

from __future__ import annotations

from typing import Final

from kvdepot.core.arena import FILE_ALIGN_BYTES, ArenaLayout

PROCESS_RESERVE_BYTES: Final = 160 << 20
"""Private memory of the daemon and its checksum worker (docs/adr/0005).

Measured 2026-11-21: 50 MiB with an empty index, 7 more with 60,000 objects; the rest is for 4 MiB messages in flight.
"""
RESERVE_DIVISOR: Final = 64
"""Per byte of capacity: two page tables of 8 bytes a page (measured 14 MiB for 3.8 GiB), and the index's nodes."""

_GIB: Final = 1 << 30


def arena_bytes_of(capacity_bytes: int, tiers_reserve_bytes: int = 0) -> int:
    """Return the size of the arena file within a capacity.

    `tiers_reserve_bytes`: private memory of the tiers below RAM.
    """
    arena = capacity_bytes - PROCESS_RESERVE_BYTES - tiers_reserve_bytes - capacity_bytes // RESERVE_DIVISOR
    return arena // FILE_ALIGN_BYTES * FILE_ALIGN_BYTES


def capacity_for(data_bytes: int) -> int:
    """Return the least whole number of GiB, in bytes, whose arena has room for `data_bytes` of objects."""
    capacity = _GIB
    while (missing := data_bytes - ArenaLayout.plan(arena_bytes_of(capacity)).data_bytes) > 0:
        capacity += -(-missing // _GIB) * _GIB
    return capacity
