"""Making room in one tier: which objects may go, in which units, and dropping them (DESIGN 5, Eviction).

One `Evictor` a tier, each with a policy of its own, over one tree. What may go at a node:

* at a leaf of the union of tiers, everything; with it the attention up to the nearest
  ancestor that is usable or branches, because nobody could resume there
* at an inner node that is usable, its state and window objects alone, where a node below
  is usable too
* what another tier holds as well (a demotion); its path object only where no child of the
  node has objects in this tier, so that what a tier holds stays a path

A leaf that nobody could resume at goes before all others, unless a request in progress
stands on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvdepot.core.calls import Kind
from kvdepot.core.eviction import NO_NODE, USELESS, EvictionPolicy
from kvdepot.server.engine.index import NONE, Index
from kvdepot.server.engine.namespaces import Namespace, Namespaces
from kvdepot.server.engine.usable import Usable

_KINDS: Final = tuple(map(int, Kind))
UNIT_NODES_MAX: Final = 1024
"""Nodes dropped at once, some 10 ms; what remains of a longer unit serves nobody and goes next."""
RECOMPUTE_TOKENS_PER_SECOND: Final = 10_000.0
RELOAD_BYTES_PER_SECOND: Final = 1e9
"""Rough figures of an accelerator and a disk: they say which of the two is the cheaper way back, and by how much."""


class Holding(Protocol):
    """What one tier has of the tree."""

    def has(self, node: int, kind: int) -> bool:
        """An object lies here, or is being written here."""

    def complete(self, node: int, kind: int) -> bool:
        """It is here and whole."""

    def busy(self, node: int) -> bool:
        """Somebody touches an object of the node at the moment: its turn comes later."""

    def children(self, node: int) -> int:
        """How many children of the node have objects here."""

    def cost_bytes(self, node: int, kind: int) -> int:
        """What dropping the object makes free here."""

    def drop(self, node: int, kind: int) -> None:
        """Forget the object here. The evictor settles its node."""


class Tree(Protocol):
    """The union of tiers, as an evictor needs it."""

    index: Index
    namespaces: Namespaces
    usable: Usable

    def copied(self, holding: Holding, node: int, kind: int) -> bool:
        """Whether another tier has a complete copy."""

    def stands(self, node: int) -> bool:
        """Whether a request in progress ends at the node (provisional, DESIGN 5)."""

    def changed(self, node: int) -> None:
        """Objects of the node went: remove it where none is left, and settle what depends on it."""


class Evictor:
    """`count(reason, objects, size_bytes)` is told of each unit that goes."""

    def __init__(
        self, tree: Tree, holding: Holding, policy: EvictionPolicy, count: Callable[[str, int, int], None]
    ) -> None:
        self._tree = tree
        self._holding = holding
        self.policy = policy
        self._count = count
        self._parked: set[int] = set()  # victims that were busy when it was their turn
        self._returned = False  # something was given back since the last one was parked
        self.filling = NONE  # the node that room is being made for

    # Candidates

    def settle(self, node: int) -> None:
        """Tell the policy whether something of the node may go (what is busy is found out when it is its turn)."""
        worth = self.worth(node)
        if worth is None:
            self.policy.on_not_candidate(node)
        else:
            self.policy.on_candidate(node, worth)

    def removed(self, node: int) -> None:
        self.policy.on_removed(node)
        self._parked.discard(node)

    def worth(self, node: int) -> float | None:
        """Seconds saved by each use of the node's unit, per byte; None when nothing of it may go."""
        tree = self._tree
        kinds = self._going(node)
        if not kinds:
            return None
        copied = self._copied(node, kinds)
        if not copied and not tree.usable.serves(node):
            return USELESS
        size_bytes = sum(self._holding.cost_bytes(at, kind) for at, kinds in self._unit(node, kinds) for kind in kinds)
        above = tree.usable.resume(node)
        tokens = tree.index.boundary(node) - (tree.index.boundary(above) if above != NONE else 0)
        seconds = tokens / RECOMPUTE_TOKENS_PER_SECOND
        if copied:
            seconds = min(seconds, size_bytes / RELOAD_BYTES_PER_SECOND)
        return seconds / max(size_bytes, 1)

    def _going(self, node: int) -> list[int]:
        """What of the node's objects may go now."""
        tree, holding = self._tree, self._holding
        leaf = tree.index.is_leaf(node)
        namespace = tree.namespaces.by_slot[tree.index.namespace(node)]
        if not leaf and len(namespace.kinds) == 1 and holding.children(node):
            return []  # the common case: an inner node of a namespace of attention alone
        kinds = self._whole(node)
        if node == self.filling or not kinds:
            return []
        if leaf:
            return [] if not tree.usable.serves(node) and tree.stands(node) else kinds
        return [kind for kind in kinds if self._may_leave(namespace, node, kind)]

    def _whole(self, node: int) -> list[int]:
        """What is here of the node, all of it complete; empty when something is being written."""
        holding = self._holding
        kinds = [kind for kind in _KINDS if holding.has(node, kind)]
        for kind in kinds:
            if not holding.complete(node, kind):
                return []
        return kinds

    def _may_leave(self, namespace: Namespace, node: int, kind: int) -> bool:
        """Whether the object may go from an inner node."""
        tree = self._tree
        copied = tree.copied(self._holding, node, kind)
        if kind == namespace.path_kind:
            return copied and not self._holding.children(node)
        if copied:
            return True
        spare = tree.usable.usable(node) and tree.usable.serves_below(node)
        return spare and (kind != Kind.WINDOW or not tree.usable.needed(node, namespace.window_chunks - 1))

    def _unit(self, node: int, kinds: list[int]) -> list[tuple[int, list[int]]]:
        """What goes with the node's objects: from a leaf upwards, what nobody could resume at without it."""
        tree = self._tree
        unit = [(node, kinds)]
        if not tree.index.is_leaf(node):
            return unit
        stays = self._stays(node, kinds)
        at = tree.index.parent(node)
        while at != NONE and len(unit) < UNIT_NODES_MAX:
            kinds = self._going_along(at, stays)
            if not kinds:
                break
            unit.append((at, kinds))
            stays = stays or self._stays(at, kinds)
            at = tree.index.parent(at)
        return unit

    def _going_along(self, at: int, stays: bool) -> list[int]:
        tree, holding = self._tree, self._holding
        if tree.usable.usable(at) or tree.index.branches(at) or tree.stands(at) or at == self.filling:
            return []
        if holding.busy(at):
            return []
        kinds = self._whole(at)
        return kinds if not stays or self._copied(at, kinds) else []

    def _copied(self, node: int, kinds: list[int]) -> bool:
        """Whether other tiers have all of these objects."""
        return all(self._tree.copied(self._holding, node, kind) for kind in kinds)

    def _stays(self, node: int, kinds: list[int]) -> bool:
        """Whether another tier keeps the node in the tree."""
        return any(self._tree.copied(self._holding, node, kind) for kind in kinds)

    # Evicting

    def evict_one(self, reason: str) -> bool:
        """Drop one unit; False when there is none."""
        node = self.victim()
        if node is None:
            return False
        unit = self._unit(node, self._going(node))
        self.policy.on_evicted(node, self._heir(node))
        size_bytes = 0
        for at, kinds in unit:
            for kind in kinds:
                size_bytes += self._holding.cost_bytes(at, kind)
                self._holding.drop(at, kind)
        self._count(reason, sum(len(kinds) for _, kinds in unit), size_bytes)
        for at, _ in unit:
            self._tree.changed(at)
        return True

    def victim(self) -> int | None:
        """The node whose unit goes next."""
        node = self._first()
        if node is None and self._parked and self._returned:
            self.unpark()
            node = self._first()
        return node

    def park(self, node: int) -> None:
        """Pass over the node until `unpark`."""
        self.policy.on_not_candidate(node)
        self._parked.add(node)

    @property
    def parked(self) -> frozenset[int]:
        return frozenset(self._parked)

    def returned(self) -> None:
        """Something is touched no more."""
        self._returned = True

    def unpark(self) -> None:
        """Offer again what was passed over."""
        parked, self._parked = self._parked, set()
        self._returned = False
        for node in parked:
            self.settle(node)

    def _first(self) -> int | None:
        while (node := self.policy.victim()) is not None:
            if not self._holding.busy(node):
                return node
            self.park(node)
        return None

    def _heir(self, node: int) -> int:
        """The node that requests resume at without this one."""
        above = self._tree.usable.resume(node)
        return NO_NODE if above == NONE else above
