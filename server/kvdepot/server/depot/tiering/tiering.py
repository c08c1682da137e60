"""The tiers below RAM, as the depot drives them: what they found, what they lost, what is written to them.

Nothing here waits: a tier answers later, on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.report import TierStatus
from kvdepot.server.depot.sessions.workers import WorkerLoans
from kvdepot.server.depot.tiering.promotions import Promotions
from kvdepot.server.depot.tiering.write_queue import WriteQueue
from kvdepot.server.depot.tree.free_slots import free_slot
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.storage.base import NO_HANDLE, ObjectName, Tier
from kvdepot.server.storage.found import FoundObjects

_DROPPED_MAX: Final = 4096
"""Nodes dropped at most for the new namespaces of one slice of what a tier found: some 50 ms."""
_DROPPED_MIN: Final = 256
"""What each of them counts at least, for the search."""
_KINDS: Final = frozenset(map(int, Kind))


class Tiering:
    """All lower tiers of the depot. It is a `TierListener`, and the `Demotion` of RAM."""

    def __init__(self, tree: Tree, ram: RamTier, loans: WorkerLoans, read_ended: Callable[[], None]) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._tiers = tree.tiers
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._guard = guard = engine_guard(self._counters.add)
        self._by_name = {tier.tier.name: tier for tier in self._tiers}
        self._queues = {tier.number: WriteQueue(tree, ram, loans, tier, guard) for tier in self._tiers}
        self._preferred = list(self._tiers)
        self.promotions = Promotions(tree, ram, loans, self._preferred, self.lost_copy, read_ended, guard)
        self._shared = [(tier, self._queues[tier.number]) for tier in self._tiers if tier.shared is not None]
        self._kept_path = NONE  # in the call at hand: a node whose path a restart finds
        self._droppable = 0  # nodes that may still be dropped for namespaces of the slice at hand
        self.configure({})

    def configure(self, tiers: Mapping[str, TierConfig]) -> None:
        """Use these settings of tiers, by name, from now on. Objects that wait to be written are written."""
        for tier in self._tiers:
            tier.config = tiers.get(tier.tier.name, tier.config)
        self._preferred.sort(key=lambda tier: (-tier.config.load_weight, tier.number))
        self._at_commit = self._with_policy(WritePolicy.COMMIT)
        self._at_second_use = self._with_policy(WritePolicy.SECOND_USE, WritePolicy.AUTO)
        self._at_eviction = self._with_policy(WritePolicy.EVICT, WritePolicy.AUTO)
        self._learning = [tier for tier, _ in self._with_policy(WritePolicy.AUTO)]

    def _with_policy(self, *policies: WritePolicy) -> list[tuple[LowerTier, WriteQueue]]:
        return [(tier, self._queues[tier.number]) for tier in self._tiers if tier.config.write in policies]

    @property
    def readable(self) -> list[LowerTier]:
        """The tiers that serve now, the preferred one first."""
        return [tier for tier in self._preferred if tier.tier.readable]

    def start(self) -> None:
        for tier in self._tiers:
            tier.tier.start(self)

    async def close(self) -> None:
        closed = await asyncio.gather(*(tier.tier.close() for tier in self._tiers), return_exceptions=True)
        for error in closed:
            if isinstance(error, Exception):
                self._guard.caught("tier", error)

    def tick(self) -> None:
        for tier in self._tiers:
            self._guard.call("tier", tier.tier.tick)
        for queue in self._queues.values():
            self._guard.call("write_queue", queue.tick)

    def trim(self, high: float, low: float, at_once: int) -> bool:
        """Evict in advance, about so many objects of RAM and of each tier. Return whether to continue soon.

        The watermarks are RAM's.
        """
        more = self._ram.trim(high, low, at_once, self)
        more = any([more, *(tier.trim(at_once) for tier in self._tiers)])
        self.pump()  # what is to be demoted
        return more

    def pump(self) -> None:
        """Hand to the tiers what they take now. Every call that commits ends so."""
        self._kept_path = NONE
        for queue in self._queues.values():
            self._guard.call("write_queue", queue.pump)

    def statuses(self) -> tuple[TierStatus, ...]:
        return tuple(map(self._status, self._tiers))

    def _status(self, tier: LowerTier) -> TierStatus:
        """Return the tier's own status. Its queue includes objects that wait here, in front of the tier's own."""
        own, queue = tier.tier.status(), self._queues[tier.number]
        return replace(
            own,
            objects=tier.objects,  # that this daemon knows of
            queued_objects=own.queued_objects + len(queue),
            queued_bytes=own.queued_bytes + queue.waiting_bytes,
            write_target_bytes=int(tier.config.write_bytes_per_day) if tier.config.write is WritePolicy.AUTO else 0,
        )

    # What is written when

    def verified(self, row: int) -> None:
        """Offer an adopted object, which RAM may serve now, to tiers that write at commit."""
        if self._at_commit:
            place = self._ram.node_of(row), self._rows.kind[row]
            self._guard.call("write_queue", self._offer_committed, *place, self._at_commit)

    def committed(self, node: int, kind: int) -> None:
        """Offer an object that RAM has newly to tiers that write at commit, and to shared tiers that have its path."""
        for tier in self._learning:
            self._guard.call("write_queue", tier.returned, node, kind)
        if self._at_commit:
            self._guard.call("write_queue", self._offer_committed, node, kind, self._at_commit)
        if self._shared:
            self._guard.call("write_queue", self._offer_following, node, kind)

    def _offer_committed(self, node: int, kind: int, to: list[tuple[LowerTier, WriteQueue]]) -> None:
        for _, queue in to:
            queue.offer(node, kind)
            if kind == self._tree.path_kind(node) and not self._index.is_leaf(node):
                queue.offer_below(node)

    def _offer_following(self, node: int, kind: int) -> None:
        """Offer an object to the shared tiers without which a restart would lose it, whatever their policy.

        A restart knows what RAM and disk tiers have, while a shared tier has to be asked. So an object whose path lies
        in a shared tier alone has to lie there, too.
        """
        index, path_kind = self._index, self._tree.path_kind(node)
        before = node if kind != path_kind else index.parent(node)
        if self._found_after_restart(before, path_kind):
            self._kept_path = node
            return
        above = index.row(before, path_kind)
        for tier, queue in self._shared:
            if tier.has(before, path_kind) or (above != NO_ROW and queue.has(above)):
                self._offer_committed(node, kind, [(tier, queue)])

    def _found_after_restart(self, node: int, path_kind: int) -> bool:
        """Return whether RAM or a disk tier has the path object of every chunk up to this one."""
        index = self._index
        while node not in (NONE, self._kept_path):
            if index.row(node, path_kind) == NO_ROW and not any(disk.has(node, path_kind) for disk in self._tree.disks):
                return False
            node = index.parent(node)
        return True

    def used_again(self, nodes: npt.NDArray[np.int64], kinds: bytes, end: int) -> None:
        """Offer objects that serve a further request to tiers that write at the second use. `end`: the last node."""
        self._guard.call("write_queue", self._offer_again, nodes, kinds, end)

    def _offer_again(self, nodes: npt.NDArray[np.int64], kinds: bytes, end: int) -> None:
        for tier, queue in self._at_second_use:
            absent: list[tuple[int, int]] = []
            for kind in set(kinds):
                chosen = nodes[np.frombuffer(kinds, np.uint8) == kind]
                missing = chosen[self._index.handles[tier.number][kind - 1][chosen] == NO_HANDLE]
                absent += ((node, kind) for node in missing.tolist())
            if absent and (tier.config.write is not WritePolicy.AUTO or self._admits(tier, queue, end)):
                for node, kind in absent:
                    queue.offer(node, kind)

    def _admits(self, tier: LowerTier, queue: WriteQueue, node: int) -> bool:
        return tier.admits(self._ram.evictor.policy.use_class(node), queue.waiting_bytes)

    def defers(self, node: int) -> bool:
        """Return whether the node is to stay in RAM until a tier has taken it (`Demotion`)."""
        return self._guard.value("write_queue", False, self._demoting, node)

    def save(self, node: int) -> None:
        """Offer the path to the node to the tiers that have what follows it (`Demotion`)."""
        self._guard.call("write_queue", self._save, node)

    def _demoting(self, node: int) -> bool:
        kinds = [kind for kind in Kind if self._ram.visible(node, kind) and not self._tree.elsewhere(node, kind)]
        for tier, queue in self._at_eviction if kinds else ():
            taken = [kind for kind in kinds if not queue.has_refused(self._index.row(node, kind))]
            if not taken or not tier.tier.writable or not self._wants(tier, queue, node, taken):
                continue
            if sum(queue.demote(node, kind) for kind in taken):  # every kind of them
                return True
        return False

    def _wants(self, tier: LowerTier, queue: WriteQueue, node: int, kinds: Sequence[int]) -> bool:
        """Return whether the tier takes what RAM is about to drop. A chunk on its way is judged once."""
        if tier.config.write is WritePolicy.EVICT or any(queue.has(self._index.row(node, kind)) for kind in kinds):
            return True
        tier.dropped(node, kinds[-1], self._ram.evictor.policy.use_class(node))
        return self._admits(tier, queue, node)

    def _save(self, node: int) -> None:
        """Offer the path to the node to the tiers that have what follows it, whatever their policy."""
        for tier in self._tiers:
            if tier.children(node):
                self._queues[tier.number].offer(node, self._tree.path_kind(node))

    # What tiers say

    def found(self, tier: Tier, objects: FoundObjects) -> None:
        """Take in what has a place in the tree; the tier drops the rest."""
        lower = self._by_name[tier.name]
        if lower.shared is None:
            self._tree.make_room_for_nodes(len(objects))
        outcomes: Counter[str] = Counter()
        self._droppable = _DROPPED_MAX
        with self._tree.updating_once():
            for handle, name in objects:
                reason = self._guard.value("tier", "failed", self._take_in, lower, handle, name)
                outcomes[reason or "accepted"] += 1
                if reason and lower.owner(handle) is None:
                    self._guard.call("tier", tier.drop, handle)
        for outcome, count in outcomes.items():
            self._counters.add(f"tier_found_objects.{tier.name}/{outcome}", count)

    def _take_in(self, lower: LowerTier, handle: int, name: ObjectName) -> str:
        """Empty, or why the engine has no use for it."""
        namespace = self._namespaces.by_id.get(name.namespace) if lower.shared else self._namespace(name)
        if namespace is None or name.kind not in _KINDS or not name.boundary_tokens or name.key == ROOT_KEY:
            return "no_namespace" if namespace is None else "invalid"
        if not namespace.accepts(name.kind, name.raw_bytes):
            return "length"
        above = NONE if name.parent == ROOT_KEY else self._index.find(namespace.slot, name.parent)
        if name.parent != ROOT_KEY and not self._has(above, min(namespace.path_kind, name.kind)):
            return "no_parent"
        node = self._index.find(namespace.slot, name.key)
        if lower.shared and name.kind != namespace.path_kind and not self._has(node, namespace.path_kind):
            return "no_parent"  # a disk's comes later at worst
        if node == NONE:
            if self._tree.full:
                return "index_full"
            if above != NONE and self._index.boundary(above) >= name.boundary_tokens:
                return "invalid"
            node = self._tree.add_node(namespace, name.key, above, name.boundary_tokens)
        elif self._index.parent(node) != above or self._index.boundary(node) != name.boundary_tokens:
            return "invalid"
        elif lower.has(node, name.kind):
            return "repeated" if lower.handle(node, name.kind) != handle else ""  # it was written meanwhile
        namespace.learn(name.kind, name.raw_bytes)
        lower.keep(node, name.kind, handle)
        return ""

    def _has(self, node: int, path_kind: int) -> bool:
        """Return whether there is such a chunk, with its path object in any tier."""
        return node != NONE and self._tree.has(node, path_kind)

    def _namespace(self, name: ObjectName) -> Namespace | None:
        """Return the namespace of an object, or None. A namespace that no engine has registered yet gets a slot too.

        In a full table, that is the slot of the namespace that was used, or found, the longest ago, and of which RAM
        has nothing. Only the beginning of a path is worth that.
        """
        now = self._clock()
        namespaces = self._namespaces
        namespace = namespaces.by_id.get(name.namespace) or namespaces.add(name.namespace, "", now)
        if namespace is None and name.parent == ROOT_KEY and self._droppable > 0:
            detached = self._ram.detached.count
            others = (idle for idle in namespaces.idle() if not any(idle.objects.values()) and not detached(idle.slot))
            self._droppable -= max(free_slot(self._tree, others, self._droppable), _DROPPED_MIN)
            namespace = namespaces.add(name.namespace, "", now)
        if namespace is not None and namespace.spec is None:
            namespace.used_at = now
        return namespace

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:
        """Forget the objects of these handles, which are no longer there.

        The last ones of each path come first, and the path object of a chunk comes last. What goes with a lost object
        is dropped from the tier, and must not be among the lost ones.
        """
        lower, boundary = self._by_name[tier.name], self._index.boundary
        owners = [owner for handle in handles if (owner := lower.owner(handle)) is not None]
        for node, kind in sorted(owners, key=lambda owner: (boundary(owner[0]), owner[1]), reverse=True):
            lower.forget(node, kind)
            self._guard.call("tier", self.lost_copy, lower, node, kind)
        self._counters.add(f"tier_lost_objects.{tier.name}/", len(handles))

    def lost_copy(self, lower: LowerTier, node: int, kind: int) -> None:
        """Note that a tier has lost an object. Write it again where RAM has it and the tier has what follows."""
        if not self._tree.lost(node, kind) and lower.children(node) and self._ram.visible(node, kind):
            self._queues[lower.number].offer(node, kind)
