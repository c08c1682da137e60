"""One tier below RAM: which object each handle is, and which objects may go.

A lower tier is closed under prefixes. An object leaves it only when no child of its chunk has
an object there. Also, RAM must have it too, or nothing in any tier descends from its chunk. A
policy chooses which of those goes first, over the same tree as RAM's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NAMESPACES_MAX
from kvdepot.core.calls import Kind
from kvdepot.core.eviction_policy import EvictionPolicy
from kvdepot.core.write_admission import Verdict, WriteAdmission
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.tree.evicting import Evictor
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.quotas import Account
from kvdepot.server.depot.tree.read_rate import ReadRate
from kvdepot.server.depot.tree.recency import Recency
from kvdepot.server.depot.tree.tree_tier import TierTree
from kvdepot.server.depot.types import Quota, TierConfig
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.storage.base import NO_HANDLE, ObjectName, SharedTier, Tier

_HANDLES_HIGH: Final = 0.95
_HANDLES_LOW: Final = 0.90
"""Watermarks of a shared tier's handles: what is configured is about its medium, hence its janitor's."""
_EVICTIONS_FOR_ROOM: Final = 64
"""Objects dropped to make room for one, the last unit's beyond; where that is not enough the next tick goes on."""


class LowerTier:
    """A `Holding` of the tree.

    All sizes are bytes. Of a shared tier, whose backing store belongs to no single daemon, they are numbers of handles.
    """

    drops_orphans = False

    def __init__(
        self,
        tree: TierTree,
        number: int,
        tier: Tier,
        config: TierConfig,
        policy: EvictionPolicy,
        counters: Counters,
        quotas: Sequence[Quota],
    ) -> None:
        """Make the state of one tier. `number` is the tier's place in the index's columns."""
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._counters = counters
        self._guard = engine_guard(counters.add)
        self.undropped: Callable[[bytes], None] = lambda _: None
        """Told of the namespace of an object in doubt that may come back."""
        self.number = number
        self.slots: set[int] | None = None
        self.trimming = False
        self.tier = tier
        self.config = config
        self.evictor = Evictor(tree, self, policy)
        self.shared = cast("SharedTier", tier) if tier.traits.shared else None
        self.recency = (
            None if self.shared is None else Recency(self._index, self._namespaces, tree.clock, number, self.shared)
        )  # fmt: skip
        self.account = Account(tier.name, quotas, self.evictor, exempt=self.shared is not None)
        self.reads = ReadRate()
        self.reads_for_peers = 0
        """Of those asked for. No engine here waits for them."""
        self._admission = WriteAdmission(tree.clock)
        self.objects = 0
        self._contents = [[0] * (len(Kind) + 1) for _ in range(NAMESPACES_MAX)]  # objects by namespace slot and kind
        self._writing = [[0] * (len(Kind) + 1) for _ in range(NAMESPACES_MAX)]  # objects on their way
        self._nodes = np.empty(tier.handles_max, np.uint32).data
        self._kinds = np.zeros(tier.handles_max, np.uint8).data  # 0: no object
        self._epochs = np.zeros(tier.handles_max, np.uint32).data

    # Which object is where

    def handle(self, node: int, kind: int) -> int:
        return self._index.handle(self.number, node, kind)

    def has(self, node: int, kind: int) -> bool:
        return self.handle(node, kind) != NO_HANDLE

    def epoch(self, handle: int) -> int:
        """Return a number that changes when the handle's object leaves: an answer may come for a later object."""
        return int(self._epochs[handle])

    def epochs(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the epoch of each handle."""
        return np.asarray(self._epochs)[handles].astype(np.int64)

    def owner(self, handle: int) -> tuple[int, int] | None:
        """Return (node, kind) of a handle in use."""
        kind = self._kinds[handle] if handle < len(self._kinds) else 0
        return (int(self._nodes[handle]), int(kind)) if kind else None

    def contents(self, slot: int) -> dict[int, int]:
        """Return the number of objects of a namespace by kind, without zeros."""
        return {int(kind): count for kind in Kind if (count := self._contents[slot][kind])}

    def keep(self, node: int, kind: int, handle: int) -> None:
        """Note that the tier has this object now."""
        index, tree = self._index, self._tree
        index.set_handle(self.number, node, kind, handle)
        self._nodes[handle] = node
        self._kinds[handle] = kind
        self.objects += 1
        self._count(self._contents, index.namespace(node), kind, 1)
        self.evictor.policy.on_commit(node, tree.clock(), index.parent(node), index.mark(node))
        tree.refresh_node(node)
        parent = index.parent(node)
        if parent != NONE:
            tree.update_candidates(parent)

    def forget(self, node: int, kind: int) -> int:
        """Note that the tier has lost this object. Return its handle. The caller refreshes the node."""
        handle = self.handle(node, kind)
        self._index.set_handle(self.number, node, kind, NO_HANDLE)
        self._kinds[handle] = 0
        self._epochs[handle] = (self._epochs[handle] + 1) & 0xFFFF_FFFF
        self.objects -= 1
        self._count(self._contents, self._index.namespace(node), kind, -1)
        return handle

    def drop(self, node: int, kind: int) -> None:
        """Drop the object here and in the tier."""
        self._guard.call("tier", self.tier.drop, self.forget(node, kind))

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """Take bytes with these sums from other daemons, too, and from the next run: they are in doubt.

        A disk keeps the place of what is dropped. Where it cannot be written, the next run finds the object again.
        """
        if self.shared is not None:
            self._guard.call("tier", self.shared.quarantine, name, raw_sums)
        elif not self.tier.writable:
            self._guard.call("tier", self.undropped, name.namespace)

    # What it costs and brings

    def wrote(self, stored_bytes: int) -> None:
        """Count an object that was written to the device."""
        self._counters.add(f"tier_written_bytes.{self.tier.name}/", stored_bytes)
        self._admission.wrote(stored_bytes)

    def served(self, node: int, kind: int, size_bytes: int) -> None:
        """Count an object that was read into RAM. `size_bytes`: before the codec."""
        self._counters.add(f"tier_hit_bytes.{self.tier.name}/", size_bytes)
        self.returned(node, kind)

    def returned(self, node: int, kind: int) -> None:
        """Note that an engine asked for an object that RAM had dropped."""
        self._admission.returns.returned(self._mark(node), kind)

    def dropped(self, node: int, kind: int, use_class: int) -> None:
        """Note that RAM is about to drop a chunk, whose last object is of this kind. `use_class`: as RAM's policy."""
        self._admission.returns.dropped(self._mark(node), kind, use_class, self.tier.capacity_bytes)

    def admits(self, use_class: int, waiting_bytes: int) -> bool:
        """Return whether a chunk of this class is worth its write (`WritePolicy.AUTO`).

        `waiting_bytes`: of objects that are to be written before it.
        """
        tier = self.tier
        free_bytes = tier.capacity_bytes - tier.used_bytes
        verdict = self._admission.judge(use_class, self.config.write_bytes_per_day, free_bytes, waiting_bytes)
        self._counters.add(f"tier_admissions.{tier.name}/{verdict}")
        return verdict is Verdict.ADMITTED

    def _mark(self, node: int) -> int:
        """Return what tells a chunk from others also when its node has gone. Namespaces may have the same keys."""
        return self._index.mark(node) ^ self._index.namespace(node) << 48

    def used(self, node: int) -> None:
        """Note that a request used the path to this node."""
        if self.recency is not None:
            self._guard.call("tier", self.recency.used, node)

    def writing(self, slot: int, kind: int, change: int) -> None:
        """Count objects of a namespace on their way: 1 for a begin, -1 for an end."""
        self._count(self._writing, slot, kind, change)

    def enter(self, namespace: Namespace) -> None:
        self.account.enter(namespace)
        self._account(namespace.slot)

    def _count(self, objects: list[list[int]], slot: int, kind: int, change: int) -> None:
        objects[slot][kind] += change
        if self.account.watched:
            self._account(slot)

    def _account(self, slot: int) -> None:
        """Compute what the namespace holds, if any quota is about the tier."""
        sizes = self._namespaces.by_slot[slot].object_bytes if self.account.watched else {}
        held = ((self._contents[slot][kind] + self._writing[slot][kind], size) for kind, size in sizes.items())
        self.account.hold(slot, sum(count * self.tier.cost_bytes(size) for count, size in held if count))

    # What may go

    @property
    def used_bytes(self) -> int:
        return self.tier.used_bytes

    def trim(self, limit: int) -> bool:
        """Evict before room is needed, about `limit` objects. Return whether more is due."""
        if self.shared is not None:
            high, low = _HANDLES_HIGH, _HANDLES_LOW
        elif self.tier.writable:
            high, low = self.config.high_watermark, self.config.low_watermark
        else:
            self.trimming = False  # until the high watermark is passed again
            return False
        self.evictor.trim(self, self.tier.capacity_bytes, high, low, limit)
        return self.account.trim(high, low, limit) or self.trimming

    def within_quota(self, node: int, kind: int, size_bytes: int) -> bool:
        """Return whether quotas allow an object of this cost. Evict a bounded number of its owners' objects for it."""
        slot = self._index.namespace(node)
        if self.account.over(slot, size_bytes) is None:
            return True
        with self.evictor.keeping(self._before(node, kind)):
            within = self._tree.within_quota(self, slot, size_bytes)
        owner = None if within else self.account.over(slot, size_bytes)
        if owner is not None:
            self.account.refuse(owner)
        return within

    def make_handles_room(self, objects: int, node: int) -> None:
        """Free handles of a shared tier for so many objects below the node, dropping the least useful ones."""
        least = self.tier.capacity_bytes - objects
        if self.tier.used_bytes > least:
            with self.evictor.keeping(node):
                self.evictor.evict_to(self, max(least, 0), objects, "room")

    def make_room(self, node: int, kind: int, size_bytes: int) -> bool:
        """Return whether an object of this cost fits. Evict a bounded number of others for it."""
        least = self.tier.capacity_bytes - size_bytes
        if self.tier.used_bytes > least:
            with self.evictor.keeping(self._before(node, kind)):
                self.evictor.evict_to(self, least, _EVICTIONS_FOR_ROOM, "room")
        return least >= self.tier.used_bytes

    def evict_for(self, node: int, kind: int) -> None:
        """Evict one unit for an object that had no place, and nothing that the object follows."""
        with self.evictor.keeping(self._before(node, kind)):
            self.evictor.evict_one("room")

    def _before(self, node: int, kind: int) -> int:
        """Return the node with the last object before this one on its path."""
        return node if kind != self._tree.path_kind(node) else self._index.parent(node)

    def give_way(self, slots: Collection[int] | None) -> bool:  # noqa: ARG002
        """Return False: pins keep what RAM has."""
        return False

    def count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:  # noqa: ARG002
        self._counters.add(f"tier_evicted_objects.{self.tier.name}/{reason}", objects)

    def evict_detached(self, reason: str, slots: Collection[int] | None) -> int:  # noqa: ARG002
        """Return 0: everything here has a node."""
        return 0

    # What the tier holds, for its evictor

    def kinds(self, node: int) -> list[int]:
        return self._index.kinds_in_tier(self.number, node)

    def complete(self, node: int, kind: int) -> bool:
        return self.has(node, kind)

    def busy(self, node: int) -> bool:  # noqa: ARG002
        """Return False: the tier itself keeps the bytes of what is being read."""
        return False

    def kept(self, node: int) -> bool:  # noqa: ARG002
        return False

    def pinned(self, node: int, kind: int) -> bool:  # noqa: ARG002
        """Return False: pins keep only what RAM has."""
        return False

    def children(self, node: int) -> int:
        return self._index.children_in_tier(self.number, node)

    def among(self, nodes: Nodes) -> Nodes:
        return self._index.many_in_tier(self.number, nodes)

    def cost_bytes(self, node: int, kind: int) -> int:
        namespace = self._namespaces.by_slot[self._index.namespace(node)]
        return self.tier.cost_bytes(namespace.object_bytes.get(kind, 0))
