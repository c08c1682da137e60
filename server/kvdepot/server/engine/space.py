"""Objects in the arena: placing, publishing, dropping and evicting them.

Ties together the extent table, the lent table, the allocator, the index and the
eviction policy. Everything that leaves the index goes through `drop_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent, ExtentAllocator
from kvdepot.core.arena import NO_ROW, ArenaTables, LentMode
from kvdepot.core.calls import Kind
from kvdepot.core.eviction import EvictionPolicy
from kvdepot.core.misses import MissReason
from kvdepot.server.engine.counters import Counters
from kvdepot.server.engine.evicting import Evictor, Holding
from kvdepot.server.engine.index import NONE, Index, Nodes
from kvdepot.server.engine.lent import LentTable
from kvdepot.server.engine.lost_keys import LostKeys
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace, Namespaces
from kvdepot.server.engine.quotas import Account, Owner
from kvdepot.server.engine.rows import COMMITTED, DYING, RESERVED, Rows
from kvdepot.server.engine.types import Quota, TierConfig
from kvdepot.server.engine.usable import Usable
from kvdepot.server.tiers.base import Tier

_MASK64: Final = (1 << 64) - 1
_KINDS: Final = tuple(map(int, Kind))
SETTLE_NODES_MAX: Final = 256
"""Nodes settled in one go when it turns out what their namespace needs: 2 to 4 ms."""
_SETTLE_NUMBERS: Final = 1 << 18
"""Node numbers that are looked through for them: 0.2 ms, which counts as ..."""
_SETTLE_MIN: Final = 16
"""... so many nodes."""
DROP_NODES_MAX: Final = 128
"""Nodes dropped in one go: 1 to 2 ms on a quiet machine."""
_SLICES_FOR_ROOM: Final = 32
"""So often that is done to make room between two ticks, some 50 ms: what was cut off may lie in lower tiers alone."""
_SHARED_EVICTIONS: Final = 16
"""Objects of a shared tier forgotten at most to make room for one node: RAM may have their nodes, too."""
HELD: Final = 1
"""Of `Space.kept_rows`: by prefetch (`Holds`)."""
PINNED: Final = 2
"""By an operator (`Pins`)."""
NODES_MAX: Final = 16 << 20
"""Chunks of all tiers together, some 100 bytes each; objects of further ones are not taken in."""


class Space:
    """The RAM tier's objects. All sizes are bytes."""

    def __init__(
        self,
        tables: ArenaTables,
        *,
        run: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        policy: EvictionPolicy,
        counters: Counters,
        tiers: Sequence[tuple[Tier, TierConfig, EvictionPolicy]] = (),
        quotas: Sequence[Quota] = (),
    ) -> None:
        layout = tables.layout
        self.rows = Rows(tables, run)
        self.lent = LentTable(tables)
        nodes = layout.rows + sum(tier.handles_max for tier, _, _ in tiers)
        self.index = Index(min(nodes, NODES_MAX), random_bytes, len(tiers))
        self.tiers: tuple[LowerTier, ...] = ()
        self.demoting: Callable[[int], bool] = lambda _: False  # whether a node is being written to a lower tier first
        self.save: Callable[[int], None] = lambda _: None  # offer a node to the tiers that have what follows it
        self.kept_rows = bytearray(layout.rows)  # HELD, PINNED: the object is not to be evicted for now
        self.dropped: Callable[[int], None] = lambda _: None  # an object that was held has left the index
        self.pinned_dropped: Callable[[int], None] = lambda _: None  # likewise
        # Let something of these namespaces, or of all, be evicted that was kept; False when there is nothing.
        self.give_way: Callable[[Collection[int] | None], bool] = lambda _: False
        self.namespaces = Namespaces(tables)
        self.lost_keys = LostKeys()
        self.allocator = ExtentAllocator(layout.data_offset, layout.data_bytes)
        self._data_bytes = layout.data_bytes
        self.counters = counters
        self.clock = clock
        self.usable = Usable(self.index, self.namespaces, self._complete_anywhere)
        self.namespaces.needs_changed = self._settle_namespace
        self.stands: Callable[[int], bool] = lambda _: False  # whether a request in progress ends at a node
        self.evictor = Evictor(self, self, policy, self._count_evicted, severs=True)
        self.policy = policy
        self.account = Account("ram", quotas, self.evictor)
        self.tiers = tuple(LowerTier(self, number, *one, quotas) for number, one in enumerate(tiers))
        self.accounts = (self.account, *(tier.account for tier in self.tiers))
        self.namespaces.named, self.namespaces.left = self._named, self._left
        self._unsettled_from: dict[int, int] = {}  # by namespace slot: the node number to settle next
        self._unsettled: dict[int, None] | None = None  # nodes that `settling_once` settles at its end
        self.drop_nodes_max = DROP_NODES_MAX
        self._slices_left = _SLICES_FOR_ROOM
        self.unverified = 0  # adopted objects not yet verified
        self.unsummed = 0  # committed objects without a sum
        self.objects = 0  # committed objects
        self.unreusable: set[int] = set()  # dying rows whose bytes overlap others' (a torn table)

    @property
    def growing(self) -> bool:
        """Whether the arena is still being populated."""
        return self.allocator.ready_bytes < self._data_bytes

    def in_ram(self, node: int, kind: int) -> bool:
        """Whether RAM has the object and may serve it."""
        row = self.index.row(node, kind)
        return row != NO_ROW and self.rows.visible(row)

    def path_kind(self, node: int) -> int:
        """The kind of object that makes a path in the node's namespace."""
        return self.namespaces.by_slot[self.index.namespace(node)].path_kind

    def elsewhere(self, node: int, kind: int) -> bool:
        """Whether a lower tier has the object: then dropping it from RAM is a demotion (DESIGN 5)."""
        return any(tier.has(node, kind) for tier in self.tiers)

    # Placing and publishing

    def place(
        self, namespace: Namespace, node: int, *, kind: int, key: bytes, parent: bytes, boundary: int, size_bytes: int
    ) -> int:
        """A row of the node in the making, evicting as needed; NO_ROW when nothing evictable is left.

        The caller lends it and calls `rows.publish_reserved`, or asks `account.over` why there is none.
        """
        self.evictor.filling = node
        self.policy.on_not_candidate(node)
        try:
            within = self.within_quota(self.account, namespace.slot, self.allocator.rounded(size_bytes))
            extents = self._allocate(size_bytes) if within else []
        finally:
            self.evictor.filling = NONE
        if not extents:
            self.settle_node(node)
            return NO_ROW
        row = self.rows.reserve(extents, key=key, parent=parent, kind=kind, namespace=namespace.slot, boundary=boundary)
        self.index.set_row(node, kind, row)
        self.account.add(namespace.slot, 1, self.allocator.rounded(size_bytes))
        self.evictor.settle(node)
        above = self.index.parent(node)
        if above != NONE:
            self.settle_evictors(above)
        return row

    def _allocate(self, size_bytes: int) -> list[Extent]:
        """Extents, and a free row for each; empty when nothing evictable is left."""
        rounded = self.allocator.rounded(size_bytes)
        if rounded > self.allocator.ready_bytes:
            return []  # evicting everything would not make room
        while self.allocator.free_bytes < rounded or not self.rows.free_count:
            if not self.evict_one("room"):
                return []
        extents = self.allocator.allocate(size_bytes)
        while extents is None or len(extents) > self.rows.free_count:
            for offset, length in extents or ():
                self.allocator.free(offset, length)
            if not self.evict_one("room"):
                return []
            extents = self.allocator.allocate(size_bytes)
        return extents

    @property
    def full(self) -> bool:
        """Whether there is no room for another node."""
        if self.index.count >= self.index.capacity:
            self._reclaim_for_room()
        return self.index.count >= self.index.capacity

    def make_room_for_nodes(self, count: int) -> None:
        """For local objects, as far as what only a shared tier has can go: it can be looked up again."""
        index = self.index
        left = _SHARED_EVICTIONS * count
        for tier in self.tiers:
            while tier.shared and index.count + count > index.capacity and left > 0:
                gone = tier.evictor.evict_one("nodes")
                if not gone:
                    break
                left -= gone

    def within_quota(self, account: Account, slot: int, size_bytes: int) -> bool:
        """Whether so much more of the namespace may lie in the account's tier, dropping others of its owners for it."""
        if account.make_room(slot, size_bytes) or (self._reclaim_for_room() and account.make_room(slot, size_bytes)):
            return True
        owner = account.over(slot, size_bytes) if account is self.account else None
        while owner is not None and self.give_way(owner.slots):
            if account.make_room(slot, size_bytes):
                return True
        return False

    def refused_by_quota(self, slot: int, size_bytes: int, objects: int = 1) -> tuple[Owner, bool] | None:
        """For whose sake RAM takes no such objects of the namespace, which is counted, and whether it may later."""
        owner = self.account.over(slot, size_bytes)
        if owner is None:
            return None
        self.account.refuse(owner, objects)
        return owner, size_bytes <= owner.capacity_bytes and self._comes_back(owner)

    def _comes_back(self, owner: Owner) -> bool:
        """Whether something of the owner's in RAM that may not go now may go later: it is reserved, dying or lent."""
        return self.evictor.waits(owner.slots) or any(
            self.account.objects(slot) > sum(self.namespaces.by_slot[slot].objects.values()) for slot in owner.slots
        )

    def _named(self, namespace: Namespace) -> None:
        self.account.enter(namespace)
        for tier in self.tiers:
            tier.named(namespace)

    def _left(self, slot: int) -> None:
        for account in self.accounts:
            account.leave(slot)

    def add_node(self, namespace: Namespace, key: bytes, parent: int, boundary: int) -> int:
        self.free_name(namespace.slot, key)
        namespace.nodes += 1
        node = self.index.add(namespace.slot, key, parent, boundary)
        if parent != NONE:
            self.settle_evictors(parent)
        return node

    def free_name(self, slot: int, key: bytes) -> None:
        """Take the name from a node that was cut off and is not reclaimed yet, and its objects from the tiers."""
        former = self.index.named(slot, key) if self.index.last_detached() != NONE else NONE
        if former != NONE and self.index.cut_off(former):
            self._cut_off(former)
            self.index.rename(former)

    def commit(self, row: int, node: int) -> None:
        """The caller clears the writer's lent entry next and then calls `settle_node`."""
        self.rows.commit(row)
        self.unsummed += 1
        self.count_committed(row, 1)
        self.policy.on_commit(node, self.clock(), self.index.parent(node), self.index.mark(node))

    def commit_summed(self, row: int, node: int, raw_sum: int) -> None:
        """Likewise, of an object whose bytes were just verified: `raw_sum` is their XXH3-128."""
        self.commit(row, node)
        self.set_sum(row, raw_sum)

    def set_sum(self, row: int, raw_sum: int) -> None:
        """The sum of an object of this run that has none yet."""
        self.rows.set_sum(row, raw_sum & _MASK64, raw_sum >> 64)
        self.unsummed -= 1

    def count_committed(self, row: int, change: int) -> None:
        namespace = self.namespaces.by_slot[self.rows.namespace[row]]
        namespace.objects[self.rows.kind[row]] += change
        namespace.bytes += change * self.size_bytes(row)
        self.objects += change

    def settle_node(self, node: int) -> None:
        """Objects of the node came, went or were completed: say anew what of it may go, in every tier."""
        changed = self.usable.settle(node)
        self.settle_evictors(node)
        for at in changed:
            if at not in (NONE, node):
                self.settle_evictors(at)

    def _settle_namespace(self, namespace: Namespace) -> None:
        """It was adopted, and what its boundaries need is known only now: its nodes are settled in slices."""
        if namespace.nodes:
            self._unsettled_from[namespace.slot] = 0
            self.settle_some()

    def settle_some(self) -> None:
        """Go on with that. Until a node's turn comes its worth is what it was."""
        left, index = SETTLE_NODES_MAX, self.index
        while left > 0 and self._unsettled_from:
            slot, start = next(iter(self._unsettled_from.items()))
            candidates = index.candidates(slot, start, start + _SETTLE_NUMBERS)
            following = start + _SETTLE_NUMBERS
            if len(candidates) > left:
                candidates = candidates[:left]
                following = int(candidates[-1]) + 1
            for node in index.live(slot, candidates).tolist():
                self.settle_node(node)
            self._drop_pathless(slot, candidates)
            left -= max(len(candidates), _SETTLE_MIN)
            self._unsettled_from[slot] = following
            if following >= index.high:
                del self._unsettled_from[slot]

    def _drop_pathless(self, slot: int, candidates: Nodes) -> None:
        """Where all that made paths was lost, the rest was adopted as if it made them: it is of use to nobody."""
        namespace, index = self.namespaces.by_slot.get(slot), self.index
        if namespace is None or namespace.spec is None:
            return
        kind = namespace.path_kind
        for node in index.live(slot, candidates).tolist():
            pathless = index.row(node, kind) == NO_ROW and not self.elsewhere(node, kind)
            if pathless and len(index.live(slot, np.array([node]))):  # else it went with one above it
                self.note_lost(node, MissReason.LOST)
                self.drop_subtree(node)

    def settle_evictors(self, node: int) -> None:
        """Say anew what of the node may go."""
        if self._unsettled is not None:
            self._unsettled[node] = None
            return
        self.evictor.settle(node)
        for tier in self.tiers:
            tier.settle(node)

    @contextmanager
    def settling_once(self) -> Iterator[None]:
        """Within it no object leaves; what may go is said once at its end, for each node that changed."""
        self._unsettled = {}
        try:
            yield
        finally:
            unsettled, self._unsettled = self._unsettled, None
            nodes = np.fromiter(unsettled, np.int64, len(unsettled))
            for node in self.index.many_in_ram(nodes).tolist():
                self.evictor.settle(node)
            for tier in self.tiers:
                for node in self.index.many_in_tier(tier.number, nodes).tolist():
                    tier.settle(node)

    def node_of(self, row: int) -> int:
        """The node that has this row, cut off or not; NONE for a row that was unindexed."""
        if self.rows.state[row] not in (RESERVED, COMMITTED):
            return NONE
        node = self.index.named(self.rows.namespace[row], self.rows.key(row))
        return node if node != NONE and self.index.row(node, self.rows.kind[row]) == row else NONE

    def size_bytes(self, row: int) -> int:
        return sum(length for _, length in self.rows.extents(row))

    def rounded_bytes(self, row: int) -> int:
        """What the object takes of the arena."""
        if self.rows.next[row] == NO_ROW:
            return self.allocator.rounded(self.rows.length[row])
        return sum(self.allocator.rounded(length) for _, length in self.rows.extents(row))

    # Dropping

    def drop_corrupt(self, row: int) -> None:
        """Drop a committed object of RAM that is proved bad, with what nobody can reach without it."""
        node, kind = self.node_of(row), self.rows.kind[row]
        assert node != NONE, "a committed row without a node"
        self.counters.add("corrupt_objects")
        self.counters.add("dropped_objects.below_corrupt", max(self.drop_row(node, kind, MissReason.CORRUPT) - 1, 0))

    def drop_row(self, node: int, kind: int, reason: MissReason = MissReason.LOST) -> int:
        """Unindex an object in RAM, and what cannot be reached without it in any tier; how many nodes went."""
        self._unindex(node, kind)
        return self.lost(node, kind, reason)

    def lost(self, node: int, kind: int, reason: MissReason = MissReason.LOST) -> int:
        """A copy of the object is gone. Where it made the path and nobody else has it, the subtree goes.

        Returns how many nodes went.
        """
        makes_path = kind == self.path_kind(node) or not self.index.has_objects(node)
        if makes_path and self.index.row(node, kind) == NO_ROW and not self.elsewhere(node, kind):
            self.note_lost(node, reason)
            return self.drop_subtree(node)
        self._settle_path(node)
        return 0

    def _settle_path(self, node: int) -> None:
        """The node, and what may go of its parent, which may have become a leaf of a tier.

        Whether somebody could resume at the parent does not depend on it: with windows, to ask would look at all that
        follows the parent.
        """
        self.settle_node(node)
        parent = self.index.parent(node)
        if parent != NONE:
            self.settle_evictors(parent)

    def drop_subtree(self, node: int) -> int:
        """Drop everything at and below the node in every tier; bytes that are lent stay until they are given back.

        What is more than can be dropped in one go is cut off, so that nobody finds it, and left to `reclaim`.
        Returns how many nodes went.
        """
        parent = self.index.parent(node)
        order = self.index.leaves_first(node, self.drop_nodes_max)
        affected = {parent}
        if not order:
            affected.update(self._cut_off(node))
        for at in order:
            self._strip(at)
            affected.update(self._forget(at))
        for at in affected.difference(order, (NONE, node)):
            self.settle_evictors(at)
        return len(order) or 1

    def reclaim(self) -> None:
        """Drop some of what was cut off. Once a tick."""
        self._slices_left = _SLICES_FOR_ROOM
        self._reclaim_slice()

    def _reclaim_for_room(self) -> bool:
        """Ahead of the tick; False when there is nothing, or was enough of it."""
        if self._slices_left <= 0 or not self._reclaim_slice():
            return False
        self._slices_left -= 1
        return True

    def _reclaim_slice(self) -> bool:
        """False when nothing was cut off."""
        index, before = self.index, self.index.count
        steps = 0  # each node is cut off from the one above it, then removed
        while steps < 2 * self.drop_nodes_max and (node := index.last_detached()) != NONE:
            steps += 1
            child = index.first_child(node)
            if child != NONE:
                self._cut_off(child)
            else:
                self._forget(node)
        self.counters.add("dropped_objects.below_dropped", before - index.count)
        return steps > 0

    def _cut_off(self, node: int) -> list[int]:
        """Whose outlook changed, NONE among them."""
        self._strip(node)
        changed = self._leave_policies(node)
        self.index.detach(node)
        return changed

    def _strip(self, node: int) -> None:
        """Drop its objects in every tier."""
        for kind in _KINDS:
            if self.index.row(node, kind) != NO_ROW:
                self._unindex(node, kind)
            for tier in self.tiers:
                if tier.has(node, kind):
                    tier.drop(node, kind)

    def _unindex(self, node: int, kind: int) -> None:
        row = self.index.row(node, kind)
        if self.rows.state[row] == COMMITTED:
            self.count_committed(row, -1)
            if self.rows.run_of[row] != self.rows.run:
                self.unverified -= 1
            elif not self.rows.summed(row):
                self.unsummed -= 1
        self.index.set_row(node, kind, NO_ROW)
        if self.kept_rows[row] & HELD:
            self.dropped(row)
        if self.kept_rows[row] & PINNED:
            self.pinned_dropped(row)
        self.rows.unindex(row)
        if not self.lent.pinned(row):
            self._free(row)

    def _free(self, row: int) -> None:
        self.account.add(self.rows.namespace[row], -1, -self.rounded_bytes(row))
        self.rows.free(row, self.allocator)

    def _forget(self, node: int) -> list[int]:
        """Likewise."""
        self.namespaces.by_slot[self.index.namespace(node)].nodes -= 1
        changed = self._leave_policies(node)
        self.index.remove(node)
        return changed

    def _leave_policies(self, node: int) -> list[int]:
        """Likewise."""
        changed = self.usable.removed(node)
        self.evictor.removed(node)
        for tier in self.tiers:
            tier.evictor.removed(node)
        return changed

    # Giving back

    def give_back(self, entry: int) -> None:
        """One lent entry ends."""
        row = self.lent.row_of(entry)
        self.evictor.returned()
        if self.lent.clear(entry):
            self._given_back(row)

    def give_back_many(self, entries: npt.NDArray[np.uint32]) -> None:
        last = self.lent.clear_many(entries)
        self.evictor.returned()
        for row in last[self.rows.states[last] == DYING]:
            self._given_back(int(row))

    def _given_back(self, row: int) -> None:
        if self.rows.state[row] != DYING:
            return
        if row in self.unreusable:
            self.counters.add("leaked_objects")
            return
        self._free(row)

    def never_reuse(self, row: int) -> None:
        """Its bytes overlap another lent object's: they stay out of use until the next adoption."""
        self.unreusable.add(row)

    def lent_bytes(self) -> int:
        """Bytes that somebody may be touching. O(lent table)."""
        rows = np.unique(self.lent.rows[self.lent.modes != LentMode.FREE])
        several = self.rows.nexts[rows] != NO_ROW
        return int(self.rows.lengths[rows[~several]].sum()) + sum(map(self.size_bytes, rows[several].tolist()))

    # Evicting

    def evict_one(self, reason: str) -> bool:
        """Drop the least useful unit: first what nobody can find, last what is kept; False when nothing may go."""
        return self._reclaim_for_room() or self.evictor.evict_one(reason) > 0 or self.give_way(None)

    def evict_to(self, used_bytes: int, limit: int) -> bool:
        """Towards `used_bytes`; no further unit once `limit` objects have gone or wait to be demoted: True."""
        while limit > 0 and self.allocator.used_bytes > used_bytes:
            node = self.evictor.victim()
            if node is not None and self.demoting(node):
                self.evictor.park(node)
                limit -= 1
                continue
            gone = self.evictor.evict_one("watermark")
            if not gone:
                self.evictor.sever("watermark")
                return False
            limit -= gone
        return limit <= 0

    def unpark(self) -> None:
        """Offer again what was lent when the policy named it."""
        self.evictor.unpark()

    def hit(self, node: int) -> None:
        """A request resumed at the node: a use for the policy of every tier, and of the path for a shared one."""
        now = self.clock()
        self.policy.on_hit(node, now)
        for tier in self.tiers:
            tier.policy.on_hit(node, now)
            tier.used(node)

    def ended(self, node: int) -> None:
        """A request ended at the node."""
        self.policy.on_end(node)
        for tier in self.tiers:
            tier.policy.on_end(node)

    def changed(self, node: int) -> None:
        """Objects of the node went: what has no path now goes, and what depends on the node is settled."""
        self.lost(node, self.path_kind(node), MissReason.EVICTED)

    def gave_up(self, nodes: int) -> None:
        """So many went with an end."""
        self.counters.add("dropped_objects.below_end", nodes)

    def note_lost(self, node: int, reason: MissReason) -> None:
        """For those who ask for the chunk next."""
        namespace = self.namespaces.by_slot[self.index.namespace(node)]
        self.lost_keys.note(namespace.id, self.index.key(node), reason)

    def copied(self, holding: Holding, node: int, kind: int) -> bool:
        """Whether another tier than this one has a complete copy."""
        if holding is not self and self.complete(node, kind):
            return True
        return any(tier is not holding and tier.complete(node, kind) for tier in self.tiers)

    def _complete_anywhere(self, node: int, kind: int) -> bool:
        return self.complete(node, kind) or self.elsewhere(node, kind)

    def _count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:
        self.counters.add(f"evicted_objects.{reason}", objects)
        self.counters.add("evicted_bytes", size_bytes)

    # What RAM holds, for its evictor

    def has(self, node: int, kind: int) -> bool:
        return self.index.row(node, kind) != NO_ROW

    def complete(self, node: int, kind: int) -> bool:
        row = self.index.row(node, kind)
        return row != NO_ROW and self.rows.state[row] == COMMITTED

    def busy(self, node: int) -> bool:
        return any(map(self.lent.pinned, self.index.rows_of(node)))

    def kept(self, node: int) -> bool:
        return any(self.kept_rows[row] & HELD for row in self.index.rows_of(node))

    def pinned(self, node: int, kind: int) -> bool:
        row = self.index.row(node, kind)
        return row != NO_ROW and bool(self.kept_rows[row] & PINNED)

    def children(self, node: int) -> int:
        return self.index.children_in_ram(node)

    def cost_bytes(self, node: int, kind: int) -> int:
        return self.rounded_bytes(self.index.row(node, kind))

    def drop(self, node: int, kind: int) -> None:
        self._unindex(node, kind)
