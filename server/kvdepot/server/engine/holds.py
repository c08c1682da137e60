"""Objects that prefetch keeps in RAM: for how many requests each, what was used of them, and letting them go.

By row of the extent table. A hold keeps an object from being evicted, and does no more: it
is dropped like any other where it turns out bad, or nobody could reach it. Who holds a row
keeps a *token* of it, so that a row that was dropped and is another object's by now is
told from it. What nobody holds any more may be evicted a little later: saying so for
thousands of objects takes time, and is done in slices.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.space import HELD, Space

Tokens = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_ROW_BITS: Final = np.uint64(32)
_USED = "prefetch_used"
_WASTED = "prefetch_wasted"


class Holds:
    """Every object counts once, however many requests hold it. What was begun is used, wasted or still held.

    Counts `prefetched_*`: begun; `prefetch_used_*`: taken by an acquire; `prefetch_wasted_*.<reason>`: let go unused;
    each as objects and bytes.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        count = space.rows.count
        self._held = np.zeros(count, np.uint32)  # by row: by how many requests
        self._serials = np.zeros(count, np.uint32)
        self._sizes = np.zeros(count, np.int64)  # bytes that it takes of the arena
        self._used = np.zeros(count, np.bool_)
        self._leaving: deque[int] = deque()  # rows that nobody holds any more
        self.objects = 0
        self.bytes = 0
        space.dropped = self._dropped

    @staticmethod
    def row_of(token: int) -> int:
        return token >> int(_ROW_BITS)

    def begin(self, row: int) -> int:
        """The first hold of an object that is about to be read. Returns its token."""
        self._serials[row] += 1
        self._held[row] = 1
        self._used[row] = False
        self._sizes[row] = self._space.rounded_bytes(row)
        self._space.kept_rows[row] |= HELD
        self._add(1, int(self._sizes[row]))
        self._count("prefetched", "", 1, int(self._sizes[row]))
        return int(self._tokens(np.array([row]))[0])

    def join(self, rows: Rows) -> Tokens:
        """A further hold of those that are held."""
        held = rows[self._held[rows] > 0]
        np.add.at(self._held, held, 1)
        return self._tokens(held)

    def used(self, rows: Rows) -> None:
        """An acquire has these objects."""
        fresh = np.unique(rows[(self._held[rows] > 0) & ~self._used[rows]])
        self._used[fresh] = True
        self._count(_USED, "", len(fresh), int(self._sizes[fresh].sum()))

    def release(self, tokens: Tokens, reason: str) -> Rows:
        """Each holds no more. Returns the rows that nobody holds now; unused ones are wasted for this reason.

        One that is there several times was several holds: whoever holds an object of two tiers' doing has two.
        """
        rows = (tokens >> _ROW_BITS).astype(np.int64)
        rows = rows[(self._tokens(rows) == tokens) & (self._held[rows] > 0)]
        np.subtract.at(self._held, rows, 1)
        gone: Rows = np.unique(rows[self._held[rows] == 0])
        self._end(gone, reason)
        self._leaving.extend(gone.tolist())
        return gone

    def let_go(self, limit: int) -> int:
        """Let some of what nobody holds be evicted; how many."""
        done = 0
        while self._leaving and done < limit:
            row = self._leaving.popleft()
            if self._held[row] or not self._space.kept_rows[row] & HELD:
                continue
            done += 1
            self._space.kept_rows[row] &= ~HELD
            node = self._space.node_of(row)
            if node != NONE:
                self._space.settle_evictors(node)
        return done

    def _dropped(self, row: int) -> None:
        """The object has left the index; the row is nobody's, or soon."""
        self._space.kept_rows[row] &= ~HELD
        if self._held[row]:
            self._held[row] = 0
            self._end(np.array([row]), "lost")

    def _end(self, rows: Rows, reason: str) -> None:
        self._add(-len(rows), -int(self._sizes[rows].sum()))
        unused = rows[~self._used[rows]]
        if len(unused):
            self._count(_WASTED, f".{reason}", len(unused), int(self._sizes[unused].sum()))

    def _tokens(self, rows: Rows) -> Tokens:
        tokens: Tokens = rows.astype(np.uint64) << _ROW_BITS | self._serials[rows]
        return tokens

    def _add(self, objects: int, size_bytes: int) -> None:
        self.objects += objects
        self.bytes += size_bytes

    def _count(self, family: str, label: str, objects: int, size_bytes: int) -> None:
        self._space.counters.add(f"{family}_objects{label}", objects)
        self._space.counters.add(f"{family}_bytes{label}", size_bytes)
