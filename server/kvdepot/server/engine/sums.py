"""What the checksum worker is to do next, and what its answers change.

Adopted objects are verified first, those a request asked for before the others; then
committed objects get their sum. There is no queue to grow: the extent table is swept. What somebody
wants to have compared once more (`again`) comes last.

A first sum waits while engines copy: XXH3 at full speed takes a fifth of the memory bandwidth
from them (docs/benchmarks.md). It never waits longer than `HELD_BACK_SECONDS_MAX`, because what
has no sum is lost with the daemon.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np
from kvdepot.core.arena import LentMode
from kvdepot.server.engine.lent import NO_SESSION
from kvdepot.server.engine.rows import COMMITTED, SUMMED
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.types import ToSum

SWEEP_ROWS: Final = 1 << 16
WANTED_MAX: Final = 4096
HELD_BACK_SECONDS_MAX: Final = 2.0
_PARALLEL_MAX: Final = 1024
"""Objects lent to the worker at once."""


class Compared(Enum):
    """What came of comparing an object with its sum once more."""

    SAME = "same"
    CORRUPT = "corrupt"  # it is dropped
    LEFT = "left"  # it left RAM meanwhile


class Sums:
    """Rows under summation are lent in CHECKSUM mode, so their bytes stay theirs.

    `copying` says whether an engine holds extents it may be copying to or from.
    """

    def __init__(self, space: Space, copying: Callable[[], bool]) -> None:
        self._space = space
        self._copying = copying
        self._rested_at = space.clock()  # when there was last nothing to sum, or no engine copied
        self._working: dict[int, int] = {}  # row -> lent entry
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._again: deque[int] = deque()  # verified rows that are to be summed once more
        self._summing_again: set[int] = set()  # of them, those with the worker
        self._told: dict[int, tuple[int, Callable[[Compared], None]]] = {}  # by row: (generation, who waits for it)
        self._found: list[int] = []  # candidates of the last swept slice, lowest row last
        self._at = 0
        self._verifies = True
        self.verified: Callable[[int], None] = lambda _: None  # told of each adopted object that may be served now

    def finish(self) -> None:
        """Only first sums from now on: what is adopted and not verified keeps the sum it has."""
        self._verifies = False

    def want(self, row: int) -> None:
        self._wanted[row] = None
        if len(self._wanted) > WANTED_MAX:
            self._wanted.popitem(last=False)

    def again(self, row: int, told: Callable[[Compared], None]) -> None:
        """Compare an object that has a sum with it once more. `told` is called once, unless `forget_again` comes first.

        For one caller at a time: who comes later for the same row is told, the former is not.
        """
        rows = self._space.rows
        self._told[row] = (rows.generation[row], told)
        if rows.unverified(row):
            self.want(row)
        elif row not in self._working:
            self._again.append(row)

    def forget_again(self) -> None:
        """Nobody waits for it any more."""
        self._told.clear()
        self._again.clear()

    def next(self) -> ToSum | None:
        space = self._space
        if len(self._working) >= _PARALLEL_MAX or not space.lent.free_count:
            return None
        row = self._next_row()
        if row is None:
            row = self._next_again()
        if row is None:
            return None
        self._working[row] = space.lent.lend(0, NO_SESSION, LentMode.CHECKSUM, row, 0)
        verify = space.rows.run_of[row] != space.rows.run
        return ToSum(row, space.rows.generation[row], space.rows.extents(row), verify)

    def summed(self, row: int, generation: int, sum_lo: int, sum_hi: int) -> None:
        """An answer for what was unindexed or reused meanwhile only ends the loan."""
        space = self._space
        entry = self._working.pop(row, None)
        if entry is None:
            return
        self._summing_again.discard(row)
        compared = Compared.LEFT
        try:
            if space.rows.state[row] == COMMITTED and space.rows.generation[row] == generation:
                compared = self._settle(row, sum_lo, sum_hi)
        finally:  # the worker is done with it
            space.give_back(entry)
            self._tell(row, compared)

    def worker_died(self) -> None:
        entries = list(self._working.values())
        self._working.clear()
        self._again.extend(row for row in self._summing_again if row in self._told)
        self._summing_again.clear()
        for entry in entries:
            self._space.give_back(entry)

    def _tell(self, row: int, compared: Compared) -> None:
        _, told = self._told.pop(row, (0, None))
        if told is not None:
            told(compared)

    def _settle(self, row: int, sum_lo: int, sum_hi: int) -> Compared:
        space = self._space
        adopted = space.rows.run_of[row] != space.rows.run
        if not adopted and not space.rows.summed(row):
            space.set_sum(row, sum_hi << 64 | sum_lo)
            space.counters.add("summed_objects")
        elif (space.rows.sum_lo[row], space.rows.sum_hi[row]) == (sum_lo, sum_hi):
            if adopted:  # else a write to a lower tier has summed it meanwhile
                space.rows.set_verified(row)
                space.unverified -= 1
                space.counters.add("verified_objects")
                self.verified(row)
        else:
            space.drop_corrupt(row)
            return Compared.CORRUPT
        return Compared.SAME

    def _next_row(self) -> int | None:
        space = self._space
        while self._wanted and self._verifies:
            row, _ = self._wanted.popitem()
            if self._due(row) and space.rows.run_of[row] != space.rows.run:
                return row
        if space.unverified + space.unsummed <= len(self._working) - len(self._summing_again):
            self._rested_at = space.clock()
            return None  # all of it is with the worker: no sweep at each commit to find that out
        if not (self._verifies and space.unverified) and self._held_back():
            return None
        for _ in range(-(-space.rows.count // SWEEP_ROWS) + 1):
            while self._found:
                row = self._found.pop()
                if self._due(row):
                    return row
            self._sweep()
        return None

    def _next_again(self) -> int | None:
        rows = self._space.rows
        while self._again and self._verifies:
            row = self._again.popleft()
            generation, _ = self._told.get(row, (-1, None))
            if row in self._working:  # for who had it compared before, and is told no more
                continue
            if rows.state[row] == COMMITTED and rows.generation[row] == generation:
                self._summing_again.add(row)
                return row
            self._tell(row, Compared.LEFT)
        return None

    def _held_back(self) -> bool:
        """Whether first sums wait for the engines."""
        now = self._space.clock()
        if not self._verifies or not self._copying():
            self._rested_at = now
            return False
        return now - self._rested_at < HELD_BACK_SECONDS_MAX

    def _due(self, row: int) -> bool:
        rows = self._space.rows
        if rows.state[row] != COMMITTED or row in self._working:
            return False
        return self._verifies if rows.run_of[row] != rows.run else not rows.summed(row)

    def _sweep(self) -> None:
        """Candidates of the next slice of the table."""
        rows = self._space.rows
        part = slice(self._at, min(self._at + SWEEP_ROWS, rows.count))
        self._at = part.stop if part.stop < rows.count else 0
        due = rows.states[part] == COMMITTED
        if self._verifies and self._space.unverified:
            due &= rows.runs[part] != rows.run
        else:
            due &= rows.flags[part] & SUMMED == 0
        self._found = (np.flatnonzero(due)[::-1] + part.start).tolist()
