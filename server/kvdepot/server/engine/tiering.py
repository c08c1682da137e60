"""The tiers below RAM, as the engine drives them: what they found, what they lost, what they are given.

Nothing here waits: a tier answers later, on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.report import TierStatus
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.promotions import Promotions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.types import TierConfig, WritePolicy
from kvdepot.server.engine.vacating import vacate
from kvdepot.server.engine.workers import Workers
from kvdepot.server.engine.write_queue import WriteQueue
from kvdepot.server.guard import engine_guard
from kvdepot.server.tiers.base import NO_HANDLE, ObjectName, Tier
from kvdepot.server.tiers.found import FoundObjects

_VACATED_MAX: Final = 4096
"""Nodes dropped at most for the new namespaces of one slice of what a tier found: some 50 ms."""
_VACATED_MIN: Final = 256
"""What each of them counts at least, for the search."""
_KINDS: Final = frozenset(map(int, Kind))


class Tiering:
    """All lower tiers of the engine; a `TierListener`."""

    def __init__(self, space: Space, workers: Workers) -> None:
        self._space = space
        self._guard = guard = engine_guard(space.counters.add)
        self._by_name = {tier.tier.name: tier for tier in space.tiers}
        self._queues = {tier.number: WriteQueue(space, workers, tier, guard) for tier in space.tiers}
        self._preferred = list(space.tiers)
        self.promotions = Promotions(space, workers, self._preferred, self.lost_copy, guard)
        self._trimming = False  # RAM is on the way from the high to the low watermark
        self._vacating = 0  # nodes that may still be dropped for namespaces of the slice at hand
        self.configure({})
        space.demoting = lambda node: guard.value("write_queue", False, self._demoting, node)
        space.save = guard.safe("write_queue", self._save)

    def configure(self, tiers: Mapping[str, TierConfig]) -> None:
        """These settings from now on, by name. What waits to be written is written."""
        for tier in self._space.tiers:
            tier.config = tiers.get(tier.tier.name, tier.config)
        self._preferred.sort(key=lambda tier: (-tier.config.load_weight, tier.number))
        self._at_commit = self._with_policy(WritePolicy.COMMIT)
        self._at_second_use = self._with_policy(WritePolicy.SECOND_USE)
        self._at_eviction = self._with_policy(WritePolicy.EVICT)

    def _with_policy(self, policy: WritePolicy) -> list[tuple[LowerTier, WriteQueue]]:
        return [(tier, self._queues[tier.number]) for tier in self._space.tiers if tier.config.write is policy]

    @property
    def readable(self) -> list[LowerTier]:
        """Those that serve now, the preferred one first."""
        return [tier for tier in self._preferred if tier.tier.readable]

    def start(self) -> None:
        for tier in self._space.tiers:
            tier.tier.start(self)

    async def close(self) -> None:
        closed = await asyncio.gather(*(tier.tier.close() for tier in self._space.tiers), return_exceptions=True)
        for error in closed:
            if isinstance(error, Exception):
                self._guard.caught("tier", error)

    def tick(self) -> None:
        for tier in self._space.tiers:
            self._guard.call("tier", tier.tier.tick)
        for queue in self._queues.values():
            self._guard.call("write_queue", queue.tick)

    def trim(self, high: float, low: float, at_once: int) -> bool:
        """Evict ahead of need, about so many objects of RAM and of each tier; whether to go on soon.

        The watermarks are RAM's.
        """
        space = self._space
        more = space.account.trim(high, low, at_once, space.demoting)
        ready_bytes, used_bytes = space.allocator.ready_bytes, space.allocator.used_bytes
        # While the arena is populated the ready part is nearly full of what was adopted, and room is on its way.
        due = not space.growing and (self._trimming or used_bytes > high * ready_bytes)
        self._trimming = due and space.evict_to(int(low * ready_bytes), at_once)
        more = any([more, self._trimming, *(tier.trim(at_once) for tier in space.tiers)])
        self.pump()  # what is to be demoted
        return more

    def pump(self) -> None:
        for queue in self._queues.values():
            self._guard.call("write_queue", queue.pump)

    def statuses(self) -> tuple[TierStatus, ...]:
        return tuple(map(self._status, self._space.tiers))

    def _status(self, tier: LowerTier) -> TierStatus:
        """The tier's own, with what waits here in front of what waits there."""
        own, queue = tier.tier.status(), self._queues[tier.number]
        return replace(
            own,
            objects=tier.objects,  # that this daemon knows of
            queued_objects=own.queued_objects + len(queue),
            queued_bytes=own.queued_bytes + queue.waiting_bytes,
        )

    # What is written when

    def committed(self, row: int) -> None:
        """RAM has a new object, or may serve an adopted one."""
        if self._at_commit:
            self._guard.call("write_queue", self._offer_committed, row)

    def _offer_committed(self, row: int) -> None:
        space = self._space
        node, kind = space.node_of(row), space.rows.kind[row]
        for _, queue in self._at_commit:
            queue.offer(node, kind)
            if kind == space.path_kind(node) and not space.index.is_leaf(node):
                queue.offer_below(node)

    def used_again(self, nodes: npt.NDArray[np.int64], kinds: bytes) -> None:
        """These objects serve a further request."""
        self._guard.call("write_queue", self._offer_again, nodes, kinds)

    def _offer_again(self, nodes: npt.NDArray[np.int64], kinds: bytes) -> None:
        for tier, queue in self._at_second_use:
            for kind in set(kinds):
                chosen = nodes[np.frombuffer(kinds, np.uint8) == kind]
                absent = chosen[self._space.index.handles[tier.number][kind - 1][chosen] == NO_HANDLE]
                for node in absent.tolist():
                    queue.offer(node, kind)

    def _demoting(self, node: int) -> bool:
        """Whether the node is to stay in RAM until a tier has taken it. Asked ahead of need only."""
        space = self._space
        kinds = [kind for kind in Kind if space.in_ram(node, kind) and not space.elsewhere(node, kind)]
        for tier, queue in self._at_eviction if kinds else ():
            if tier.tier.writable and sum(self._demote(queue, node, kind) for kind in kinds):  # every kind of them
                return True
        return False

    def _save(self, node: int) -> None:
        """Offer the path to the node to the tiers that have what follows it, whatever their policy."""
        for tier in self._space.tiers:
            if tier.children(node):
                self._queues[tier.number].offer(node, self._space.path_kind(node))

    def _demote(self, queue: WriteQueue, node: int, kind: int) -> bool:
        return queue.has(self._space.index.row(node, kind)) or queue.offer(node, kind)

    # What tiers say

    def found(self, tier: Tier, objects: FoundObjects) -> None:
        """Take in what has a place in the tree; the tier drops the rest."""
        lower = self._by_name[tier.name]
        if lower.shared is None:
            self._space.make_room_for_nodes(len(objects))
        outcomes: Counter[str] = Counter()
        self._vacating = _VACATED_MAX
        with self._space.settling_once():
            for handle, name in objects:
                reason = self._guard.value("tier", "failed", self._take_in, lower, handle, name)
                outcomes[reason or "kept"] += 1
                if reason and lower.owner(handle) is None:
                    self._guard.call("tier", tier.drop, handle)
        for outcome, count in outcomes.items():
            self._space.counters.add(f"tier_found_objects.{tier.name}/{outcome}", count)

    def _take_in(self, lower: LowerTier, handle: int, name: ObjectName) -> str:
        """Empty, or why the engine has no use for it."""
        space = self._space
        namespace = space.namespaces.by_id.get(name.namespace) if lower.shared else self._namespace(name)
        if namespace is None or name.kind not in _KINDS or not name.boundary_tokens or name.key == ROOT_KEY:
            return "no_namespace" if namespace is None else "senseless"
        if not namespace.accepts(name.kind, name.raw_bytes):
            return "length"
        above = NONE if name.parent == ROOT_KEY else space.index.find(namespace.slot, name.parent)
        if name.parent != ROOT_KEY and not self._makes_path(above, min(namespace.path_kind, name.kind)):
            return "no_parent"
        node = space.index.find(namespace.slot, name.key)
        if lower.shared and name.kind != namespace.path_kind and not self._makes_path(node, namespace.path_kind):
            return "no_parent"  # a disk's comes later at worst
        if node == NONE:
            if space.full:
                return "index_full"
            if above != NONE and space.index.boundary(above) >= name.boundary_tokens:
                return "senseless"
            node = space.add_node(namespace, name.key, above, name.boundary_tokens)
        elif space.index.parent(node) != above or space.index.boundary(node) != name.boundary_tokens:
            return "senseless"
        elif lower.has(node, name.kind):
            return "repeated" if lower.handle(node, name.kind) != handle else ""  # it was written meanwhile
        namespace.learn(name.kind, name.raw_bytes)
        lower.keep(node, name.kind, handle)
        return ""

    def _makes_path(self, node: int, path_kind: int) -> bool:
        """Whether the chunk has the object that makes a path, in any tier."""
        space = self._space
        return node != NONE and (space.index.row(node, path_kind) != NO_ROW or space.elsewhere(node, path_kind))

    def _namespace(self, name: ObjectName) -> Namespace | None:
        """One that no engine has registered yet gets a slot all the same.

        In a full table that is the slot of what was used, or found, the longest ago, and of which RAM has nothing;
        the beginning of a path only is worth that.
        """
        space, now = self._space, self._space.clock()
        namespaces = space.namespaces
        namespace = namespaces.by_id.get(name.namespace) or namespaces.add(name.namespace, "", now)
        if namespace is None and name.parent == ROOT_KEY and self._vacating > 0:
            others = (idle for idle in namespaces.idle() if not any(idle.objects.values()))
            self._vacating -= max(vacate(space, others, self._vacating), _VACATED_MIN)
            namespace = namespaces.add(name.namespace, "", now)
        if namespace is not None and namespace.spec is None:
            namespace.used_at = now
        return namespace

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:
        """Their objects are no longer there.

        The last ones of each path first, and of a chunk the one that makes the path last: what goes with
        an object that was lost is dropped from the tier, and must not be among the lost ones.
        """
        lower, boundary = self._by_name[tier.name], self._space.index.boundary
        owners = [owner for handle in handles if (owner := lower.owner(handle)) is not None]
        for node, kind in sorted(owners, key=lambda owner: (boundary(owner[0]), owner[1]), reverse=True):
            lower.forget(node, kind)
            self._guard.call("tier", self.lost_copy, lower, node, kind)
        self._space.counters.add(f"tier_lost_objects.{tier.name}/", len(handles))

    def lost_copy(self, lower: LowerTier, node: int, kind: int) -> None:
        """A tier has lost an object. Where RAM has it and what lies behind it is in the tier, it is written again."""
        if not self._space.lost(node, kind) and lower.children(node) and self._space.in_ram(node, kind):
            self._queues[lower.number].offer(node, kind)
