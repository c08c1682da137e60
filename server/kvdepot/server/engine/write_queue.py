"""What waits to be written to one lower tier: weak, bounded in bytes, parents before children.

An object that waits is not held: RAM may drop it, and then it is not written. From its
dispatch to the answer it is lent to a worker. What the queue has no room for, what its tier
refuses and what would exceed the daily budget is dropped and counted, never waited for (I4). So is what something
raised for: it must not stand before all the others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import Kind
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.workers import Workers
from kvdepot.server.guard import Guard, Once
from kvdepot.server.tiers.base import IoOutcome, ObjectName, Written

_WRITE: Final = "write"
_LEAVE: Final = "leave"  # there is nothing to write any more
_WAIT: Final = "wait"
_FAILED: Final = "failed"  # something raised: a reason to drop it, as others are


class WriteQueue:
    """By row: one object waits or is written at most once."""

    def __init__(self, space: Space, workers: Workers, tier: LowerTier, guard: Guard) -> None:
        self._space = space
        self._guard = guard
        self._workers = workers
        self._tier = tier
        self._waiting: OrderedDict[int, tuple[int, int]] = OrderedDict()  # row -> its generation, bytes
        self._writing: dict[int, int] = {}  # row -> its generation
        self._pumping = False
        self._full = False  # the tier had no room: what was dropped for it is not free before the next tick
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, row: int) -> bool:
        """Whether the object waits or is being written."""
        generation = self._space.rows.generation[row]
        return self._waiting.get(row, (None, 0))[0] == generation or self._writing.get(row) == generation

    # In

    def offer(self, node: int, kind: int) -> bool:
        """Queue an object of RAM behind what is missing of its path. False when it cannot be, or need not."""
        space, path_kind = self._space, self._space.path_kind(node)
        own = space.index.row(node, kind)
        if own != NO_ROW and not self.has(own) and not self._has_room(space.size_bytes(own)):
            self._refuse("queue_full")  # before its path is walked: a long one has as many objects to offer
            return False
        missing = [] if kind == path_kind else [kind]
        path: list[int] = []
        at = node
        while at != NONE and not self._tier.has(at, path_kind):
            row = space.index.row(at, path_kind)
            if row == NO_ROW or not space.rows.visible(row):
                self._refuse("no_parent")
                return False
            if self.has(row):
                break
            path.append(row)
            at = space.index.parent(at)
        rows = path[::-1] + [space.index.row(node, kind) for kind in missing if not self._tier.has(node, kind)]
        return bool(rows) and all(self._enter(row) for row in rows if row != NO_ROW and space.rows.visible(row))

    def _enter(self, row: int) -> bool:
        if self.has(row):
            return True
        size_bytes = self._space.size_bytes(row)
        if not self._has_room(size_bytes):
            self._refuse("queue_full")
            return False
        self._forget(row)  # an earlier object of this row
        self._waiting[row] = (self._space.rows.generation[row], size_bytes)
        self.waiting_bytes += size_bytes
        return True

    def _has_room(self, size_bytes: int) -> bool:
        return self.waiting_bytes + size_bytes <= self._tier.config.queue_bytes

    def _forget(self, row: int) -> None:
        _, size_bytes = self._waiting.pop(row, (0, 0))
        self.waiting_bytes -= size_bytes

    # Out

    def tick(self) -> None:
        self._full = False
        self.pump()

    def pump(self) -> None:
        """Hand to the tier what it takes now."""
        if self._pumping:
            return
        self._pumping = True
        tier = self._tier.tier
        try:
            while self._waiting and tier.writable and tier.write_slots > 0 and not self._full:
                row, (generation, size_bytes) = next(iter(self._waiting.items()))
                following = self._guard.value("write_queue", _FAILED, self._following, row, generation, size_bytes)
                if following == _WAIT:
                    return
                self._forget(row)
                if following == _WRITE and not self._guard.call("write_queue", self._write, row, generation):
                    following = _FAILED
                if following not in (_WRITE, _LEAVE):
                    self._refuse(following)
        finally:
            self._pumping = False

    def _following(self, row: int, generation: int, size_bytes: int) -> str:
        """What to do with an object whose turn it is, or why it is dropped."""
        space, tier = self._space, self._tier.tier
        if not self._missing(row, generation):
            return _LEAVE
        node, kind = space.node_of(row), space.rows.kind[row]
        cost_bytes = tier.cost_bytes(size_bytes)
        if tier.too_large(size_bytes):
            return "too_large"
        if tier.budget_spent:
            return "budget"
        if not self._has_path(node, kind):
            return "no_parent"
        if not self._tier.within_quota(node, kind, cost_bytes):
            return "quota"
        if not self._tier.make_room(node, kind, cost_bytes):
            return _WAIT  # what was dropped for it is not free yet, or nothing may go: later
        return _WRITE

    def _missing(self, row: int, generation: int) -> bool:
        """Whether it is still in RAM where it is found, and still not in the tier."""
        space = self._space
        if not self._live(row, generation) or not space.rows.visible(row):
            return False
        node = space.node_of(row)
        return not space.index.cut_off(node) and not self._tier.has(node, space.rows.kind[row])

    def _live(self, row: int, generation: int) -> bool:
        return self._space.rows.generation[row] == generation and self._space.rows.state[row] == COMMITTED

    def _has_path(self, node: int, kind: int) -> bool:
        """Whether the objects before it on its path are in the tier, or on their way."""
        space, path_kind = self._space, self._space.path_kind(node)
        before = node if kind != path_kind else space.index.parent(node)
        if before == NONE or self._tier.has(before, path_kind):
            return True
        row = space.index.row(before, path_kind)
        return row != NO_ROW and self.has(row)

    def _write(self, row: int, generation: int) -> None:
        space, rows = self._space, self._space.rows
        namespace = space.namespaces.by_slot[rows.namespace[row]]
        name = ObjectName(
            namespace.id, rows.key(row), rows.parent(row), rows.kind[row], rows.boundary[row], space.size_bytes(row)
        )
        raw_sum = rows.sum_hi[row] << 64 | rows.sum_lo[row] if rows.summed(row) else None
        namespace.learn(name.kind, name.raw_bytes)
        extents, loan = rows.extents(row), self._workers.loan(row, LentMode.READ)
        what = namespace.slot, name.kind
        self._tier.writing(*what, 1)
        self._writing[row] = generation
        done = Once[Written](lambda written: self._written(row, generation, what, written), self._late)
        if not self._guard.call("tier", self._tier.tier.write, name, extents, loan, raw_sum, done):
            done(Written(IoOutcome.CANCELLED))

    def _late(self, written: Written) -> None:
        """A tier that raised and wrote it all the same: nobody knows of it."""
        if written.outcome is IoOutcome.OK and self._tier.owner(written.handle) is None:
            self._tier.tier.drop(written.handle)

    def _written(self, row: int, generation: int, what: tuple[int, int], written: Written) -> None:
        """`what`: namespace slot and kind; the row may be another object's by now."""
        space, tier = self._space, self._tier
        tier.writing(*what, -1)
        space.counters.add(f"tier_writes.{tier.tier.name}/{written.outcome}")
        if self._writing.get(row) == generation:
            del self._writing[row]
        if not self._guard.call("write_queue", self._settle, row, generation, written):
            self._guard.call("write_queue", self._late, written)
        self.pump()

    def _settle(self, row: int, generation: int, written: Written) -> None:
        space, tier = self._space, self._tier
        live = self._live(row, generation)
        if written.outcome is IoOutcome.OK:
            space.counters.add(f"tier_written_bytes.{tier.tier.name}/", written.stored_bytes)
            self._take_in(row, written, live=live)
        elif live and written.outcome is IoOutcome.CORRUPT:
            space.drop_corrupt(row)
        elif live and written.outcome is IoOutcome.NO_SPACE:
            self._full = True
            if tier.tier.writable:
                # It has bytes, or would not have been asked: it lacks handles, records or an unbroken place.
                tier.evict_for(*self._place(row))
            self._enter(row)
            if row in self._waiting:
                self._waiting.move_to_end(row, last=False)
        elif live:
            space.settle_node(space.node_of(row))

    def _place(self, row: int) -> tuple[int, int]:
        """(node, kind) of an object that is there."""
        return self._space.node_of(row), self._space.rows.kind[row]

    def _take_in(self, row: int, written: Written, *, live: bool) -> None:
        space, tier = self._space, self._tier
        node = space.node_of(row) if live else NONE
        if tier.owner(written.handle) is not None:
            return  # it was looked up meanwhile
        found = node != NONE and not space.index.cut_off(node)
        if not found or tier.has(node, space.rows.kind[row]) or not self._has_path(node, space.rows.kind[row]):
            tier.tier.drop(written.handle)
            return
        if not space.rows.summed(row):
            space.set_sum(row, written.raw_sum)
        tier.keep(node, space.rows.kind[row], written.handle)
        if (above := space.index.parent(node)) != NONE:
            tier.used(above)

    def _refuse(self, reason: str) -> None:
        self._space.counters.add(f"tier_writes_dropped.{self._tier.tier.name}/{reason}")

    # Children that were committed before their parent

    def offer_below(self, node: int) -> None:
        """Queue what below the node is in RAM and could not be queued before it."""
        index = self._space.index
        below = list(index.children(node))
        for at in below:
            if index.in_ram(at) and not index.in_tier(self._tier.number, at):
                offered = [self.offer(at, kind) for kind in Kind if self._space.in_ram(at, kind)]
                below.extend(index.children(at) if any(offered) else ())
