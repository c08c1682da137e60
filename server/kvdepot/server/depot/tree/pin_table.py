"""Pins of objects in RAM, by row of the extent table: a pinned object is not evicted.

Two parties pin, each with its own table: prefetch, for requests that have not acquired yet, and operators. A pin keeps
an object from being evicted, and does no more: the object is dropped like any other if it is damaged or unreachable.
An object that leaves the index loses its pins (`PinTable.dropped`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.server.depot.counters import Counters

PartOf = Callable[[int], int]
Tokens = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[np.int64]

_ROW_BITS: Final = np.uint64(32)
_USED: Final = "prefetch_used"
_WASTED: Final = "prefetch_wasted"


class PrefetchPins:
    """Count the requests that pin each object. An object counts once, however many requests pin it.

    A request keeps a *token* of a row. The token tells the object from a later one in the same row. An object without
    requests stays pinned until `unpin` reaches it: to offer thousands of objects to the evictor takes time, and is
    done in slices.

    Counters: `prefetched_*` (pinned first), `prefetch_used_*` (acquired), `prefetch_wasted_*.<reason>` (unpinned
    without an acquire), each as objects and bytes.
    """

    def __init__(self, rows: int, counters: Counters, part_of: PartOf, parts: int) -> None:
        self._counters = counters
        self._part_of = part_of
        self._bytes = [0] * parts
        self.pinned = bytearray(rows)  # by row: whether its object is
        self._requests = np.zeros(rows, np.uint32)  # by row: how many pin it
        self._serials = np.zeros(rows, np.uint32)
        self._sizes = np.zeros(rows, np.int64)  # bytes of the arena
        self._used = np.zeros(rows, np.bool_)
        self._leaving: deque[int] = deque()  # rows without requests
        self.objects = 0

    @property
    def bytes(self) -> int:
        return sum(self._bytes)

    def bytes_in(self, part: int) -> int:
        """Return what is pinned in a part of RAM."""
        return self._bytes[part]

    @staticmethod
    def row_of(token: int) -> int:
        return token >> int(_ROW_BITS)

    def begin(self, row: int, size_bytes: int) -> int:
        """Pin an object that is about to be read, for one request. Return the token."""
        self._serials[row] += 1
        self._requests[row] = 1
        self._used[row] = False
        self._sizes[row] = size_bytes
        self.pinned[row] = True
        self._add(1, self._part_of(row), size_bytes)
        self._count("prefetched", "", 1, size_bytes)
        return int(self._tokens(np.array([row]))[0])

    def join(self, rows: RowNumbers) -> Tokens:
        """Pin those of the rows that other requests pin, for one more request."""
        joined = rows[self._requests[rows] > 0]
        np.add.at(self._requests, joined, 1)
        return self._tokens(joined)

    def use(self, rows: RowNumbers) -> None:
        """Note that an acquire got these objects."""
        fresh = np.unique(rows[(self._requests[rows] > 0) & ~self._used[rows]])
        self._used[fresh] = True
        self._count(_USED, "", len(fresh), int(self._sizes[fresh].sum()))

    def release(self, tokens: Tokens, reason: str) -> RowNumbers:
        """End the pin of each token. Return the rows without requests; unused ones are wasted for this reason.

        A token that occurs twice ends two pins: an object that two tiers were to give is pinned twice.
        """
        rows = (tokens >> _ROW_BITS).astype(np.int64)
        rows = rows[(self._tokens(rows) == tokens) & (self._requests[rows] > 0)]
        np.subtract.at(self._requests, rows, 1)
        gone: RowNumbers = np.unique(rows[self._requests[rows] == 0])
        self._end(gone, reason)
        self._leaving.extend(gone.tolist())
        return gone

    def unpin(self, limit: int) -> Iterator[int]:
        """Unpin at most `limit` objects without requests. Yield the row of each."""
        done = 0
        while self._leaving and done < limit:
            row = self._leaving.popleft()
            if self._requests[row] or not self.pinned[row]:
                continue
            done += 1
            self.pinned[row] = False
            yield row

    def dropped(self, row: int) -> None:
        """Unpin an object that has left the index: the row is free, or soon."""
        if not self.pinned[row]:
            return
        self.pinned[row] = False
        if self._requests[row]:
            self._requests[row] = 0
            self._end(np.array([row]), "lost")

    def _end(self, rows: RowNumbers, reason: str) -> None:
        if len(self._bytes) == 1:
            self._add(-len(rows), 0, -int(self._sizes[rows].sum()))
        else:
            for row in rows.tolist():
                self._add(-1, self._part_of(row), -int(self._sizes[row]))
        unused = rows[~self._used[rows]]
        if len(unused):
            self._count(_WASTED, f".{reason}", len(unused), int(self._sizes[unused].sum()))

    def _tokens(self, rows: RowNumbers) -> Tokens:
        tokens: Tokens = rows.astype(np.uint64) << _ROW_BITS | self._serials[rows]
        return tokens

    def _add(self, objects: int, part: int, size_bytes: int) -> None:
        self.objects += objects
        self._bytes[part] += size_bytes

    def _count(self, family: str, label: str, objects: int, size_bytes: int) -> None:
        self._counters.add(f"{family}_objects{label}", objects)
        self._counters.add(f"{family}_bytes{label}", size_bytes)


class UserPins:
    """Objects that operators have pinned, with what they take: `bytes` of the arena, `rows` of the extent table."""

    def __init__(self, rows: int, part_of: PartOf, parts: int) -> None:
        self._part_of = part_of
        self._bytes, self._rows_in = [0] * parts, [0] * parts
        self.pinned = bytearray(rows)  # by head row: whether its object is
        self._rows = np.zeros(rows, np.uint32)  # by head row: rows of the object
        self.sizes = np.zeros(rows, np.int64)  # by head row: bytes of the arena, 0 without a pin
        self.objects = 0

    @property
    def bytes(self) -> int:
        return sum(self._bytes)

    @property
    def rows(self) -> int:
        return sum(self._rows_in)

    def bytes_in(self, part: int) -> int:
        """Return what is pinned in a part of RAM."""
        return self._bytes[part]

    def rows_in(self, part: int) -> int:
        """Return how many rows the pinned objects of a part of RAM have."""
        return self._rows_in[part]

    def pin(self, row: int, size_bytes: int, rows: int) -> None:
        self.pinned[row] = True
        self.sizes[row] = size_bytes
        self._rows[row] = rows
        self._add(row, 1, size_bytes, rows)

    def unpin(self, row: int) -> None:
        """Unpin a pinned object."""
        self.pinned[row] = False
        self._add(row, -1, -int(self.sizes[row]), -int(self._rows[row]))
        self.sizes[row] = 0

    def dropped(self, row: int) -> None:
        """Unpin an object that has left the index."""
        if self.pinned[row]:
            self.unpin(row)

    def _add(self, row: int, objects: int, size_bytes: int, rows: int) -> None:
        part = self._part_of(row)
        self.objects += objects
        self._bytes[part] += size_bytes
        self._rows_in[part] += rows


class PinTable:
    """All pins of RAM."""

    def __init__(self, rows: int, counters: Counters, part_of: PartOf, parts: int) -> None:
        """Make an empty table for so many rows of the extent table. `part_of`: which of the `parts` a row is in."""
        self.prefetch = PrefetchPins(rows, counters, part_of, parts)
        self.user = UserPins(rows, part_of, parts)

    def dropped(self, row: int) -> None:
        """End the pins of an object that has left the index."""
        self.prefetch.dropped(row)
        self.user.dropped(row)
