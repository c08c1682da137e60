"""The work of the checksum worker: what it does next, and what its answers change.

Adopted objects are verified first, beginning with those that a request asked for. Then
committed objects get their checksum. There is no queue that could grow: the extent table is
swept. Objects to be compared once more (`again`) come last, but those that an engine doubts come first.

A first checksum waits while engines copy: XXH3 at full speed takes 1/5 of the memory bandwidth
from them (docs/benchmarks.md). It never waits longer than `HELD_BACK_SECONDS_MAX`, because
objects without a checksum are lost with the daemon.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final

import numpy as np
from kvdepot.core.arena import LentMode
from kvdepot.server.depot.tree.lent import NO_SESSION
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED, SUMMED, TornLinksError
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import ToSum

SWEEP_ROWS: Final = 1 << 16
WANTED_MAX: Final = 4096
HELD_BACK_SECONDS_MAX: Final = 2.0
_PARALLEL_MAX: Final = 1024
"""Objects lent to the worker at once."""


class Compared(Enum):
    """The outcome of comparing an object with its checksum once more."""

    SAME = "same"
    CORRUPT = "corrupt"  # it is dropped
    LEFT = "left"  # it left RAM meanwhile


class Checksums:
    """The queue of the checksum worker. Rows it works on are lent in CHECKSUM mode, so that they keep their bytes.

    `copying` says whether an engine holds extents it may be copying to or from. `verified` is called with each adopted
    object that may be served now.
    """

    def __init__(
        self, tree: Tree, ram: RamTier, copying: Callable[[], bool], verified: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._tree = tree
        self._ram = ram
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._copying = copying
        self._rested_at = self._clock()  # when there was last nothing to sum, or no engine copied
        self._working: dict[int, int] = {}  # row -> lent entry
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._again: deque[int] = deque()  # verified rows whose checksum is to be taken once more
        self._summing_again: set[int] = set()  # of them, those with the worker
        self._told: dict[int, tuple[int, Callable[[Compared], None]]] = {}  # by row: (generation, who waits for it)
        self._doubted: dict[int, int] = {}  # row -> generation
        self._found: list[int] = []  # candidates of the last swept slice, lowest row last
        self._at = 0
        self._verifies = True
        self._verified = verified

    def finish(self) -> None:
        """Compute only first checksums from now on. Adopted objects that are not verified keep their checksum."""
        self._verifies = False

    def want(self, row: int) -> None:
        self._wanted[row] = None
        if len(self._wanted) > WANTED_MAX:
            self._wanted.popitem(last=False)

    def doubt(self, rows: Iterable[int]) -> None:
        """Compare objects with their checksums soon, because an engine has read bytes that do not match.

        The engine's word alone drops nothing. What has no checksum, or is being compared, is left.
        """
        for row in rows:
            self._counters.add("doubted_objects")
            if self._rows.summed(row) and row not in self._working:
                self._doubted[row] = self._rows.generation[row]

    def again(self, row: int, told: Callable[[Compared], None]) -> None:
        """Compare an object that has a sum with it once more. `told` is called once, unless `forget_again` comes first.

        For one caller at a time: who comes later for the same row is told, the former is not.
        """
        rows = self._rows
        self._told[row] = (rows.generation[row], told)
        if rows.unverified(row):
            self.want(row)
        elif row not in self._working:
            self._again.append(row)

    def forget_again(self) -> None:
        """Forget all comparisons of `again`: no caller waits for them any more."""
        self._told.clear()
        self._again.clear()

    def next(self) -> ToSum | None:
        if len(self._working) >= _PARALLEL_MAX or not self._lent.free_count:
            return None
        row = self._next_doubted()
        if row is None:
            row = self._next_row()
        if row is None:
            row = self._next_again()
        if row is None:
            return None
        try:
            extents = self._rows.extents(row)
        except TornLinksError:
            return None
        self._working[row] = self._lent.lend(0, NO_SESSION, LentMode.CHECKSUM, row, 0)
        verify = self._rows.run_of[row] != self._rows.run
        return ToSum(row, self._rows.generation[row], extents, verify)

    def summed(self, row: int, generation: int, sum_lo: int, sum_hi: int) -> None:
        """Apply the worker's answer. If the row was unindexed or reused meanwhile, the answer only ends the loan."""
        entry = self._working.pop(row, None)
        if entry is None:
            return
        first = row not in self._summing_again
        self._summing_again.discard(row)
        compared = Compared.LEFT
        try:
            if self._rows.state[row] == COMMITTED and self._rows.generation[row] == generation:
                compared = self._apply(row, sum_hi << 64 | sum_lo, first=first)
        finally:  # the worker is done with it
            self._ram.end_loan(entry)
            self._tell(row, compared)

    def worker_died(self) -> None:
        entries = list(self._working.values())
        self._working.clear()
        self._again.extend(row for row in self._summing_again if row in self._told)
        self._doubted |= {row: self._rows.generation[row] for row in self._summing_again if row not in self._told}
        self._summing_again.clear()
        for entry in entries:
            self._ram.end_loan(entry)

    def _tell(self, row: int, compared: Compared) -> None:
        _, told = self._told.pop(row, (0, None))
        if told is not None:
            told(compared)

    def _apply(self, row: int, raw_sum: int, *, first: bool) -> Compared:
        """Set or compare the sum of a row. `first`: the worker got the row before it was verified or had a sum."""
        adopted = self._rows.run_of[row] != self._rows.run
        if not adopted and not self._rows.summed(row):
            self._ram.set_sum(row, raw_sum)
            self._counters.add("checksummed_objects")
        elif self._rows.raw_sum(row) == raw_sum:
            if adopted:  # else a write to a lower tier has taken it meanwhile
                self._rows.set_verified(row)
                self._ram.unverified -= 1
                self._counters.add("verified_objects")
                self._verified(row)
        elif adopted or not first:  # RAM has changed since then: what tiers wrote has this sum
            self._tree.drop_corrupt(row)
            return Compared.CORRUPT
        else:  # what a tier wrote meanwhile may be the bytes that have changed
            self._tree.drop_doubtful(row, raw_sum)
            return Compared.CORRUPT
        return Compared.SAME

    def _next_doubted(self) -> int | None:
        rows = self._rows
        while self._doubted and self._verifies:
            row, generation = self._doubted.popitem()
            if row in self._working or rows.state[row] != COMMITTED or rows.generation[row] != generation:
                continue
            if rows.run_of[row] == rows.run:  # else it is compared as what it is: adopted
                self._summing_again.add(row)
            return row
        return None

    def _next_row(self) -> int | None:
        while self._wanted and self._verifies:
            row, _ = self._wanted.popitem()
            if self._due(row) and self._rows.run_of[row] != self._rows.run:
                return row
        if self._ram.unverified + self._ram.pending_checksums <= len(self._working) - len(self._summing_again):
            self._rested_at = self._clock()
            return None  # all of it is with the worker: no sweep at each commit to find that out
        if not (self._verifies and self._ram.unverified) and self._held_back():
            return None
        for _ in range(-(-self._rows.count // SWEEP_ROWS) + 1):
            while self._found:
                row = self._found.pop()
                if self._due(row):
                    return row
            self._sweep()
        return None

    def _next_again(self) -> int | None:
        rows = self._rows
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
        """Return whether first checksums wait for the engines."""
        now = self._clock()
        if not self._verifies or not self._copying():
            self._rested_at = now
            return False
        return now - self._rested_at < HELD_BACK_SECONDS_MAX

    def _due(self, row: int) -> bool:
        rows = self._rows
        if rows.state[row] != COMMITTED or row in self._working or self._ram.detached.flags[row]:
            return False
        return self._verifies if rows.run_of[row] != rows.run else not rows.summed(row)

    def _sweep(self) -> None:
        """Find the candidates in the next slice of the table."""
        rows = self._rows
        part = slice(self._at, min(self._at + SWEEP_ROWS, rows.count))
        self._at = part.stop if part.stop < rows.count else 0
        due = (rows.states[part] == COMMITTED) & ~self._ram.detached.flags[part]
        if self._verifies and self._ram.unverified:
            due &= rows.runs[part] != rows.run
        else:
            due &= rows.flags[part] & SUMMED == 0
        self._found = (np.flatnonzero(due)[::-1] + part.start).tolist()
