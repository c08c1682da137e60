"""Adopted objects whose path to the root is not known yet: it may lie on a disk tier that is still opening.

Their rows stay COMMITTED in the extent table, so that the next run judges them again. Their bytes stay claimed and
charged to their namespaces. No node has them: nothing finds, verifies, pins or serves them. An object leaves when it
gets its node, or when it is dropped (`RamTier.attach`, `RamTier.drop_detached`). It is dropped when an object of its
name is stored: of two objects of one name, the next run could keep neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.server.depot.tree.rows import Rows

_Numbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_NOTHING: Final = np.empty(0, np.int64)


class Detached:
    """Head rows by namespace slot, each namespace in the order of its paths.

    An object that left out of turn keeps its place in the order until its turn comes: `flags` knows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.flags: npt.NDArray[np.bool_] = np.zeros(rows.count, np.bool_)
        self._orders: dict[int, _Numbers] = {}  # by slot, parents first
        self._counts: dict[int, int] = {}  # by slot
        self._named: dict[int, tuple[_Words, _Words, _Numbers]] = {}  # by slot: sorted halves of keys, and their rows

    def __len__(self) -> int:
        return sum(self._counts.values())

    def count(self, slot: int) -> int:
        return self._counts.get(slot, 0)

    def set(self, heads: _Numbers) -> None:
        """Set which rows are detached. Call once, at adoption."""
        rows = self._rows
        ordered = heads[np.lexsort((rows.kinds[heads], rows.boundaries[heads]))]
        slots = rows.namespaces[ordered]
        halves = rows.keys.view("<u8").reshape(-1, 2)
        for slot in np.unique(slots).tolist():
            self._orders[slot] = of_slot = ordered[slots == slot]
            self._counts[slot] = len(of_slot)
            by_key = of_slot[np.lexsort((halves[of_slot, 1], halves[of_slot, 0]))]
            self._named[slot] = halves[by_key, 0], halves[by_key, 1], by_key
        self.flags[heads] = True

    def find(self, slot: int, key: bytes, kind: int) -> int:
        """Return the row of this name; NO_ROW: there is none."""
        if not self._counts.get(slot):
            return NO_ROW
        firsts, seconds, rows = self._named[slot]
        first, second = np.frombuffer(key, "<u8")
        start, end = np.searchsorted(firsts, first, "left"), np.searchsorted(firsts, first, "right")
        for at in range(start + np.searchsorted(seconds[start:end], second), end):
            if seconds[at] != second:
                break
            if self.flags[row := int(rows[at])] and self._rows.kind[row] == kind:
                return row
        return NO_ROW

    def first(self) -> int:
        """Return a row of which nothing detached is an ancestor; NO_ROW: there is none."""
        for slot in list(self._orders):
            if len(order := self._trimmed(slot)):
                return int(order[0])
        return NO_ROW

    def last(self, slots: Collection[int] | None) -> Iterator[int]:
        """Yield of each of these namespaces, or of all, a row that is no ancestor of anything detached."""
        for slot in list(self._orders) if slots is None else slots:
            if len(order := self._trimmed(slot)):
                yield int(order[-1])

    def remove(self, row: int) -> None:
        self.flags[row] = False
        self._counts[self._rows.namespace[row]] -= 1

    def _trimmed(self, slot: int) -> _Numbers:
        """Return the order without what has left at its ends."""
        order, flags = self._orders.get(slot, _NOTHING), self.flags
        start, end = 0, len(order)
        while start < end and not flags[order[start]]:
            start += 1
        while end > start and not flags[order[end - 1]]:
            end -= 1
        if start == end:
            self._orders.pop(slot, None)
            self._counts.pop(slot, None)
            self._named.pop(slot, None)
            return _NOTHING
        self._orders[slot] = order = order[start:end]  # a view
        return order
