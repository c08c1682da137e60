"""The queue of objects to write to one lower tier: weak, bounded in bytes, parents before children.

An object that waits is not pinned: RAM may drop it, and then it is not written. From its
dispatch to the answer it is lent to a worker. Objects for which the queue has no room, which
the tier refuses, or which would exceed the daily budget are dropped and counted. They never
wait (I4). Objects for which something raises are dropped too, because they must not block
all others.

RAM keeps what it is about to drop until it is written (`demote`). It does not wait for a tier that
has just refused the object, or that has had no room for long: RAM would never get below its limits.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.sessions.workers import WorkerLoans
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import Guard, Once
from kvdepot.server.storage.base import IoOutcome, ObjectName, Written

_WRITE: Final = "write"
_LEAVE: Final = "leave"  # there is nothing to write any more
_WAIT: Final = "wait"
_FAILED: Final = "failed"  # something raised: a reason to drop it, as others are
_AT_ONCE: Final = 64
"""Objects that leave the queue in one go. Thousands of them may be nothing to write any more, at 20 us each."""
REFUSED_SECONDS: Final = 5.0
"""How long RAM does not wait again for an object that the tier did not take."""
NO_ROOM_SECONDS: Final = 10.0
"""How long RAM waits while the tier has no room, as for an orphan (`evicting`)."""


class WriteQueue:
    """The write queue of a tier, by row. One object waits or is written at most once."""

    def __init__(self, tree: Tree, ram: RamTier, loans: WorkerLoans, tier: LowerTier, guard: Guard) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._counters = tree.counters
        self._rows = ram.rows
        self._guard = guard
        self._loans = loans
        self._tier = tier
        self._waiting: OrderedDict[int, tuple[int, int]] = OrderedDict()  # row -> its generation, bytes
        self._writing: dict[int, int] = {}  # row -> its generation
        self._pumping = False
        self._full = False  # the tier had no room: what was dropped for it is not free before the next tick
        self._clock = tree.clock
        self._no_room_since: float | None = None  # None: it has taken something since, or nothing waits
        self._refused: OrderedDict[int, tuple[int, float]] = OrderedDict()  # row -> its generation, when
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, row: int) -> bool:
        """Return whether the object waits or is being written."""
        generation = self._rows.generation[row]
        return self._waiting.get(row, (None, 0))[0] == generation or self._writing.get(row) == generation

    def has_refused(self, row: int) -> bool:
        """Return whether the tier did not take the object when it was offered last, some seconds ago."""
        return self._refused.get(row, (None, 0.0))[0] == self._rows.generation[row]

    # In

    def offer(self, node: int, kind: int) -> bool:
        """Queue an object of RAM after what is missing of its path. Return False when it cannot be, or need not."""
        if self._tier.tier.traits.read_only:
            return False
        path_kind = self._tree.path_kind(node)
        own = self._index.row(node, kind)
        if own != NO_ROW and not self.has(own) and not self._has_room(self._ram.size_bytes(own)):
            self._refuse("queue_full")  # before its path is walked: a long one has as many objects to offer
            return False
        missing = [] if kind == path_kind else [kind]
        path: list[int] = []
        at = node
        while at != NONE and not self._tier.has(at, path_kind):
            row = self._index.row(at, path_kind)
            if row == NO_ROW or not self._rows.visible(row):
                self._refuse("no_parent")
                return False
            if self.has(row):
                break
            path.append(row)
            at = self._index.parent(at)
        rows = path[::-1] + [self._index.row(node, kind) for kind in missing if not self._tier.has(node, kind)]
        return bool(rows) and all(self._enter(row) for row in rows if row != NO_ROW and self._rows.visible(row))

    def demote(self, node: int, kind: int) -> bool:
        """Queue an object that RAM is about to drop. Return whether RAM is to keep it until it is written."""
        if self._no_room_since is not None and self._clock() - self._no_room_since >= NO_ROOM_SECONDS:
            return False
        return self.has(self._index.row(node, kind)) or self.offer(node, kind)

    def _enter(self, row: int) -> bool:
        if self.has(row):
            return True
        size_bytes = self._ram.size_bytes(row)
        if not self._has_room(size_bytes):
            self._refuse("queue_full")
            return False
        self._forget(row)  # an earlier object of this row
        self._waiting[row] = (self._rows.generation[row], size_bytes)
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
        while self._refused and next(iter(self._refused.values()))[1] <= self._clock() - REFUSED_SECONDS:
            self._refused.popitem(last=False)
        self.pump()

    def pump(self) -> None:
        """Hand to the tier what it takes now. The next answer or tick continues."""
        if self._pumping:
            return
        self._pumping = True
        tier = self._tier.tier
        try:
            for _ in range(_AT_ONCE):
                if not self._waiting:
                    self._no_room_since = None
                if not self._waiting or self._full or tier.write_slots <= 0:
                    return
                row, (generation, size_bytes) = next(iter(self._waiting.items()))
                following = self._guard.value("write_queue", _FAILED, self._following, row, generation, size_bytes)
                if following == _WAIT:
                    self._note_no_room()
                    return
                self._forget(row)
                if following == _WRITE and not self._guard.call("write_queue", self._write, row, generation):
                    following = _FAILED
                if following not in (_WRITE, _LEAVE):
                    self._refuse(following)
                    self._not_taken(row, generation)
        finally:
            self._pumping = False

    def _following(self, row: int, generation: int, size_bytes: int) -> str:
        """Return what to do with an object whose turn it is, or why the object is dropped."""
        tier = self._tier.tier
        node, kind = self._missing(row, generation), self._rows.kind[row]
        if node == NONE:
            return _LEAVE
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

    def _missing(self, row: int, generation: int) -> int:
        """Return its node if it is still in RAM where it is found, and still not in the tier; else NONE."""
        if not self._live(row, generation) or not self._rows.visible(row):
            return NONE
        node = self._ram.node_of(row)
        return NONE if self._index.unlinked(node) or self._tier.has(node, self._rows.kind[row]) else node

    def _live(self, row: int, generation: int) -> bool:
        return self._rows.generation[row] == generation and self._rows.state[row] == COMMITTED

    def _has_path(self, node: int, kind: int) -> bool:
        """Return whether the objects before it on its path are in the tier, or on their way."""
        path_kind = self._tree.path_kind(node)
        before = node if kind != path_kind else self._index.parent(node)
        if before == NONE or self._tier.has(before, path_kind):
            return True
        row = self._index.row(before, path_kind)
        return row != NO_ROW and self.has(row)

    def _write(self, row: int, generation: int) -> None:
        rows = self._rows
        namespace = self._namespaces.by_slot[rows.namespace[row]]
        name = self._ram.name(row)
        raw_sum = rows.raw_sum(row)
        namespace.learn(name.kind, name.raw_bytes)
        extents, loan = rows.extents(row), self._loans.loan(row, LentMode.READ)
        self._tier.writing(namespace.slot, name.kind, 1)
        self._writing[row] = generation
        done = Once[Written](lambda written: self._written(row, generation, namespace.slot, name, written), self._late)
        if not self._guard.call("tier", self._tier.tier.write, name, extents, loan, raw_sum, done):
            done(Written(IoOutcome.CANCELLED))

    def _late(self, written: Written) -> None:
        """Drop an object that a tier wrote although it raised: nothing knows of this copy."""
        if written.outcome is IoOutcome.OK and self._tier.owner(written.handle) is None:
            self._tier.tier.drop(written.handle)

    def _written(self, row: int, generation: int, slot: int, name: ObjectName, written: Written) -> None:
        """Take the answer to a write. `slot`: of the namespace. The row may be another object's by now."""
        tier = self._tier
        if self._writing.get(row) == generation:  # first: as long as it is here the object is not written again
            del self._writing[row]
        self._guard.call("write_queue", tier.writing, slot, name.kind, -1)
        self._counters.add(f"tier_writes.{tier.tier.name}/{written.outcome}")
        if not self._guard.call("write_queue", self._finish, row, generation, name, written):
            self._guard.call("write_queue", self._late, written)
        self.pump()

    def _finish(self, row: int, generation: int, name: ObjectName, written: Written) -> None:
        tier = self._tier
        live = self._live(row, generation)
        if written.outcome is IoOutcome.OK:
            self._no_room_since = None
            tier.wrote(written.stored_bytes)
            if not self._in_doubt(row, generation, name, written, live=live):
                self._take_in(row, written, live=live)
        elif live and written.outcome is IoOutcome.CORRUPT:
            self._tree.drop_corrupt(row)
        elif live and written.outcome is IoOutcome.NO_SPACE:
            self._full = True
            self._note_no_room()
            if tier.tier.writable:
                # It has bytes, or would not have been asked: it lacks handles, records or an unbroken place.
                tier.evict_for(*self._place(row))
            self._enter(row)
            if row in self._waiting:
                self._waiting.move_to_end(row, last=False)
        elif live:
            self._not_taken(row, generation)
            self._tree.refresh_node(self._ram.node_of(row))

    def _place(self, row: int) -> tuple[int, int]:
        """Return (node, kind) of an object that is there."""
        return self._ram.node_of(row), self._rows.kind[row]

    def _in_doubt(self, row: int, generation: int, name: ObjectName, written: Written, *, live: bool) -> bool:
        """Drop what was written if its bytes are in doubt, and return whether they are.

        The write may have begun before the object had a checksum. Then nothing compared its bytes yet.
        """
        tier, rows = self._tier, self._rows
        contradicts = live and rows.summed(row) and rows.raw_sum(row) != written.raw_sum
        if not contradicts and (live or not self._tree.was_corrupt(row, generation)):
            return False
        owner = tier.owner(written.handle)  # of a shared tier, where it was looked up meanwhile
        if owner is not None:
            tier.forget(*owner)
        if contradicts:
            self._tree.drop_doubtful(row, written.raw_sum)  # which quarantines the files of every tier
        else:
            if owner is not None:
                self._tree.lost(*owner, MissReason.CORRUPT)
            tier.quarantine(name, (written.raw_sum,))
        tier.tier.drop(written.handle)  # last: where any of it raises, `_late` does
        return True

    def _take_in(self, row: int, written: Written, *, live: bool) -> None:
        tier = self._tier
        node = self._ram.node_of(row) if live else NONE
        if live and not self._rows.summed(row):  # also where the tier does not keep it: its file may be there
            self._ram.set_sum(row, written.raw_sum)
        if tier.owner(written.handle) is not None:
            return  # it was looked up meanwhile
        found = node != NONE and not self._index.unlinked(node)
        if not found or tier.has(node, self._rows.kind[row]) or not self._has_path(node, self._rows.kind[row]):
            tier.tier.drop(written.handle)
            return
        tier.keep(node, self._rows.kind[row], written.handle)
        if (above := self._index.parent(node)) != NONE:
            tier.used(above)

    def _note_no_room(self) -> None:
        if self._no_room_since is None:
            self._no_room_since = self._clock()

    def _not_taken(self, row: int, generation: int) -> None:
        """Note that the tier has refused an object, or could not write it. The last one is the latest."""
        self._refused.pop(row, None)
        self._refused[row] = generation, self._clock()

    def _refuse(self, reason: str) -> None:
        self._counters.add(f"tier_writes_dropped.{self._tier.tier.name}/{reason}")

    # Children that were committed before their parent

    def offer_below(self, node: int) -> None:
        """Queue what below the node is in RAM and could not be queued before it."""
        index = self._index
        below = list(index.children(node))
        for at in below:
            if index.rows_of(at) and not index.kinds_in_tier(self._tier.number, at):
                offered = [self.offer(at, kind) for kind in Kind if self._ram.visible(at, kind)]
                below.extend(index.children(at) if any(offered) else ())
