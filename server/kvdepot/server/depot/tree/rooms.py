"""Rooms of RAM. A room is one part of the data: its free bytes, its share of the rows, the namespaces that lie there.

With one part there is one room, and all namespaces lie in it. With several, each belongs to a tenant, so that nobody
loses objects, or waits, because another tenant's part is full (docs/adr/0070). Offsets count over all parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent, ExtentAllocator
from kvdepot.core.arena import ArenaTables
from kvdepot.server.depot.tree.rows import Rows


class Room:
    """One part, or what may be used of it. `slots`: of the namespaces that lie there; None: all."""

    def __init__(
        self, number: int, start: int, part_bytes: int, size_bytes: int, rows: Rows, rows_max: int, *, alone: bool
    ) -> None:  # fmt: skip
        self.number = number
        self.start = start
        self.end = start + part_bytes
        self.size_bytes = size_bytes
        self.used_end = start + size_bytes
        """What was adopted may lie from here to `end`, while it is lent."""
        self.allocator = ExtentAllocator(start, size_bytes)
        self.slots: set[int] | None = None if alone else set()
        self.rows_max = rows_max
        self.rows_used = 0
        self.attention_bytes = 0
        """Reserved for attention by all sessions."""
        self.trimming = False
        """On the way from the high to the low watermark."""
        self._rows = rows

    @property
    def growing(self) -> bool:
        """Whether it is still being populated."""
        return self.allocator.ready_bytes < self.size_bytes

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    @property
    def free_rows(self) -> int:
        """Return how many more extents may lie here."""
        left, free = self.rows_max - self.rows_used, self._rows.free_count
        return left if left < free else free

    def allocate(self, size_bytes: int) -> list[Extent] | None:
        """Return extents, whose rows count from now on; None if bytes or rows are short. `Rooms.free` undoes it."""
        extents = self.allocator.allocate(size_bytes)
        if extents is None:
            return None
        if len(extents) > self.free_rows:
            for offset, length in extents:
                self.allocator.free(offset, length)
            return None
        self.rows_used += len(extents)
        return extents

    def has(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return which of these offsets lie here."""
        inside: npt.NDArray[np.bool_] = (offsets >= np.uint64(self.start)) & (offsets < np.uint64(self.end))
        return inside

    def contains(
        self, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        """Return which of these extents lie here as a whole."""
        inside = self.has(offsets)
        inside[inside] = lengths[inside] <= np.uint64(self.end) - offsets[inside]
        return inside


class Rooms:
    """All rooms. `tenants`: those of the parts, where there are several. A granule is the same everywhere."""

    def __init__(self, tables: ArenaTables, rows: Rows, tenants: Sequence[str]) -> None:
        layout = tables.layout
        several = len(layout.parts) > 1
        self._rooms = [
            Room(number, start, size, used, rows, rows.count * size // layout.data_bytes, alone=not several)
            for number, (start, size, used) in enumerate(
                zip(layout.part_starts, layout.parts, tables.room_bytes, strict=True)
            )
        ]
        self._starts = list(layout.part_starts)
        self._first = self._rooms[0]
        self._several = several
        self._numbers = {tenant: number for number, tenant in enumerate(sorted(tenants))} if several else {}
        self._of: dict[int, Room] = {}  # by namespace slot
        self._turn = 0
        self.granule_bytes = self._first.allocator.granule_bytes
        self.rounded = self._first.allocator.rounded

    def __iter__(self) -> Iterator[Room]:
        return iter(self._rooms)

    def __len__(self) -> int:
        return len(self._rooms)

    def __getitem__(self, number: int) -> Room:
        return self._rooms[number]

    @property
    def size_bytes(self) -> int:
        return sum(room.size_bytes for room in self._rooms)

    @property
    def ready_bytes(self) -> int:
        return sum(room.allocator.ready_bytes for room in self._rooms)

    @property
    def used_bytes(self) -> int:
        return sum(room.used_bytes for room in self._rooms)

    def in_turn(self) -> list[Room]:
        """Return all rooms, each time beginning with the next one."""
        self._turn = (self._turn + 1) % len(self._rooms)
        return self._rooms[self._turn :] + self._rooms[: self._turn]

    def at(self, offset: int) -> Room:
        """Return the room of an offset, the last one if it is outside the data."""
        return self._rooms[bisect_right(self._starts, offset) - 1] if self._several else self._first

    def of(self, slot: int) -> Room | None:
        """Return the room of a namespace; None if nobody knows yet whose it is."""
        return self._of.get(slot) if self._several else self._first

    def of_tenant(self, tenant: str) -> Room | None:
        """Return the part of a tenant; None where all lie in one."""
        return self._rooms[self._numbers[tenant]] if tenant in self._numbers else None

    def enter(self, slot: int, room: Room) -> None:
        """Note where a namespace lies."""
        self.leave(slot)
        self._of[slot] = room
        if room.slots is not None:
            room.slots.add(slot)

    def leave(self, slot: int) -> None:
        """Note that the slot has no namespace any more."""
        room = self._of.pop(slot, None)
        if room is not None and room.slots is not None:
            room.slots.discard(slot)

    def free(self, offset: int, length: int) -> None:
        """Give one extent back, with its row. Of one across the end, adoption has claimed what lies within."""
        room = self.at(offset)
        if room.used_end < offset + length <= room.end:
            length = room.used_end - offset
            if length <= 0:
                return
        room.allocator.free(offset, length)
        room.rows_used -= 1
