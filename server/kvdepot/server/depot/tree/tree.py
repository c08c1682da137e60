"""The tree of chunks over all tiers: which nodes there are, what leaves them, and what follows from that.

A node exists while any tier has an object of it. `Tree` is the union: it owns the index, the namespaces, and which
nodes a request could resume at, and it makes the tiers. RAM (`ram`) and the tiers below (`tiers`) are peers: what is
true of each is in `holdings`. Everything that leaves a node goes through `lost` or `drop_subtree`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

import numpy as np
from kvdepot.core.arena import NO_ROW, ArenaTables
from kvdepot.core.calls import Kind
from kvdepot.core.eviction_policy import EvictionPolicy
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.tree.holding import Holding
from kvdepot.server.depot.tree.in_use import InUse
from kvdepot.server.depot.tree.index import NONE, Index, Nodes
from kvdepot.server.depot.tree.lost_keys import LostKeys
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace, Namespaces
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.tree_tier import GiveWay, TreeTier
from kvdepot.server.depot.tree.usable import Usable
from kvdepot.server.depot.types import Quota, TierConfig
from kvdepot.server.platform.logs import REPEAT_SECONDS, LogThrottle
from kvdepot.server.storage.base import Tier

_LOG: Final = logging.getLogger("kvdepotd")
REFRESH_NODES_MAX: Final = 256
"""Nodes refreshed at once when it turns out what their namespace needs: 2 to 4 ms."""
_REFRESH_NUMBERS: Final = 1 << 18
"""Node numbers that are searched for them: 0.2 ms, which counts as ..."""
_REFRESH_MIN: Final = 16
"""... so many nodes."""
DROP_NODES_MAX: Final = 128
"""Nodes dropped at once: 1 to 2 ms on a quiet machine."""
_SLICES_FOR_ROOM: Final = 32
"""Slices reclaimed at most to make room between two ticks, 50 ms: unlinked nodes may have nothing in RAM."""
_SHARED_EVICTIONS: Final = 16
"""Objects of a shared tier forgotten at most to make room for one node: RAM may have their nodes, too."""
_CORRUPT_MAX: Final = 1024
"""Objects that went as corrupt and are remembered for answers to writes: more than are written at once."""
NODES_MAX: Final = 16 << 20
"""Chunks of all tiers together, some 100 bytes each; objects of further ones are not taken in."""


class Tree:
    """The union of tiers. All sizes are bytes."""

    def __init__(
        self,
        tables: ArenaTables,
        *,
        run: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        policy: EvictionPolicy,
        counters: Counters,
        give_way: GiveWay = lambda _: False,
        tiers: Sequence[tuple[Tier, TierConfig, EvictionPolicy]] = (),
        quotas: Sequence[Quota] = (),
        tenants: Sequence[str] = (),
    ) -> None:
        """Make an empty tree.

        `policy` is RAM's. `give_way` unpins what prefetch keeps in RAM. `tiers` are those below RAM. `tenants` have
        the parts of RAM, if there are several.
        """
        nodes = tables.layout.rows + sum(tier.handles_max for tier, _, _ in tiers)
        self.counters = counters
        self.clock = clock
        self.index = Index(min(nodes, NODES_MAX), random_bytes, len(tiers))
        self.namespaces = Namespaces(tables, self)
        self.in_use = InUse(self.index)
        self.lost_keys = LostKeys()
        self.usable = Usable(self.index, self.namespaces, self._complete_anywhere)
        self.ram = RamTier(
            self, tables, run=run, policy=policy, counters=counters, give_way=give_way, quotas=quotas,
            tenants=tenants,
        )  # fmt: skip
        self.tiers = tuple(LowerTier(self, number, *tier, counters, quotas) for number, tier in enumerate(tiers))
        self.disks = tuple(tier for tier in self.tiers if tier.shared is None)  # each tells at its opening what it has
        self.holdings: tuple[TreeTier, ...] = (self.ram, *self.tiers)
        self._refresh_from: dict[int, int] = {}  # by namespace slot: the node number to refresh next
        self._outdated: dict[int, None] | None = None  # nodes that `updating_once` updates at its end
        self._corrupt: OrderedDict[tuple[int, int], None] = OrderedDict()  # (row, generation) of the last ones
        self._throttle = LogThrottle(clock)
        self.drop_nodes_max = DROP_NODES_MAX
        self._slices_left = _SLICES_FOR_ROOM

    def path_kind(self, node: int) -> int:
        """Return the kind of object that makes a path in the node's namespace."""
        return self.namespaces.by_slot[self.index.namespace(node)].path_kind

    def elsewhere(self, node: int, kind: int) -> bool:
        """Return whether a lower tier has the object: dropping it from RAM is a demotion (design.md#eviction)."""
        for tier in self.tiers:  # noqa: SIM110 - `any` makes a generator each time: it takes twice as long
            if tier.has(node, kind):
                return True
        return False

    def has(self, node: int, kind: int) -> bool:
        """Return whether any tier has the object, or is being given it."""
        return self.index.row(node, kind) != NO_ROW or self.elsewhere(node, kind)

    def copied(self, holding: Holding, node: int, kind: int) -> bool:
        """Return whether another tier than this one has a complete copy."""
        if holding is not self.ram and self.ram.complete(node, kind):
            return True
        for tier in self.tiers:  # noqa: SIM110 - as above
            if tier is not holding and tier.complete(node, kind):
                return True
        return False

    def _complete_anywhere(self, node: int, kind: int) -> bool:
        return self.ram.complete(node, kind) or self.elsewhere(node, kind)

    # Namespaces

    def named(self, namespace: Namespace) -> None:
        """Note a namespace that is new, or of which more is known now, in every tier."""
        for holding in self.holdings:
            holding.enter(namespace)

    def left(self, slot: int) -> None:
        """Note that the slot has no namespace any more."""
        for holding in self.holdings:
            holding.account.leave(slot)
        self.ram.left(slot)

    def needs_changed(self, namespace: Namespace) -> None:
        """Note that what the boundaries of an adopted namespace need is known only now: refresh its nodes in slices."""
        if namespace.nodes:
            self._refresh_from[namespace.slot] = 0
            self.refresh_some()

    # Room

    @property
    def full(self) -> bool:
        """Whether there is no room for another node."""
        if self.index.count >= self.index.capacity:
            self.reclaim_for_room()
        return self.index.count >= self.index.capacity

    def make_room_for_nodes(self, count: int) -> None:
        """Make room for nodes of local objects: drop what a shared tier has too, because it can be looked up again."""
        index = self.index
        left = _SHARED_EVICTIONS * count
        for tier in self.tiers:
            while tier.shared and index.count + count > index.capacity and left > 0:
                gone = tier.evictor.evict_one("nodes")
                if not gone:
                    break
                left -= gone

    def within_quota(self, tier: TreeTier, slot: int, size_bytes: int) -> bool:
        """Return whether so much more of the namespace may lie in the tier, dropping others of its owners for it."""
        account = tier.account
        if account.make_room(slot, size_bytes) or (self.reclaim_for_room() and account.make_room(slot, size_bytes)):
            return True
        owner = account.over(slot, size_bytes)
        while owner is not None and tier.give_way(owner.slots):
            if account.make_room(slot, size_bytes):
                return True
        return False

    # Nodes

    def add_node(self, namespace: Namespace, key: bytes, parent: int, boundary: int) -> int:
        self.free_name(namespace.slot, key)
        namespace.nodes += 1
        node = self.index.add(namespace.slot, key, parent, boundary)
        if parent != NONE:
            self.update_candidates(parent)
        return node

    def free_name(self, slot: int, key: bytes) -> None:
        """Detach a key from a node that is unlinked but not yet reclaimed, so that the key can be reused."""
        former = self.index.named(slot, key) if self.index.last_unlinked() != NONE else NONE
        if former != NONE and self.index.unlinked(former):
            self._unlink(former)
            self.index.rename(former)

    def refresh_node(self, node: int) -> None:
        """Refresh what is usable, and what may go in every tier: objects of the node came, went or were completed."""
        changed = self.usable.refresh(node)
        self.update_candidates(node)
        for at in changed:
            if at not in (NONE, node):
                self.update_candidates(at)

    def refresh_some(self) -> None:
        """Refresh a slice of the nodes of adopted namespaces. Until its turn comes, a node keeps its worth."""
        left, index = REFRESH_NODES_MAX, self.index
        while left > 0 and self._refresh_from:
            slot, start = next(iter(self._refresh_from.items()))
            candidates = index.candidates(slot, start, start + _REFRESH_NUMBERS)
            following = start + _REFRESH_NUMBERS
            if len(candidates) > left:
                candidates = candidates[:left]
                following = int(candidates[-1]) + 1
            for node in index.live(slot, candidates).tolist():
                self.refresh_node(node)
            self._drop_pathless(slot, candidates)
            left -= max(len(candidates), _REFRESH_MIN)
            self._refresh_from[slot] = following
            if following >= index.high:
                del self._refresh_from[slot]

    def _drop_pathless(self, slot: int, candidates: Nodes) -> None:
        """Drop what was adopted as if it made paths, because all that made them was lost: it is unreachable."""
        namespace, index = self.namespaces.by_slot.get(slot), self.index
        if namespace is None or namespace.spec is None:
            return
        kind = namespace.path_kind
        for node in index.live(slot, candidates).tolist():
            pathless = index.row(node, kind) == NO_ROW and not self.elsewhere(node, kind)
            if pathless and len(index.live(slot, np.array([node]))):  # else it went with one above it
                self.note_lost(node, MissReason.LOST)
                self.drop_subtree(node)

    def update_candidates(self, node: int) -> None:
        """Tell the evictor of every tier what of the node may go."""
        if self._outdated is not None:
            self._outdated[node] = None
            return
        for holding in self.holdings:
            holding.evictor.update_candidate(node)

    @contextmanager
    def updating_once(self) -> Iterator[None]:
        """Put off `update_candidates` to the end, once for each node. No object may leave meanwhile."""
        self._outdated = {}
        try:
            yield
        finally:
            outdated, self._outdated = self._outdated, None
            nodes = np.fromiter(outdated, np.int64, len(outdated))
            for holding in self.holdings:
                for node in holding.among(nodes).tolist():
                    holding.evictor.update_candidate(node)

    def hit(self, node: int) -> None:
        """Note that a request resumed at the node: a use for every tier's policy, and of the path for shared tiers."""
        now = self.clock()
        for holding in self.holdings:
            holding.evictor.policy.on_hit(node, now)
        for tier in self.tiers:
            tier.used(node)

    def ended(self, node: int) -> None:
        """Note that a request ended at the node."""
        for holding in self.holdings:
            holding.evictor.policy.on_end(node)

    # Dropping

    def drop_corrupt(self, row: int) -> None:
        """Drop a committed object of RAM that is proved bad, with what nobody can reach without it."""
        node, kind = self._note_corrupt(row)
        self.counters.add("dropped_objects.below_corrupt", max(self.drop_row(node, kind, MissReason.CORRUPT) - 1, 0))

    def drop_doubtful(self, row: int, raw_sum: int) -> None:
        """Drop a committed object of RAM from every tier, with all that follows it: two of its checksums differ.

        `raw_sum` is the one that the row does not have. Neither proves which bytes were committed, and an engine may
        have computed what follows from the others.
        """
        name = self.ram.name(row)
        raw_sums = [known for known in (self.ram.rows.raw_sum(row), raw_sum) if known is not None]
        node, kind = self._note_corrupt(row)
        if self._throttle.due("doubtful"):
            _LOG.error(
                "RAM: two checksums of %s of chunk %s differ, dropped from every tier; most likely memory is faulty"
                " (further ones are only counted for %d s)",
                Kind(kind).name.lower(), name.key.hex(), REPEAT_SECONDS,
            )  # fmt: skip
        for tier in self.tiers:
            tier.quarantine(name, raw_sums)
        self._doubt_following(row, node)
        self.note_lost(node, MissReason.CORRUPT)
        self.counters.add("dropped_objects.below_corrupt", self.drop_subtree(node) - 1)

    def _doubt_following(self, doubtful: int, node: int) -> None:
        """Have the files of what was stored after a doubtful object quarantined, as far as RAM has their checksums.

        Shared tiers keep files. Once the object is stored again, these would be found again.
        """
        shared, rows, nodes = [tier for tier in self.tiers if tier.shared is not None], self.ram.rows, [node]
        for at in nodes if shared else ():
            nodes.extend(islice(self.index.children(at), _CORRUPT_MAX - len(nodes)))
            for row in self.index.rows_of(at):
                if row == doubtful or not rows.visible(row):
                    continue
                self._remember_corrupt(row)  # a write of it may be under way
                if (raw_sum := rows.raw_sum(row)) is None:
                    continue
                for tier in shared:
                    if tier.has(at, rows.kind[row]):
                        tier.quarantine(self.ram.name(row), (raw_sum,))

    def drop_torn(self) -> None:
        """Drop objects whose links were found damaged. One that is dying already goes when its last loan ends."""
        for row in list(self.ram.rows.torn):
            node = self.ram.node_of(row)
            if node != NONE:
                self.drop_row(node, self.ram.rows.kind[row], MissReason.CORRUPT)
            elif self.ram.detached.flags[row]:
                self.ram.drop_detached(row)
            self.ram.rows.torn.discard(row)

    def _note_corrupt(self, row: int) -> tuple[int, int]:
        """Count a corrupt object, and return its node and kind."""
        node, kind = self.ram.node_of(row), self.ram.rows.kind[row]
        assert node != NONE, "a committed row without a node"
        self.counters.add("corrupt_objects")
        self._remember_corrupt(row)
        return node, kind

    def _remember_corrupt(self, row: int) -> None:
        self._corrupt[row, self.ram.rows.generation[row]] = None
        if len(self._corrupt) > _CORRUPT_MAX:
            self._corrupt.popitem(last=False)

    def was_corrupt(self, row: int, generation: int) -> bool:
        """Return whether the object that this row was went as corrupt. A write of it may have begun before."""
        return (row, generation) in self._corrupt

    def drop_row(self, node: int, kind: int, reason: MissReason = MissReason.LOST) -> int:
        """Unindex an object in RAM, and what is unreachable without it in any tier. Return the number of nodes."""
        self.ram.drop(node, kind)
        return self.lost(node, kind, reason)

    def lost(self, node: int, kind: int, reason: MissReason = MissReason.LOST) -> int:
        """Note that a copy of the object is gone. Where it made the path and no tier has it, the subtree goes.

        Return the number of nodes that went.
        """
        makes_path = kind == self.path_kind(node) or not self.index.has_objects(node)
        if makes_path and self.index.row(node, kind) == NO_ROW and not self.elsewhere(node, kind):
            self.note_lost(node, reason)
            return self.drop_subtree(node)
        self._refresh_path(node)
        return 0

    def changed(self, node: int) -> None:
        """Drop what has no path now that objects of the node went, and refresh what depends on the node."""
        self.lost(node, self.path_kind(node), MissReason.EVICTED)

    def dropped_orphan(self, nodes: int) -> None:
        """Count the nodes that went with an orphan."""
        self.counters.add("dropped_objects.orphaned", nodes)

    def note_lost(self, node: int, reason: MissReason) -> None:
        """Remember the reason, for the next lookup of the chunk."""
        namespace = self.namespaces.by_slot[self.index.namespace(node)]
        self.lost_keys.note(namespace.id, self.index.key(node), reason)

    def _refresh_path(self, node: int) -> None:
        """Refresh the node, and update its parent, which may have become a leaf of a tier.

        Whether the parent is usable does not depend on the node. To ask would, with windows, look at all that follows
        the parent.
        """
        self.refresh_node(node)
        parent = self.index.parent(node)
        if parent != NONE:
            self.update_candidates(parent)

    def drop_subtree(self, node: int) -> int:
        """Drop everything at and below the node in every tier. Lent bytes stay until their loans end.

        A subtree that is too large for one step is unlinked, so that nobody finds it, and left to `reclaim`.
        Return the number of nodes that went.
        """
        parent = self.index.parent(node)
        order = [node] if self.index.is_leaf(node) else self.index.leaves_first(node, self.drop_nodes_max)
        affected = {parent}
        if not order:
            affected.update(self._unlink(node))
        for at in order:
            self._drop_objects(at)
            affected.update(self._forget(at))
        for at in affected.difference(order, (NONE, node)):
            self.update_candidates(at)
        return len(order) or 1

    def reclaim(self) -> None:
        """Drop a slice of what was unlinked. Call once a tick."""
        self._slices_left = _SLICES_FOR_ROOM
        self._reclaim_slice()

    def reclaim_for_room(self) -> bool:
        """Drop a slice before the tick. Return False when there is nothing, or the limit between ticks is reached."""
        if self._slices_left <= 0 or not self._reclaim_slice():
            return False
        self._slices_left -= 1
        return True

    def _reclaim_slice(self) -> bool:
        """Return False when nothing is unlinked."""
        index, before = self.index, self.index.count
        steps = 0  # each node is unlinked from the one above it, then removed
        while steps < 2 * self.drop_nodes_max and (node := index.last_unlinked()) != NONE:
            steps += 1
            child = index.first_child(node)
            if child != NONE:
                self._unlink(child)
            else:
                self._forget(node)
        self.counters.add("dropped_objects.below_dropped", before - index.count)
        return steps > 0

    def _unlink(self, node: int) -> list[int]:
        """Unlink the node from its parent. Return the nodes whose outlook changed, NONE among them."""
        self._drop_objects(node)
        changed = self._leave_policies(node)
        self.index.unlink(node)
        return changed

    def _drop_objects(self, node: int) -> None:
        """Drop its objects in every tier."""
        for holding in self.holdings:
            for kind in holding.kinds(node):
                holding.drop(node, kind)

    def _forget(self, node: int) -> list[int]:
        """Remove a leaf. Return the nodes whose outlook changed."""
        self.namespaces.by_slot[self.index.namespace(node)].nodes -= 1
        changed = self._leave_policies(node)
        self.index.remove(node)
        return changed

    def _leave_policies(self, node: int) -> list[int]:
        """Take the node from all policies. Return the nodes whose outlook changed."""
        changed = self.usable.removed(node)
        for holding in self.holdings:
            holding.evictor.removed(node)
        return changed
