"""One tier below RAM as the engine keeps it: which object each handle is, and which objects may go.

A lower tier is closed under prefixes: an object leaves it only when no child of its chunk
has one there, and only if RAM has it too or nothing in any tier descends from its chunk.
Which of those goes first is a policy's choice, over the same tree as RAM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NAMESPACES_MAX
from kvdepot.core.calls import Kind
from kvdepot.core.eviction import EvictionPolicy
from kvdepot.server.engine.evicting import Evictor
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.quotas import Account
from kvdepot.server.engine.read_rate import ReadRate
from kvdepot.server.engine.recency import Recency
from kvdepot.server.engine.types import Quota, TierConfig
from kvdepot.server.guard import engine_guard
from kvdepot.server.tiers.base import NO_HANDLE, SharedTier, Tier

if TYPE_CHECKING:
    from kvdepot.server.engine.space import Space

_HANDLES_HIGH: Final = 0.95
_HANDLES_LOW: Final = 0.90
"""Watermarks of a shared tier's handles: what is configured is about its medium, hence its janitor's."""
_EVICTIONS_FOR_ROOM: Final = 64
"""Objects dropped to make room for one, the last unit's beyond; where that is not enough the next tick goes on."""


class LowerTier:
    """`number` is the tier's place in the index's columns. All sizes are bytes; of a shared tier, whose medium is
    nobody's own, they are numbers of handles.
    """

    def __init__(
        self,
        space: Space,
        number: int,
        tier: Tier,
        config: TierConfig,
        policy: EvictionPolicy,
        quotas: Sequence[Quota] = (),
    ) -> None:
        self._space = space
        self._guard = engine_guard(space.counters.add)
        self.number = number
        self.tier = tier
        self.config = config
        self.policy = policy
        self.evictor = Evictor(space, self, policy, self._count_evicted)
        self.shared = cast("SharedTier", tier) if tier.traits.shared else None
        self.recency = None if self.shared is None else Recency(space, self, self.shared)
        self.account = Account(tier.name, quotas, self.evictor, exempt=self.shared is not None)
        self.reads = ReadRate()
        self._trimming = False  # on the way from the high to the low watermark
        self.objects = 0
        self._contents = [[0] * (len(Kind) + 1) for _ in range(NAMESPACES_MAX)]  # objects by namespace slot and kind
        self._writing = [[0] * (len(Kind) + 1) for _ in range(NAMESPACES_MAX)]  # likewise, on their way
        self._nodes = np.empty(tier.handles_max, np.uint32).data
        self._kinds = np.zeros(tier.handles_max, np.uint8).data  # 0: no object
        self._epochs = np.zeros(tier.handles_max, np.uint32).data

    # Which object is where

    def handle(self, node: int, kind: int) -> int:
        return self._space.index.handle(self.number, node, kind)

    def has(self, node: int, kind: int) -> bool:
        return self.handle(node, kind) != NO_HANDLE

    def epoch(self, handle: int) -> int:
        """Changes whenever the handle's object leaves: the number may be another object's by the time of an answer."""
        return int(self._epochs[handle])

    def epochs(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of each."""
        return np.asarray(self._epochs)[handles].astype(np.int64)

    def owner(self, handle: int) -> tuple[int, int] | None:
        """(node, kind) of a handle in use."""
        kind = self._kinds[handle] if handle < len(self._kinds) else 0
        return (int(self._nodes[handle]), int(kind)) if kind else None

    def contents(self, slot: int) -> dict[int, int]:
        """Number of objects of a namespace by kind, of kinds it has any of."""
        return {int(kind): count for kind in Kind if (count := self._contents[slot][kind])}

    def keep(self, node: int, kind: int, handle: int) -> None:
        """The tier has this object now."""
        space = self._space
        space.index.set_handle(self.number, node, kind, handle)
        self._nodes[handle] = node
        self._kinds[handle] = kind
        self.objects += 1
        self._count(self._contents, space.index.namespace(node), kind, 1)
        self.policy.on_commit(node, space.clock(), space.index.parent(node), space.index.mark(node))
        space.settle_node(node)
        parent = space.index.parent(node)
        if parent != NONE:
            space.settle_evictors(parent)

    def forget(self, node: int, kind: int) -> int:
        """The tier does not have this object any more. Returns its handle; the caller settles the node."""
        handle = self.handle(node, kind)
        self._space.index.set_handle(self.number, node, kind, NO_HANDLE)
        self._kinds[handle] = 0
        self._epochs[handle] = (self._epochs[handle] + 1) & 0xFFFF_FFFF
        self.objects -= 1
        self._count(self._contents, self._space.index.namespace(node), kind, -1)
        return handle

    def drop(self, node: int, kind: int) -> None:
        """Forget it and have the tier forget it."""
        self._guard.call("tier", self.tier.drop, self.forget(node, kind))

    def used(self, node: int) -> None:
        """A request used the path to this node."""
        if self.recency is not None:
            self._guard.call("tier", self.recency.used, node)

    def writing(self, slot: int, kind: int, change: int) -> None:
        """Objects of a namespace are on their way, or have arrived or failed."""
        self._count(self._writing, slot, kind, change)

    def named(self, namespace: Namespace) -> None:
        """It is new, or more is known of it."""
        self.account.enter(namespace)
        self._account(namespace.slot)

    def _count(self, objects: list[list[int]], slot: int, kind: int, change: int) -> None:
        objects[slot][kind] += change
        if self.account.watched:
            self._account(slot)

    def _account(self, slot: int) -> None:
        """Nobody keeps the book as long as no entry is about the tier."""
        sizes = self._space.namespaces.by_slot[slot].object_bytes if self.account.watched else {}
        held = ((self._contents[slot][kind] + self._writing[slot][kind], size) for kind, size in sizes.items())
        self.account.hold(slot, sum(count * self.tier.cost_bytes(size) for count, size in held if count))

    # What may go

    def settle(self, node: int) -> None:
        """Tell the policy whether something of the node may go."""
        self.evictor.settle(node)

    def evict_to(self, used_bytes: int, limit: int, reason: str) -> bool:
        """Towards `used_bytes`; no further unit once `limit` objects have gone, which is answered."""
        while limit > 0 and self.tier.used_bytes > used_bytes:
            gone = self.evictor.evict_one(reason)
            if not gone:
                return False
            limit -= gone
        return limit <= 0

    def trim(self, limit: int) -> bool:
        """Ahead of need, about so many objects; whether to go on soon."""
        if self.shared is not None:
            high, low = _HANDLES_HIGH, _HANDLES_LOW
        elif self.tier.writable:
            high, low = self.config.high_watermark, self.config.low_watermark
        else:
            self._trimming = False
            return False
        capacity_bytes = self.tier.capacity_bytes
        if self._trimming or self.tier.used_bytes > high * capacity_bytes:
            self._trimming = self.evict_to(int(low * capacity_bytes), limit, "watermark")
        return self.account.trim(high, low, limit) or self._trimming

    def within_quota(self, node: int, kind: int, size_bytes: int) -> bool:
        """Whether an object of this cost may lie here, evicting a bounded number of its owners' others for it."""
        slot = self._space.index.namespace(node)
        if self.account.over(slot, size_bytes) is None:
            return True
        with self.evictor.keeping(self._before(node, kind)):
            within = self._space.within_quota(self.account, slot, size_bytes)
        owner = None if within else self.account.over(slot, size_bytes)
        if owner is not None:
            self.account.refuse(owner)
        return within

    def make_handles_room(self, objects: int, node: int) -> None:
        """Forget what is needed the least, as far as so many more below the node have no handles; a shared tier's."""
        least = self.tier.capacity_bytes - objects
        if self.tier.used_bytes > least:
            with self.evictor.keeping(node):
                self.evict_to(max(least, 0), objects, "room")

    def make_room(self, node: int, kind: int, size_bytes: int) -> bool:
        """Whether the object of this cost fits, evicting a bounded number of others for it."""
        least = self.tier.capacity_bytes - size_bytes
        if self.tier.used_bytes > least:
            with self.evictor.keeping(self._before(node, kind)):
                self.evict_to(least, _EVICTIONS_FOR_ROOM, "room")
        return least >= self.tier.used_bytes

    def evict_for(self, node: int, kind: int) -> None:
        """One unit, for an object that the tier had no place for; nothing that the object follows."""
        with self.evictor.keeping(self._before(node, kind)):
            self.evictor.evict_one("room")

    def _before(self, node: int, kind: int) -> int:
        """The node with the last object before this one on its path."""
        return node if kind != self._space.path_kind(node) else self._space.index.parent(node)

    def _count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:  # noqa: ARG002
        self._space.counters.add(f"tier_evicted_objects.{self.tier.name}/{reason}", objects)

    # What the tier holds, for its evictor

    def complete(self, node: int, kind: int) -> bool:
        return self.has(node, kind)

    def busy(self, node: int) -> bool:  # noqa: ARG002
        """Never: the tier itself keeps the bytes of what is being read."""
        return False

    def kept(self, node: int) -> bool:  # noqa: ARG002
        return False

    def pinned(self, node: int, kind: int) -> bool:  # noqa: ARG002
        """Pins keep what RAM has."""
        return False

    def children(self, node: int) -> int:
        return self._space.index.children_in_tier(self.number, node)

    def cost_bytes(self, node: int, kind: int) -> int:
        namespace = self._space.namespaces.by_slot[self._space.index.namespace(node)]
        return self.tier.cost_bytes(namespace.object_bytes.get(kind, 0))
