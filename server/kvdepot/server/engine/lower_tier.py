"""One tier below RAM as the engine keeps it: which object each handle is, and which objects may go.

A lower tier is closed under prefixes: an object leaves it only when no child of its chunk
has one there, and only if RAM has it too or nothing in any tier descends from its chunk.
Which of those goes first is a policy's choice, over the same tree as RAM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from kvdepot.core.arena import NAMESPACES_MAX
from kvdepot.core.calls import Kind
from kvdepot.core.eviction import EvictionPolicy
from kvdepot.server.engine.evicting import Evictor
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.types import TierConfig
from kvdepot.server.tiers.base import NO_HANDLE, Tier

if TYPE_CHECKING:
    from kvdepot.server.engine.space import Space

_EVICTIONS_FOR_ROOM: Final = 64
"""Units dropped at most to make room for one object."""


class LowerTier:
    """`number` is the tier's place in the index's columns. All sizes are bytes."""

    def __init__(self, space: Space, number: int, tier: Tier, config: TierConfig, policy: EvictionPolicy) -> None:
        self._space = space
        self.number = number
        self.tier = tier
        self.config = config
        self.policy = policy
        self.evictor = Evictor(space, self, policy, self._count_evicted)
        self.objects = 0
        self._contents = [[0] * (len(Kind) + 1) for _ in range(NAMESPACES_MAX)]  # objects by namespace slot and kind
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
        self._contents[space.index.namespace(node)][kind] += 1
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
        self._contents[self._space.index.namespace(node)][kind] -= 1
        return handle

    def drop(self, node: int, kind: int) -> None:
        """Forget it and have the tier forget it."""
        self.tier.drop(self.forget(node, kind))

    # What may go

    def settle(self, node: int) -> None:
        """Tell the policy whether something of the node may go."""
        self.evictor.settle(node)

    def evict_to(self, used_bytes: int, limit: int, reason: str) -> None:
        """At most `limit` units towards `used_bytes`."""
        while limit > 0 and self.tier.used_bytes > used_bytes and self.evictor.evict_one(reason):
            limit -= 1

    def make_room(self, size_bytes: int) -> bool:
        """Whether an object of this cost fits, evicting a bounded number of others for it."""
        least = self.tier.capacity_bytes - size_bytes
        self.evict_to(least, _EVICTIONS_FOR_ROOM, "room")
        return least >= self.tier.used_bytes

    def _count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:  # noqa: ARG002
        self._space.counters.add(f"tier_evicted_objects.{self.tier.name}/{reason}", objects)

    # What the tier holds, for its evictor

    def complete(self, node: int, kind: int) -> bool:
        return self.has(node, kind)

    def busy(self, node: int) -> bool:  # noqa: ARG002
        """Never: the tier itself keeps the bytes of what is being read."""
        return False

    def children(self, node: int) -> int:
        return self._space.index.children_in_tier(self.number, node)

    def cost_bytes(self, node: int, kind: int) -> int:
        namespace = self._space.namespaces.by_slot[self._space.index.namespace(node)]
        return self.tier.cost_bytes(namespace.object_bytes.get(kind, 0))
