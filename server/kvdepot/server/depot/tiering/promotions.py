"""Promotions: acquires wait for all their objects of lower tiers. Each object is read once for all acquires.

An acquire pins what RAM has, reserves rows for the rest, and has them read. No acquire is
answered before every object is verified and published. A row stays RESERVED while a worker
may write to it. If the read fails or is abandoned, the row is unindexed, and DYING until the
last loan ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import ROOT_KEY
from kvdepot.server.depot.sessions.workers import ObjectLoan, WorkerLoans
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import RESERVED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import Guard, Once
from kvdepot.server.storage.base import DAMAGED, NO_HANDLE, IoOutcome, ObjectName, Read

Flags = npt.NDArray[np.bool_]
Ended = Callable[[bool], None]
"""True: every object is in RAM. Called once, unless it was cancelled first."""


@dataclass(eq=False, slots=True)
class _Reading:
    """One object on its way into RAM."""

    tier: LowerTier
    node: int
    kind: int
    row: int
    handle: int
    epoch: int
    name: ObjectName
    loan: ObjectLoan
    generation: int
    asked: bool = False  # the tier has the job: one whom nobody waits for may still be joined
    asked_at: float = 0.0
    expected_seconds: float = 0.0  # of transfer, from then on
    waiting: list[Promotion] = field(default_factory=list)


class Promotion:
    """The reads that one acquire waits for."""

    def __init__(self, ended: Ended, *, open: bool = False) -> None:  # noqa: A002 - as of a list of names
        """Make a promotion. `open`: more reads will be started, so it ends in failure or when it is closed."""
        self._ended = ended
        self.open = open
        self.readings: dict[int, _Reading] = {}  # by row

    def end(self, whole: bool) -> None:
        self._ended(whole)

    def close(self) -> None:
        """Note that all reads were started. End the promotion if all have been read."""
        self.open = False
        if not self.readings:
            self.end(whole=True)


class Promotions:
    """Objects being read, by row. `tiers` in the order in which they are preferred."""

    def __init__(
        self,
        tree: Tree,
        ram: RamTier,
        loans: WorkerLoans,
        tiers: Sequence[LowerTier],
        lost: Callable[[LowerTier, int, int], None],
        read_ended: Callable[[], None],
        guard: Guard,
    ) -> None:
        """Make the promotions of a depot.

        `lost(tier, node, kind)` is called when the tier has lost an object, `read_ended` when a read has ended.
        """
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._guard = guard
        self._lost = lost
        self._loans = loans
        self._tiers = tiers
        self._readings: dict[int, _Reading] = {}
        self._read_ended = read_ended

    def __len__(self) -> int:
        return len(self._readings)

    def reading(self, row: int) -> bool:
        """Return whether the row is being filled from a lower tier."""
        return row in self._readings

    def sources(self) -> list[LowerTier]:
        """Return the tiers that can be read, in the order to read from. A tier that has fallen silent comes last."""
        now = self._clock()
        readable = [tier for tier in self._tiers if tier.tier.readable]
        return sorted(readable, key=lambda tier: not tier.reads.answers(now))

    def source(self, node: int, kind: int) -> LowerTier | None:
        """Return the tier to read the object from, or None."""
        having = [tier for tier in self._tiers if tier.tier.readable and tier.has(node, kind)]
        if len(having) < 2:
            return having[0] if having else None
        return next(tier for tier in self.sources() if tier in having)

    def shares(self, nodes: Nodes, kind: int) -> list[tuple[LowerTier, Flags]]:
        """Return, for each tier, which of the nodes' objects to read from it. It has all of these."""
        left = np.ones(len(nodes), np.bool_)
        shares = []
        for tier in self.sources():
            given = left & (self._index.handles[tier.number][kind - 1][nodes] != NO_HANDLE)
            left &= ~given
            shares.append((tier, given))
        return shares

    def place(self, namespace: Namespace, node: int, kind: int, source: LowerTier) -> int:
        """Reserve a row for an object that `source` has, and return it. `start` reads the object.

        Return NO_ROW when nothing evictable is left.
        """
        index = self._index
        parent = index.parent(node)
        name = ObjectName(
            namespace.id, index.key(node), ROOT_KEY if parent == NONE else index.key(parent), kind,
            index.boundary(node), namespace.object_bytes[kind],
        )  # fmt: skip
        row = self._ram.place(
            namespace, node, kind=kind, key=name.key, parent=name.parent, boundary=name.boundary_tokens,
            size_bytes=name.raw_bytes,
        )  # fmt: skip
        if row == NO_ROW:
            self._tree.refresh_node(node)
            return NO_ROW
        self._rows.publish_reserved(row)
        handle = source.handle(node, kind)
        loan = self._loans.loan(row, LentMode.WRITE)
        generation = self._rows.generation[row]
        self._readings[row] = _Reading(
            source, node, kind, row, handle, source.epoch(handle), name, loan, generation
        )  # fmt: skip
        return row

    def abandon(self, rows: Sequence[int]) -> None:
        """Abandon rows of `place` that are not to be read after all."""
        for row in rows:
            self._guard.call("promotion", self._drop, self._readings.pop(row))

    def start(self, promotion: Promotion, rows: Sequence[int]) -> None:
        """Wait for these rows too, reading those that nobody reads yet. They are pinned by the caller."""
        added = {row: self._readings[row] for row in rows if row not in promotion.readings}
        promotion.readings |= added
        fresh = [reading for reading in added.values() if not reading.asked]
        for reading in added.values():
            reading.waiting.append(promotion)
        for reading in fresh:
            # Where nobody waits an earlier one failed at once, and nobody wants this one any more.
            if reading.waiting and not self._guard.call("promotion", self._ask, reading):
                self._ended(reading, Read(IoOutcome.CANCELLED))

    def cancel(self, promotion: Promotion) -> None:
        """Cancel a promotion that no caller waits for any more. Reads that no worker has begun are dropped."""
        readings, promotion.readings = promotion.readings, {}
        for reading in readings.values():
            reading.waiting.remove(promotion)
            if not reading.waiting and not reading.loan.begun and self._readings.get(reading.row) is reading:
                del self._readings[reading.row]
                self._guard.call("promotion", self._drop, reading)

    def _ask(self, reading: _Reading) -> None:
        tier, extents = reading.tier, self._rows.extents(reading.row)
        asked_at = self._clock()
        reading.expected_seconds = tier.reads.asked(reading.name.raw_bytes, asked_at)
        reading.asked, reading.asked_at = True, asked_at
        done = Once[Read](lambda read: self._ended(reading, read))
        if not self._guard.call("tier", tier.tier.read, reading.handle, reading.name, extents, reading.loan, done):
            done(Read(IoOutcome.CANCELLED))

    def _ended(self, reading: _Reading, read: Read) -> None:
        """End a read. Whatever raises, all waiting promotions are answered, and the row is free or whole."""
        if self._readings.get(reading.row) is reading:
            del self._readings[reading.row]
        whole = self._guard.value("promotion", False, self._take_in, reading, read)
        if not whole:
            self._guard.call("promotion", self._drop, reading)
        if self._is_dead(reading, read.outcome):
            self._guard.call("promotion", self._dead, reading, read.outcome)
        waiting, reading.waiting = reading.waiting, []
        for promotion in waiting:
            del promotion.readings[reading.row]
            if not whole:
                self.cancel(promotion)
            if not promotion.readings and not (whole and promotion.open):
                self._guard.call("answer", promotion.end, whole)
        self._guard.call("prefetch", self._read_ended)

    def _take_in(self, reading: _Reading, read: Read) -> bool:
        """Take the object into RAM. Return whether it is there now."""
        row, tier = reading.row, reading.tier
        if reading.asked:
            tier.reads.answered(
                reading.name.raw_bytes, read.outcome, asked_at=reading.asked_at,
                expected_seconds=reading.expected_seconds, now=self._clock(),
            )  # fmt: skip
        self._counters.add(f"tier_reads.{tier.tier.name}/{read.outcome}")
        if reading.asked_at:
            self._counters.observe(f"tier_read_seconds.{tier.tier.name}/", self._clock() - reading.asked_at)
        if read.outcome is not IoOutcome.OK or not self._alive(reading):
            return False
        self._ram.commit_checksummed(row, reading.node, read.raw_sum)
        self._tree.refresh_node(reading.node)
        self._counters.add("promoted_objects")
        self._counters.add("promoted_bytes", reading.name.raw_bytes)
        tier.served(reading.node, reading.kind, reading.name.raw_bytes)
        return True

    def _is_dead(self, reading: _Reading, outcome: IoOutcome) -> bool:
        """Return whether the handle is dead."""
        gone = reading.tier.shared and outcome in (IoOutcome.GONE, IoOutcome.FOREIGN)
        return outcome in DAMAGED or bool(gone)

    def _alive(self, reading: _Reading) -> bool:
        rows = self._rows
        return rows.generation[reading.row] == reading.generation and rows.state[reading.row] == RESERVED

    def _drop(self, reading: _Reading) -> None:
        if self._alive(reading):
            self._tree.drop_row(reading.node, reading.kind)

    def _dead(self, reading: _Reading, outcome: IoOutcome) -> None:
        """Forget a handle that is dead, because the object is quarantined, gone, or another one.

        If the object left the tier meanwhile, do nothing: the scrubber may have found, and counted, the same damage.
        """
        tier = reading.tier
        if tier.epoch(reading.handle) == reading.epoch:
            if outcome in DAMAGED:
                self._counters.add(f"tier_damaged_objects.{tier.tier.name}/{outcome}")
            tier.forget(reading.node, reading.kind)
            self._lost(tier, reading.node, reading.kind)
