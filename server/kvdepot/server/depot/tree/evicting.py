"""Eviction from one tier: which objects may go, in which units (design.md#eviction).

Each tier has one `Evictor` with a policy of its own, over one tree. What may go at a node:

* at a leaf of the union of tiers, everything; with it the attention up to the nearest
  ancestor that is usable or branches, because no request could resume there
* at an inner node that is usable, its state and window objects alone, where a node below
  is usable too
* what another tier holds as well (a demotion); its path object only where no child of the
  node has objects in this tier, so that what a tier holds stays a path

A leaf at which no request could resume goes before all others, unless a request in progress
ends there. Only adopted objects that have no node yet (`detached`) go before it.

A tier may be the only one with the path to a node, while what follows lies in other tiers only.
The reason is a disk that lost its part of the path, or a shared tier that was asked for the rest
only. RAM drops such an *orphan* where nothing else may go, with all that follows it. The tiers
below get a chance to take it first (`drop_orphan`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final, Protocol

from kvdepot.core.calls import Kind
from kvdepot.core.eviction_policy import NO_NODE, USELESS, EvictionPolicy
from kvdepot.server.depot.tree.holding import Demotion, Holding, UnionTree
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace

UNIT_NODES_MAX: Final = 1024
"""Nodes dropped at once, some 10 ms; what remains of a longer unit serves nobody and goes next."""
ORPHAN_SECONDS: Final = 10.0
"""How long tiers below have to take an orphan that they are offered."""
SHORTAGE_SECONDS: Final = 3 * ORPHAN_SECONDS
"""How long ticks make room for an object that is not asked for again."""
_ORPHANS_LOOKED_AT: Final = 8
"""At a time. What follows each is walked, up to UNIT_NODES_MAX nodes."""
_UPDATES_MAX: Final = 32
"""Candidates updated for one victim, 13 us each: what a policy learns may change the worth of all of them."""
RECOMPUTE_TOKENS_PER_SECOND: Final = 10_000.0
RELOAD_BYTES_PER_SECOND: Final = 1e9
"""Rough figures of an accelerator and a disk: they say which of the two is the cheaper way back, and by how much."""


class Shortage:
    """The room that an object lacked, where only orphans could make some."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.until = 0.0

    def placed(self, size_bytes: int) -> None:
        """Note that an object got room: so much less is lacking."""
        self.size_bytes = max(self.size_bytes - size_bytes, 0)


class Region(Protocol):
    """What watermarks hold for: a tier, or a room of RAM."""

    slots: set[int] | None
    """The namespaces that lie there; None: all."""
    trimming: bool
    """On the way from the high to the low watermark."""

    @property
    def used_bytes(self) -> int: ...


class Evictor:
    """The eviction of one tier, which chooses and drops what goes. It is the same for every tier."""

    def __init__(self, tree: UnionTree, holding: Holding, policy: EvictionPolicy) -> None:
        self._tree = tree
        self._holding = holding
        self.policy = policy
        self._deferred: dict[int, set[int]] = {}  # by namespace slot: victims that were busy when it was their turn
        self._returns = 0  # how many loans have ended
        self._offered: dict[int, int] = {}  # by namespace slot: `_returns` when its deferred ones were offered again
        # By namespace slot and node: since when an orphan is offered to lower tiers; None: not yet.
        self._orphans: dict[int, dict[int, float | None]] = {}
        self._orphan_gone = False  # since `rest_orphans`: a drop may walk UNIT_NODES_MAX nodes
        self._orphan_due = False  # since then another one was to go
        self.filling = NONE  # the node that room is being made for

    # Candidates

    def update_candidate(self, node: int) -> None:
        """Tell the policy whether something of the node may go. Whether it is busy shows when it is the victim."""
        if self._holding.children(node) and not self._several(node):
            # The common case, inside a path of attention alone: what follows needs it, so it is no orphan either.
            self.policy.on_not_candidate(node)
            self.no_orphan(node)
            return
        worth = self.worth(node)
        if worth is None:
            self.policy.on_not_candidate(node)
        else:
            self.policy.on_candidate(node, worth, self._tree.index.namespace(node))
        if self._holding.drops_orphans:
            self._note_orphan(node)

    @contextmanager
    def keeping(self, node: int) -> Iterator[None]:
        """Protect this node, and the nodes it follows, from eviction until the end of the block. NONE: no node."""
        self.filling = node
        if node != NONE:
            self.policy.on_not_candidate(node)
        try:
            yield
        finally:
            self.filling = NONE
            if node != NONE:
                self.update_candidate(node)

    def removed(self, node: int) -> None:
        self.policy.on_removed(node)
        if self._deferred:
            self._deferred.get(self._tree.index.namespace(node), set()).discard(node)
        self.no_orphan(node)

    def worth(self, node: int) -> float | None:
        """Return the seconds saved by each use of the node's unit, per byte. Return None when nothing of it may go."""
        tree = self._tree
        kinds = self._going(node)
        if not kinds:
            return None
        copied = self._copied(node, kinds)
        if not copied and not tree.usable.serves(node):
            return USELESS
        size_bytes = 0
        for at, going in self._unit(node, kinds):
            for kind in going:
                size_bytes += self._holding.cost_bytes(at, kind)
        above = tree.usable.resume(node)
        tokens = tree.index.boundary(node) - (tree.index.boundary(above) if above != NONE else 0)
        seconds = tokens / RECOMPUTE_TOKENS_PER_SECOND
        if copied:
            seconds = min(seconds, size_bytes / RELOAD_BYTES_PER_SECOND)
        return seconds / max(size_bytes, 1)

    def _going(self, node: int) -> list[int]:
        """Return the kinds of the node's objects that may go now."""
        tree, holding = self._tree, self._holding
        kinds = self._whole(node)
        if node == self.filling or not kinds or holding.kept(node):
            return []
        if self._holds_pins(node):
            return [kind for kind in kinds if not holding.pinned(node, kind)]
        if tree.index.is_leaf(node):
            return [] if not tree.usable.serves(node) and node in tree.in_use else kinds
        namespace = tree.namespaces.by_slot[tree.index.namespace(node)]
        return [kind for kind in kinds if self._may_leave(namespace, node, kind)]

    def _holds_pins(self, node: int) -> bool:
        """Return whether its path object is pinned here. Other objects of it may be above the share of pins."""
        return self._holding.pinned(node, self._tree.path_kind(node))

    def _whole(self, node: int) -> list[int]:
        """Return the kinds that are here, all of them complete; empty when something is being written."""
        kinds = self._holding.kinds(node)
        for kind in kinds:
            if not self._holding.complete(node, kind):
                return []
        return kinds

    def _may_leave(self, namespace: Namespace, node: int, kind: int) -> bool:
        """Return whether the object may go from an inner node."""
        tree = self._tree
        copied = tree.copied(self._holding, node, kind)
        if kind == namespace.path_kind:
            return copied and not self._holding.children(node)
        if copied:
            return True
        spare = tree.usable.usable(node) and tree.usable.serves_below(node)
        return spare and (kind != Kind.WINDOW or not tree.usable.needed(node, namespace.window_chunks - 1))

    def _unit(self, node: int, kinds: list[int]) -> list[tuple[int, list[int]]]:
        """Return what goes with the node's objects: from a leaf upwards, the nodes that serve nobody without it."""
        tree = self._tree
        unit = [(node, kinds)]
        if not tree.index.is_leaf(node):
            return unit
        stays = False  # whether another tier keeps anything of the unit in the tree
        at = tree.index.parent(node)
        while at != NONE and len(unit) < UNIT_NODES_MAX and self._serves_only_below(at):
            stays = stays or self._stays(*unit[-1])
            kinds = self._whole(at)
            if not kinds or (stays and not self._copied(at, kinds)):
                break
            unit.append((at, kinds))
            at = tree.index.parent(at)
        return unit

    def _serves_only_below(self, at: int) -> bool:
        """Return whether the node serves nobody without the one node below it, and nothing keeps it."""
        tree, holding = self._tree, self._holding
        if tree.usable.usable(at) or tree.index.branches(at) or at in tree.in_use or at == self.filling:
            return False
        return not (holding.busy(at) or holding.kept(at) or self._holds_pins(at))

    def _copied(self, node: int, kinds: list[int]) -> bool:
        """Return whether other tiers have all of these objects."""
        return all(self._tree.copied(self._holding, node, kind) for kind in kinds)

    def _stays(self, node: int, kinds: list[int]) -> bool:
        """Return whether another tier keeps the node in the tree."""
        return any(self._tree.copied(self._holding, node, kind) for kind in kinds)

    # Evicting

    def evict_one(self, reason: str, slots: Collection[int] | None = None) -> int:
        """Drop one unit, of these namespaces or of all. Return the number of objects: 0 when nothing may go."""
        if detached := self._holding.evict_detached(reason, slots):
            return detached
        node = self.victim(slots)
        if node is None:
            return 0
        return self._drop(reason, node, self._unit(node, self._going(node)))

    def evict_ahead(
        self, reason: str, slots: Collection[int] | None = None, demotion: Demotion | None = None
    ) -> tuple[int, int]:
        """Drop one unit ahead of need, unless a lower tier is to take it first.

        Return how many objects went, and how many went or wait for their demotion: 0 when nothing may go.
        """
        if detached := self._holding.evict_detached(reason, slots):
            return detached, detached
        node = self.victim(slots) if demotion is not None else None
        if demotion is not None and node is not None and demotion.defers(node):
            self.defer_victim(node)
            return 0, 1
        objects = self.evict_one(reason, slots)
        return objects, objects

    def evict_to(
        self, region: Region, used_bytes: int, limit: int, reason: str, demotion: Demotion | None = None
    ) -> int:  # fmt: skip
        """Evict towards `used_bytes`. Stop once `limit` objects have gone or wait. Return what is left of the limit."""
        while limit > 0 and region.used_bytes > used_bytes:
            _, done = self.evict_ahead(reason, region.slots, demotion)
            if not done:
                self.drop_orphan(reason, region.slots, demotion)
                break
            limit -= done
        return limit

    def trim(
        self, region: Region, capacity_bytes: int, high: float, low: float, limit: int,
        demotion: Demotion | None = None,
    ) -> int:  # fmt: skip
        """Evict from above `high` of the capacity to `low` of it, about `limit` objects. Return what is left of them.

        `region.trimming` says whether more is due.
        """
        if region.trimming or region.used_bytes > high * capacity_bytes:
            limit = self.evict_to(region, int(low * capacity_bytes), limit, "watermark", demotion)
            region.trimming = limit <= 0
        return limit

    def _drop(self, reason: str, node: int, unit: list[tuple[int, list[int]]]) -> int:
        self.policy.on_evicted(node, self._heir(node))
        objects = size_bytes = 0
        for at, kinds in unit:
            objects += len(kinds)
            for kind in kinds:
                size_bytes += self._holding.cost_bytes(at, kind)
                self._holding.drop(at, kind)
        self._holding.count_evicted(reason, objects, size_bytes)
        for at, _ in unit:
            self._tree.changed(at)
        return objects

    def victim(self, slots: Collection[int] | None = None) -> int | None:
        """Return the node whose unit goes next, of these namespaces or of all."""
        node = self._first(slots)
        if node is None and self._offer_deferred(slots):
            node = self._first(slots)
        return node

    def defer_victim(self, node: int) -> None:
        """Skip the node until `offer_deferred`."""
        self.policy.on_not_candidate(node)
        self._deferred.setdefault(self._tree.index.namespace(node), set()).add(node)

    @property
    def deferred(self) -> frozenset[int]:
        return frozenset().union(*self._deferred.values())

    def waits(self, slots: Collection[int]) -> bool:
        """Return whether a victim of these namespaces was deferred: it may go later."""
        return any(self._deferred.get(slot) for slot in slots)

    def returned(self) -> None:
        """Note the end of a loan: a deferred victim may be free."""
        self._returns += 1

    def offer_deferred(self) -> None:
        """Offer deferred victims again."""
        for slot in list(self._deferred):
            self._offer_again(slot)

    def _offer_again(self, slot: int) -> None:
        self._offered[slot] = self._returns
        for node in self._deferred.pop(slot):
            self.update_candidate(node)

    def _offer_deferred(self, slots: Collection[int] | None) -> bool:
        """Offer deferred victims again, where a loan has ended since the last time."""
        due = [slot for slot in (self._deferred if slots is None else slots) if self._due(slot)]
        for slot in due:
            self._offer_again(slot)
        return bool(due)

    def _due(self, slot: int) -> bool:
        return bool(self._deferred.get(slot)) and self._offered.get(slot, 0) != self._returns

    # Orphans

    def note_shortage(self, shortage: Shortage, size_bytes: int, slots: Collection[int]) -> bool:
        """Note that an object found no room. Return whether ticks make room for it: these namespaces have orphans."""
        orphans = any(self._orphans.get(slot) for slot in slots)
        if orphans:
            shortage.size_bytes, shortage.until = size_bytes, self._tree.clock() + SHORTAGE_SECONDS
        return orphans

    def lacks(self, shortage: Shortage, free_bytes: int, slots: Collection[int] | None) -> bool:
        """Return whether an object has lacked room lately that only an orphan's end could make.

        A large object may not fit below the watermark either. It would be refused as long as the orphan is there.
        While a unit of these namespaces, or of all, may go, the next try evicts that.
        """
        if not shortage.size_bytes:
            return False
        late = self._tree.clock() > shortage.until
        if late or free_bytes >= shortage.size_bytes or self.victim(slots) is not None:
            shortage.size_bytes = 0
        return shortage.size_bytes > 0

    def orphan_slots(self) -> list[int]:
        """Return the slots of the namespaces that have orphans."""
        return [slot for slot, orphans in self._orphans.items() if orphans]

    def rest_orphans(self) -> bool:
        """Let one more orphan go from now on. Return whether another was due after the last one that went."""
        due, self._orphan_gone, self._orphan_due = self._orphan_due, False, False
        return due

    def drop_orphan(
        self, reason: str, slots: Collection[int] | None = None, demotion: Demotion | None = None
    ) -> int:  # fmt: skip
        """Drop one orphan, with what follows it in other tiers. Return the number of objects that went from here.

        Ahead of need only: whoever is just making room may be about to use what follows it. Only one goes
        until `rest_orphans`.
        """
        if self._orphan_gone:
            self._orphan_due = True
            return 0
        for slot, node in self._orphans_in_turn(slots):
            orphans, kinds, now = self._orphans[slot], self._orphan_kinds(node), self._tree.clock()
            offered_at = orphans.pop(node)
            if not kinds:
                continue
            orphans[node] = offered_at = now if offered_at is None else offered_at  # after the others
            if now - offered_at < ORPHAN_SECONDS:
                if demotion is not None:
                    demotion.save(node)
            elif below := self._below_orphan(node):
                objects = self._drop(reason, node, [(node, kinds)])
                self._tree.dropped_orphan(below)
                self._orphan_gone = True
                return objects
        return 0

    def _orphans_in_turn(self, slots: Collection[int] | None) -> list[tuple[int, int]]:
        """Return (slot, node) of the next ones. Those whose turn it was come last."""
        chosen: list[tuple[int, int]] = []
        for slot in list(self._orphans if slots is None else slots):
            left = _ORPHANS_LOOKED_AT - len(chosen)
            if left > 0 and (orphans := self._orphans.pop(slot, None)) is not None:
                self._orphans[slot] = orphans
                chosen += [(slot, node) for node in islice(orphans, left)]
        return chosen

    def _below_orphan(self, node: int) -> int:
        """Return how many nodes would go with the orphan; 0: it has to stay for now."""
        tree = self._tree
        if self._holding.busy(node) or (node in tree.in_use and not tree.usable.serves(node)):
            return 0
        below = tree.index.leaves_first(node, UNIT_NODES_MAX)[:-1]
        return 0 if any(tree.index.rows_of(at) or at in tree.in_use for at in below) else len(below)

    def _note_orphan(self, node: int) -> None:
        if self._orphan_kinds(node):
            self._orphans.setdefault(self._tree.index.namespace(node), {}).setdefault(node, None)
        else:
            self.no_orphan(node)

    def no_orphan(self, node: int) -> None:
        """Note that the node is no orphan, or not any more."""
        if self._orphans:
            self._orphans.get(self._tree.index.namespace(node), {}).pop(node, None)

    def _orphan_kinds(self, node: int) -> list[int]:
        """Return the kinds that would go if the node is an orphan; empty if it is none, or is pinned."""
        tree, holding = self._tree, self._holding
        if tree.index.is_leaf(node) or holding.children(node):
            return []
        path_kind, kinds = tree.path_kind(node), self._whole(node)
        if path_kind not in kinds or tree.copied(holding, node, path_kind) or node == self.filling:
            return []
        return [] if holding.kept(node) or any(holding.pinned(node, kind) for kind in kinds) else kinds

    def _first(self, slots: Collection[int] | None) -> int | None:
        updated = 0
        while (node := self.policy.victim(slots)) is not None:
            if self._holding.busy(node):
                self.defer_victim(node)
            elif self._several(node) and updated < _UPDATES_MAX:
                updated += 1
                self.update_candidate(node)  # it is worth more when a state above it went
                if self.policy.victim(slots) == node:
                    return node
            else:
                return node
        return None

    def _several(self, node: int) -> bool:
        """Return whether its namespace has more than the objects that make a path."""
        return len(self._tree.namespaces.by_slot[self._tree.index.namespace(node)].kinds) > 1

    def _heir(self, node: int) -> int:
        """Return the node at which requests resume without this one."""
        above = self._tree.usable.resume(node)
        return NO_NODE if above == NONE else above
