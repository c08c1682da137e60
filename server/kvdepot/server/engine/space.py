"""Objects in the arena: placing, publishing, dropping and evicting them.

Ties together the extent table, the lent table, the allocator, the index and the
eviction policy. Everything that leaves the index goes through `drop_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent, ExtentAllocator
from kvdepot.core.arena import NO_ROW, ArenaTables, LentMode
from kvdepot.core.calls import Kind
from kvdepot.core.eviction import EvictionPolicy
from kvdepot.server.engine.counters import Counters
from kvdepot.server.engine.evicting import Evictor, Holding
from kvdepot.server.engine.index import NONE, Index
from kvdepot.server.engine.lent import LentTable
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace, Namespaces
from kvdepot.server.engine.rows import COMMITTED, DYING, RESERVED, Rows
from kvdepot.server.engine.types import TierConfig
from kvdepot.server.engine.usable import Usable
from kvdepot.server.tiers.base import Tier

_MASK64: Final = (1 << 64) - 1
_KINDS: Final = tuple(map(int, Kind))
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
    ) -> None:
        layout = tables.layout
        self.rows = Rows(tables, run)
        self.lent = LentTable(tables)
        nodes = layout.rows + sum(tier.handles_max for tier, _, _ in tiers)
        self.index = Index(min(nodes, NODES_MAX), random_bytes, len(tiers))
        self.tiers: tuple[LowerTier, ...] = ()
        self.demoting: Callable[[int], bool] = lambda _: False  # whether a node is being written to a lower tier first
        self.namespaces = Namespaces(tables)
        self.allocator = ExtentAllocator(layout.data_offset, layout.data_bytes)
        self._data_bytes = layout.data_bytes
        self.counters = counters
        self.clock = clock
        self.usable = Usable(self.index, self.namespaces, self._complete_anywhere)
        self.namespaces.needs_changed = self._settle_namespace
        self.standing: Callable[[int], bool] = lambda _: False  # whether a request in progress ends at a node
        self.evictor = Evictor(self, self, policy, self._count_evicted)
        self.policy = policy
        self.tiers = tuple(LowerTier(self, number, *one) for number, one in enumerate(tiers))
        self._unsettled: dict[int, None] | None = None  # nodes that `settling_once` settles at its end
        self.unverified = 0  # adopted objects not yet verified
        self.unsummed = 0  # committed objects without a sum
        self.objects = 0  # committed objects
        self._unreusable: set[int] = set()  # dying rows whose bytes overlap others' (a torn table)

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

        The caller lends it and calls `rows.publish_reserved`.
        """
        self.evictor.filling = node
        self.policy.on_not_candidate(node)
        try:
            extents = self._allocate(size_bytes)
        finally:
            self.evictor.filling = NONE
        if not extents:
            self.settle_node(node)
            return NO_ROW
        row = self.rows.reserve(extents, key=key, parent=parent, kind=kind, namespace=namespace.slot, boundary=boundary)
        self.index.set_row(node, kind, row)
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

    def add_node(self, namespace: Namespace, key: bytes, parent: int, boundary: int) -> int:
        namespace.nodes += 1
        node = self.index.add(namespace.slot, key, parent, boundary)
        if parent != NONE:
            self.settle_evictors(parent)
        return node

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
        if changed not in (NONE, node):
            self.settle_evictors(changed)

    def _settle_namespace(self, namespace: Namespace) -> None:
        """It was adopted, and what its boundaries need is known only now. O(its nodes), once."""
        nodes = self.index.nodes()
        for node in nodes[self.index.namespaces[nodes] == namespace.slot].tolist() if namespace.nodes else ():
            self.settle_node(node)

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
        """Within it nothing is evicted; what may go is said once at its end, for each node that changed."""
        self._unsettled = {}
        try:
            yield
        finally:
            unsettled, self._unsettled = self._unsettled, None
            for node in unsettled:
                if self.index.has_objects(node):
                    self.settle_evictors(node)

    def node_of(self, row: int) -> int:
        """The node that has this row, NONE for a row that was unindexed."""
        if self.rows.state[row] not in (RESERVED, COMMITTED):
            return NONE
        node = self.index.find(self.rows.namespace[row], self.rows.key(row))
        return node if node != NONE and self.index.row(node, self.rows.kind[row]) == row else NONE

    def size_bytes(self, row: int) -> int:
        return sum(length for _, length in self.rows.extents(row))

    def rounded_bytes(self, row: int) -> int:
        """What the object takes of the arena."""
        return sum(self.allocator.rounded(length) for _, length in self.rows.extents(row))

    # Dropping

    def drop_row(self, node: int, kind: int) -> None:
        """Unindex one object in RAM. Where it made the path and nobody else has it, the subtree goes."""
        self._unindex(node, kind)
        self.lost(node, kind)

    def drop_corrupt(self, row: int) -> None:
        """Drop a committed object of RAM that is proved bad, with what nobody can reach without it."""
        node, kind = self.node_of(row), self.rows.kind[row]
        assert node != NONE, "a committed row without a node"
        self.counters.add("corrupt_objects")
        self.counters.add("dropped_objects.below_corrupt", max(self.drop_copy(node, kind) - 1, 0))

    def drop_copy(self, node: int, kind: int) -> int:
        """Unindex an object in RAM that is no good, and what cannot be reached without it; how many nodes went."""
        self._unindex(node, kind)
        return self.lost(node, kind)

    def lost(self, node: int, kind: int) -> int:
        """A copy of the object is gone. Where it made the path and nobody else has it, the subtree goes.

        Returns how many nodes went.
        """
        makes_path = kind == self.path_kind(node) or not self.index.has_objects(node)
        if makes_path and self.index.row(node, kind) == NO_ROW and not self.elsewhere(node, kind):
            return self.drop_subtree(node)
        self._settle_path(node)
        return 0

    def _settle_path(self, node: int) -> None:
        """The node and its parent, which may have become a leaf of a tier."""
        self.settle_node(node)
        parent = self.index.parent(node)
        if parent != NONE:
            self.settle_node(parent)

    def drop_subtree(self, node: int) -> int:
        """Drop everything at and below the node in every tier; bytes that are lent stay until they are given back."""
        parent = self.index.parent(node)
        order = self.index.leaves_first(node)
        affected = {parent}
        for at in order:
            for kind in _KINDS:
                if self.index.row(at, kind) != NO_ROW:
                    self._unindex(at, kind)
                for tier in self.tiers:
                    if tier.has(at, kind):
                        tier.drop(at, kind)
            affected.add(self._forget(at))
        for at in affected.difference(order, (NONE,)):
            self.settle_evictors(at)
        return len(order)

    def _unindex(self, node: int, kind: int) -> None:
        row = self.index.row(node, kind)
        if self.rows.state[row] == COMMITTED:
            self.count_committed(row, -1)
            if self.rows.run_of[row] != self.rows.run:
                self.unverified -= 1
            elif not self.rows.summed(row):
                self.unsummed -= 1
        self.index.set_row(node, kind, NO_ROW)
        self.rows.unindex(row)
        if not self.lent.pinned(row):
            self.rows.free(row, self.allocator)

    def _forget(self, node: int) -> int:
        """The ancestor whose outlook changed, or NONE."""
        self.namespaces.by_slot[self.index.namespace(node)].nodes -= 1
        changed = self.usable.removed(node)
        self.evictor.removed(node)
        for tier in self.tiers:
            tier.evictor.removed(node)
        self.index.remove(node)
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
        if row in self._unreusable:
            self.counters.add("arena.leaked_objects")
            return
        self.rows.free(row, self.allocator)

    def never_reuse(self, row: int) -> None:
        """Its bytes overlap another lent object's: they stay out of use until the next adoption."""
        self._unreusable.add(row)

    def lent_bytes(self) -> int:
        """Bytes that somebody may be touching. O(lent table)."""
        rows = np.unique(self.lent.rows[self.lent.modes != LentMode.FREE])
        several = self.rows.nexts[rows] != NO_ROW
        return int(self.rows.lengths[rows[~several]].sum()) + sum(map(self.size_bytes, rows[several].tolist()))

    def drop_namespace(self, namespace: Namespace, limit: int) -> int:
        """Drop at most `limit` of its nodes, from the leaves up, none that is lent; how many were dropped."""
        before = namespace.nodes
        for leaf in self.index.leaves_of(namespace.slot).tolist():
            node = leaf
            while node != NONE and self.index.is_leaf(node) and not self.busy(node):
                if before - namespace.nodes >= limit:
                    return limit
                above = self.index.parent(node)
                self.drop_subtree(node)
                node = above
        return before - namespace.nodes

    # Evicting

    def evict_one(self, reason: str) -> bool:
        """Drop the least useful unit; False when nothing may go."""
        return self.evictor.evict_one(reason)

    def evict_to(self, used_bytes: int, limit: int) -> None:
        """At most `limit` evictions towards `used_bytes`."""
        while limit > 0 and self.allocator.used_bytes > used_bytes:
            limit -= 1
            node = self.evictor.victim()
            if node is not None and self.demoting(node):
                self.evictor.park(node)
            elif not self.evict_one("watermark"):
                return

    def unpark(self) -> None:
        """Offer again what was lent when the policy named it."""
        self.evictor.unpark()

    def hit(self, node: int) -> None:
        """A request resumed at the node: a use for the policy of every tier."""
        now = self.clock()
        self.policy.on_hit(node, now)
        for tier in self.tiers:
            tier.policy.on_hit(node, now)

    def changed(self, node: int) -> None:
        """Objects of the node went: remove it where none is left, and settle what depends on it."""
        if self.index.has_objects(node):
            self._settle_path(node)
        else:
            self.drop_subtree(node)

    def copied(self, holding: Holding, node: int, kind: int) -> bool:
        """Whether another tier than this one has a complete copy."""
        if holding is not self and self.complete(node, kind):
            return True
        return any(tier is not holding and tier.complete(node, kind) for tier in self.tiers)

    def stands(self, node: int) -> bool:
        """Whether a request in progress ends at the node."""
        return self.standing(node)

    def _complete_anywhere(self, node: int, kind: int) -> bool:
        return self.complete(node, kind) or any(tier.complete(node, kind) for tier in self.tiers)

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

    def children(self, node: int) -> int:
        return self.index.children_in_ram(node)

    def cost_bytes(self, node: int, kind: int) -> int:
        row = self.index.row(node, kind)
        if self.rows.next[row] == NO_ROW:
            return self.allocator.rounded(self.rows.length[row])
        return self.rounded_bytes(row)

    def drop(self, node: int, kind: int) -> None:
        self._unindex(node, kind)
