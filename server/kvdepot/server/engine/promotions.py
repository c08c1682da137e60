"""Acquires that wait for a lower tier: all their objects at once, each read once for all who want it.

An acquire pins what RAM has, reserves rows for the rest and has them read; nothing is
answered before every object is verified and published. A row stays RESERVED while a worker
may write to it; failed or given up it is unindexed and DYING until the last loan ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import ROOT_KEY
from kvdepot.server.engine.index import NONE, Nodes
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.rows import RESERVED
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.workers import ObjectLoan, Workers
from kvdepot.server.guard import Guard, Once
from kvdepot.server.tiers.base import DAMAGED, NO_HANDLE, IoOutcome, ObjectName, Read

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
    """What one acquire waits for."""

    def __init__(self, ended: Ended, *, open: bool = False) -> None:  # noqa: A002 - as of a list of names
        """`open`: more will be started of it, so it ends in failure or when it is closed."""
        self._ended = ended
        self.open = open
        self.readings: dict[int, _Reading] = {}  # by row

    def end(self, whole: bool) -> None:
        self._ended(whole)

    def close(self) -> None:
        """Everything of it was started; where all of it has been read, it ends."""
        self.open = False
        if not self.readings:
            self.end(whole=True)


class Promotions:
    """Objects being read, by row. `tiers` in the order in which they are preferred."""

    def __init__(
        self,
        space: Space,
        workers: Workers,
        tiers: Sequence[LowerTier],
        lost: Callable[[LowerTier, int, int], None],
        guard: Guard,
    ) -> None:
        """`lost(tier, node, kind)` is told that the tier has an object no more."""
        self._space = space
        self._guard = guard
        self._lost = lost
        self._workers = workers
        self._tiers = tiers
        self._readings: dict[int, _Reading] = {}
        self.read_ended: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._readings)

    def reading(self, row: int) -> bool:
        """Whether the row is being filled from a lower tier."""
        return row in self._readings

    def sources(self) -> list[LowerTier]:
        """Those that can be read, the one to read from first; one that has fallen silent is the last resort."""
        now = self._space.clock()
        readable = [tier for tier in self._tiers if tier.tier.readable]
        return sorted(readable, key=lambda tier: not tier.reads.answers(now))

    def source(self, node: int, kind: int) -> LowerTier | None:
        """The tier to read the object from."""
        having = [tier for tier in self._tiers if tier.tier.readable and tier.has(node, kind)]
        if len(having) < 2:
            return having[0] if having else None
        return next(tier for tier in self.sources() if tier in having)

    def shares(self, nodes: Nodes, kind: int) -> list[tuple[LowerTier, Flags]]:
        """Which of the nodes' objects each tier is the one to read from; it is where it has them."""
        left = np.ones(len(nodes), np.bool_)
        shares = []
        for tier in self.sources():
            given = left & (self._space.index.handles[tier.number][kind - 1][nodes] != NO_HANDLE)
            left &= ~given
            shares.append((tier, given))
        return shares

    def place(self, namespace: Namespace, node: int, kind: int, source: LowerTier) -> int:
        """A reserved row for an object that `source` has; NO_ROW when nothing evictable is left. `start` reads it."""
        space, index = self._space, self._space.index
        parent = index.parent(node)
        name = ObjectName(
            namespace.id, index.key(node), ROOT_KEY if parent == NONE else index.key(parent), kind,
            index.boundary(node), namespace.object_bytes[kind],
        )  # fmt: skip
        row = space.place(
            namespace, node, kind=kind, key=name.key, parent=name.parent, boundary=name.boundary_tokens,
            size_bytes=name.raw_bytes,
        )  # fmt: skip
        if row == NO_ROW:
            space.settle_node(node)
            return NO_ROW
        space.rows.publish_reserved(row)
        handle = source.handle(node, kind)
        loan = self._workers.loan(row, LentMode.WRITE)
        generation = space.rows.generation[row]
        self._readings[row] = _Reading(
            source, node, kind, row, handle, source.epoch(handle), name, loan, generation
        )  # fmt: skip
        return row

    def abandon(self, rows: Sequence[int]) -> None:
        """Rows of `place` that are not to be read after all."""
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
        """Nobody waits for it any more. What no worker has begun is not read."""
        readings, promotion.readings = promotion.readings, {}
        for reading in readings.values():
            reading.waiting.remove(promotion)
            if not reading.waiting and not reading.loan.begun and self._readings.get(reading.row) is reading:
                del self._readings[reading.row]
                self._guard.call("promotion", self._drop, reading)

    def _ask(self, reading: _Reading) -> None:
        tier, extents = reading.tier, self._space.rows.extents(reading.row)
        asked_at = self._space.clock()
        reading.expected_seconds = tier.reads.asked(reading.name.raw_bytes, asked_at)
        reading.asked, reading.asked_at = True, asked_at
        done = Once[Read](lambda read: self._ended(reading, read))
        if not self._guard.call("tier", tier.tier.read, reading.handle, reading.name, extents, reading.loan, done):
            done(Read(IoOutcome.CANCELLED))

    def _ended(self, reading: _Reading, read: Read) -> None:
        """Whatever raises, who waits for it is answered, and its row is free or whole."""
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
        self._guard.call("prefetch", self.read_ended)

    def _take_in(self, reading: _Reading, read: Read) -> bool:
        """Whether it is in RAM now."""
        space, row, tier = self._space, reading.row, reading.tier
        if reading.asked:
            tier.reads.answered(
                reading.name.raw_bytes, read.outcome, asked_at=reading.asked_at,
                expected_seconds=reading.expected_seconds, now=space.clock(),
            )  # fmt: skip
        space.counters.add(f"tier_reads.{tier.tier.name}/{read.outcome}")
        if reading.asked_at:
            space.counters.observe(f"tier_read_seconds.{tier.tier.name}/", space.clock() - reading.asked_at)
        if read.outcome is not IoOutcome.OK or not self._alive(reading):
            return False
        space.commit_summed(row, reading.node, read.raw_sum)
        space.settle_node(reading.node)
        space.counters.add("promoted_objects")
        space.counters.add("promoted_bytes", reading.name.raw_bytes)
        return True

    def _is_dead(self, reading: _Reading, outcome: IoOutcome) -> bool:
        """Whether its handle is."""
        gone = reading.tier.shared and outcome in (IoOutcome.GONE, IoOutcome.FOREIGN)
        return outcome in DAMAGED or bool(gone)

    def _alive(self, reading: _Reading) -> bool:
        rows = self._space.rows
        return rows.generation[reading.row] == reading.generation and rows.state[reading.row] == RESERVED

    def _drop(self, reading: _Reading) -> None:
        if self._alive(reading):
            self._space.drop_row(reading.node, reading.kind)

    def _dead(self, reading: _Reading, outcome: IoOutcome) -> None:
        """It is quarantined, gone, or another one: its handle is dead.

        Unless it left the tier meanwhile: the scrubber may have found, and counted, the same damage.
        """
        tier = reading.tier
        if tier.epoch(reading.handle) == reading.epoch:
            if outcome in DAMAGED:
                self._space.counters.add(f"tier_damaged_objects.{tier.tier.name}/{outcome}")
            tier.forget(reading.node, reading.kind)
            self._lost(tier, reading.node, reading.kind)
