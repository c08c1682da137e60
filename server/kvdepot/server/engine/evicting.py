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

A tier may have the path to a node that no other has, while what follows lies in other tiers
alone: a disk lost what it had of the path, or a shared tier was asked for the rest only. RAM
gives such an *end* up where nothing else may go, with all that follows it, when the tiers below
had their chance to take it (`sever`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final, Protocol

from kvdepot.core.calls import Kind
from kvdepot.core.eviction import NO_NODE, USELESS, EvictionPolicy
from kvdepot.server.engine.index import NONE, Index
from kvdepot.server.engine.namespaces import Namespace, Namespaces
from kvdepot.server.engine.usable import Usable

_KINDS: Final = tuple(map(int, Kind))
UNIT_NODES_MAX: Final = 1024
"""Nodes dropped at once, some 10 ms; what remains of a longer unit serves nobody and goes next."""
END_SECONDS: Final = 10.0
"""How long tiers below have to take an end that they are offered."""
_ENDS_LOOKED_AT: Final = 8
"""At a time; of each what follows it is walked, up to UNIT_NODES_MAX nodes."""
_SETTLES_MAX: Final = 32
"""Candidates looked at anew for one victim, 13 us each: what a policy learns may change what all of them are worth."""
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

    def kept(self, node: int) -> bool:
        """An object of the node is not to go for now; who kept it says when that has changed."""

    def pinned(self, node: int, kind: int) -> bool:
        """Likewise, while others of the node may go."""

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

    def path_kind(self, node: int) -> int:
        """The kind of object that makes a path in the node's namespace."""

    def stands(self, node: int) -> bool:
        """Whether a request in progress ends at the node (provisional, DESIGN 5)."""

    def clock(self) -> float:
        """Seconds."""

    def save(self, node: int) -> None:
        """Offer the path to the node to the tiers that have what follows it."""

    def gave_up(self, nodes: int) -> None:
        """So many nodes went with an end."""

    def changed(self, node: int) -> None:
        """Objects of the node went: what has no path now goes, and what depends on the node is settled."""


class Evictor:
    """`count(reason, objects, size_bytes)` is told of each unit that goes. `severs`: ends may be given up."""

    def __init__(
        self,
        tree: Tree,
        holding: Holding,
        policy: EvictionPolicy,
        count: Callable[[str, int, int], None],
        *,
        severs: bool = False,
    ) -> None:
        self._tree = tree
        self._holding = holding
        self.policy = policy
        self._count = count
        self._parked: dict[int, set[int]] = {}  # by namespace slot: victims that were busy when it was their turn
        self._returns = 0  # how often something was given back
        self._offered: dict[int, int] = {}  # by namespace slot: `_returns` when its parked ones were offered again
        self._severs = severs
        # By namespace slot and node, where they may be given up: since when they are offered, None: not yet.
        self._ends: dict[int, dict[int, float | None]] = {}
        self.filling = NONE  # the node that room is being made for

    # Candidates

    def settle(self, node: int) -> None:
        """Tell the policy whether something of the node may go (what is busy is found out when it is its turn)."""
        worth = self.worth(node)
        if worth is None:
            self.policy.on_not_candidate(node)
        else:
            self.policy.on_candidate(node, worth, self._tree.index.namespace(node))
        if self._severs:
            self._note_end(node)

    @contextmanager
    def keeping(self, node: int) -> Iterator[None]:
        """What is evicted meanwhile is nothing of this node, nor what it follows; NONE: of any."""
        self.filling = node
        if node != NONE:
            self.policy.on_not_candidate(node)
        try:
            yield
        finally:
            self.filling = NONE
            if node != NONE:
                self.settle(node)

    def removed(self, node: int) -> None:
        self.policy.on_removed(node)
        slot = self._tree.index.namespace(node)
        self._parked.get(slot, set()).discard(node)
        self._ends.get(slot, {}).pop(node, None)

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
        if not leaf and not self._several(node) and holding.children(node):
            return []  # the common case: an inner node of a namespace of attention alone
        kinds = self._whole(node)
        if node == self.filling or not kinds or holding.kept(node):
            return []
        if self._holds_pins(node):
            return [kind for kind in kinds if not holding.pinned(node, kind)]
        if leaf:
            return [] if not tree.usable.serves(node) and tree.stands(node) else kinds
        namespace = tree.namespaces.by_slot[tree.index.namespace(node)]
        return [kind for kind in kinds if self._may_leave(namespace, node, kind)]

    def _holds_pins(self, node: int) -> bool:
        """Whether its path is pinned here; other objects of it may be above the share of pins."""
        return self._holding.pinned(node, self._tree.path_kind(node))

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
        if holding.busy(at) or holding.kept(at) or self._holds_pins(at):
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

    def evict_one(self, reason: str, slots: Collection[int] | None = None) -> int:
        """Drop one unit, of these namespaces or of all; how many objects went, 0 when nothing may go."""
        node = self.victim(slots)
        if node is None:
            return 0
        return self._drop(reason, node, self._unit(node, self._going(node)))

    def _drop(self, reason: str, node: int, unit: list[tuple[int, list[int]]]) -> int:
        self.policy.on_evicted(node, self._heir(node))
        size_bytes = 0
        for at, kinds in unit:
            for kind in kinds:
                size_bytes += self._holding.cost_bytes(at, kind)
                self._holding.drop(at, kind)
        objects = sum(len(kinds) for _, kinds in unit)
        self._count(reason, objects, size_bytes)
        for at, _ in unit:
            self._tree.changed(at)
        return objects

    def victim(self, slots: Collection[int] | None = None) -> int | None:
        """The node whose unit goes next, of these namespaces or of all."""
        node = self._first(slots)
        if node is None and self._offer_parked(slots):
            node = self._first(slots)
        return node

    def park(self, node: int) -> None:
        """Pass over the node until `unpark`."""
        self.policy.on_not_candidate(node)
        self._parked.setdefault(self._tree.index.namespace(node), set()).add(node)

    @property
    def parked(self) -> frozenset[int]:
        return frozenset().union(*self._parked.values())

    def waits(self, slots: Collection[int]) -> bool:
        """Whether something of these namespaces was passed over: it may go later."""
        return any(self._parked.get(slot) for slot in slots)

    def returned(self) -> None:
        """Something is touched no more."""
        self._returns += 1

    def unpark(self) -> None:
        """Offer again what was passed over."""
        for slot in list(self._parked):
            self._unpark(slot)

    def _unpark(self, slot: int) -> None:
        self._offered[slot] = self._returns
        for node in self._parked.pop(slot):
            self.settle(node)

    def _offer_parked(self, slots: Collection[int] | None) -> bool:
        """Offer again what was passed over, where something was given back since the last time."""
        due = [slot for slot in (self._parked if slots is None else slots) if self._due(slot)]
        for slot in due:
            self._unpark(slot)
        return bool(due)

    def _due(self, slot: int) -> bool:
        return bool(self._parked.get(slot)) and self._offered.get(slot, 0) != self._returns

    # Ends

    def sever(self, reason: str, slots: Collection[int] | None = None) -> int:
        """Give one end up, with what follows it in other tiers; how many objects went from here, 0 where none may go.

        Ahead of need only: whoever is just making room may be about to use what follows it.
        """
        for slot, node in self._ends_in_turn(slots):
            ends, kinds, now = self._ends[slot], self._end(node), self._tree.clock()
            offered_at = ends.pop(node)
            if not kinds:
                continue
            ends[node] = offered_at = now if offered_at is None else offered_at  # behind the others
            if now - offered_at < END_SECONDS:
                self._tree.save(node)
            elif below := self._below_end(node):
                objects = self._drop(reason, node, [(node, kinds)])
                self._tree.gave_up(below)
                return objects
        return 0

    def _ends_in_turn(self, slots: Collection[int] | None) -> list[tuple[int, int]]:
        """(slot, node) of the next ones; those whose turn it was come last."""
        chosen: list[tuple[int, int]] = []
        for slot in list(self._ends if slots is None else slots):
            left = _ENDS_LOOKED_AT - len(chosen)
            if left > 0 and (ends := self._ends.pop(slot, None)) is not None:
                self._ends[slot] = ends
                chosen += [(slot, node) for node in islice(ends, left)]
        return chosen

    def _below_end(self, node: int) -> int:
        """How many nodes would go with the end; 0: it has to stay for now, for its own sake or for theirs."""
        tree = self._tree
        if self._holding.busy(node) or (tree.stands(node) and not tree.usable.serves(node)):
            return 0
        below = tree.index.leaves_first(node, UNIT_NODES_MAX)[:-1]
        return 0 if any(tree.index.in_ram(at) or tree.stands(at) for at in below) else len(below)

    def _note_end(self, node: int) -> None:
        slot = self._tree.index.namespace(node)
        if self._end(node):
            self._ends.setdefault(slot, {}).setdefault(node, None)
        elif slot in self._ends:
            self._ends[slot].pop(node, None)

    def _end(self, node: int) -> list[int]:
        """What would go of the node if it is an end; empty if it is none, or is kept."""
        tree, holding = self._tree, self._holding
        if tree.index.is_leaf(node) or holding.children(node):
            return []
        path_kind = tree.path_kind(node)
        if not holding.has(node, path_kind) or tree.copied(holding, node, path_kind) or node == self.filling:
            return []
        kinds = self._whole(node)
        return [] if holding.kept(node) or any(holding.pinned(node, kind) for kind in kinds) else kinds

    def _first(self, slots: Collection[int] | None) -> int | None:
        settled = 0
        while (node := self.policy.victim(slots)) is not None:
            if self._holding.busy(node):
                self.park(node)
            elif self._several(node) and settled < _SETTLES_MAX:
                settled += 1
                self.settle(node)  # it is worth more when a state above it went
                if self.policy.victim(slots) == node:
                    return node
            else:
                return node
        return None

    def _several(self, node: int) -> bool:
        """Whether its namespace has more than the objects that make a path."""
        return len(self._tree.namespaces.by_slot[self._tree.index.namespace(node)].kinds) > 1

    def _heir(self, node: int) -> int:
        """The node that requests resume at without this one."""
        above = self._tree.usable.resume(node)
        return NO_NODE if above == NONE else above
