"""Misses: why a Locate was not answered with more, and how far each tier reaches.

Counters, engines and `explain` show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES, ROOT_KEY, Kind, LocateCall
from kvdepot.core.misses import MissReason
from kvdepot.core.records import Lookup
from kvdepot.server.depot.loads.lookups import LookedUp
from kvdepot.server.depot.loads.offers import Offer
from kvdepot.server.depot.loads.presence import Presence, held_by
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.rows import COMMITTED, Rows
from kvdepot.server.depot.tree.tree import Tree

_NAMESPACES_ASKED_MAX: Final = 64
"""For the missing chunk: 0.1 ms."""
_WITHOUT_INDEX: Final = ("opening", "offline")
_LOOKED_UP: Final = {
    LookedUp.LATE: MissReason.PROBE_LATE,
    LookedUp.REFUSED: MissReason.PROBE_REFUSED,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What the index says of a call's chunks at the moment: a node each, and by kind what may be served."""

    nodes: Nodes
    ram: dict[Kind, bytes]  # a byte a chunk: in RAM
    presence: dict[Kind, bytes]  # the same in any tier
    high_tokens: int  # what ends after it is not answered
    boundary_tokens: int  # the deepest of which every object may be served


@dataclass(frozen=True, slots=True)
class Miss:
    """The first chunk that cannot be served or resumed at. Without a reason, there is no such chunk."""

    reason: MissReason | None
    chunk: int
    other: Namespace | None = None  # that has it
    told: MissReason | None = None  # to the engine, in place of the reason


class Misses:
    """The reasons of misses. All methods only read."""

    def __init__(self, tree: Tree, rows: Rows, presence: Presence, tiering: Tiering) -> None:
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._lost_keys = tree.lost_keys
        self._disks = tree.disks
        self._rows = rows
        self._presence = presence
        self._tiering = tiering

    def of(self, namespace: Namespace, call: LocateCall, seen: Seen, looked_up: LookedUp | None) -> Miss:
        """Return the miss after the longest boundary."""
        chunk_tokens = _chunk_tokens(namespace)
        at, reach = seen.boundary_tokens // chunk_tokens, path_chunks(namespace, seen)
        if at >= min(call.high_tokens // chunk_tokens, len(seen.nodes)):
            return Miss(None, at)
        if at >= seen.high_tokens // chunk_tokens:
            return Miss(MissReason.NO_ROOM, at)
        if reach > at:
            stateless = Kind.STATE in seen.presence and seen.presence[Kind.STATE].find(1, at) < 0
            return Miss(MissReason.NO_CHECKPOINT if stateless else MissReason.INCOMPLETE, at)
        node = int(seen.nodes[at])
        if node == NONE:
            return self._not_there(namespace, call.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], at, looked_up)
        return Miss(self._not_served(namespace, node), at)

    def _not_served(self, namespace: Namespace, node: int) -> MissReason:
        """Return why a chunk that the index knows is not served."""
        row = self._index.row(node, namespace.path_kind)
        if row == NO_ROW:
            return MissReason.TIER_UNAVAILABLE
        return MissReason.UNVERIFIED if self._rows.state[row] == COMMITTED else MissReason.BEING_WRITTEN

    def _not_there(self, namespace: Namespace, key: bytes, at: int, looked_up: LookedUp | None) -> Miss:
        """Return the miss of a chunk that the index does not know."""
        reason = _LOOKED_UP.get(looked_up) if looked_up is not None else None
        reason = reason or self._lost_keys.reason(namespace.id, key)
        if reason is not None:
            return Miss(reason, at)
        other = self._elsewhere(namespace, key)
        if other is not None and namespace.base_id == other.base_id is not None:
            return Miss(MissReason.EPOCH_BUMPED, at)  # not dropped yet
        if looked_up is not None:
            nowhere = MissReason.PROBE_ABSENT
        else:
            nowhere = MissReason.TIER_UNAVAILABLE if self.some_disk_is(*_WITHOUT_INDEX) else MissReason.UNKNOWN
        if other is None:
            return Miss(nowhere, at)
        return Miss(MissReason.OTHER_NAMESPACE, at, other, nowhere if _foreign(namespace, other) else None)

    def some_disk_is(self, *states: str) -> bool:
        """Return whether a disk is in one of these states, in which it offers nothing.

        While it is "opening", or its directory is gone ("offline"), its objects are not in the index.
        """
        return any(disk.tier.status().state in states for disk in self._disks if not disk.tier.readable)

    def _elsewhere(self, namespace: Namespace, key: bytes) -> Namespace | None:
        """Return another namespace that has the chunk, or None. Chunk hashes do not depend on the namespace.

        Those of the same tenant come first, so that no other tenant's changes what the engine is told.
        """
        others = [one for one in self._namespaces.by_slot.values() if one is not namespace and one.nodes]
        others.sort(key=partial(_foreign, namespace))
        for other in islice(others, _NAMESPACES_ASKED_MAX):
            if self._index.find(other.slot, key) != NONE:
                return other
        return None

    def told(self, miss: Miss) -> str:
        """Return the reason to report to the engine: for what another tenant has, as if nobody had it."""
        return miss.told or miss.reason or ""

    def lookup(self, namespace: Namespace, call: LocateCall, seen: Seen, offer: Offer, miss: Miss) -> Lookup:
        """Return the lookup to record for the operator."""
        reach = path_chunks(namespace, seen)
        nodes, path_kind = seen.nodes[:reach], namespace.path_kind
        chunks_by_tier = {"ram": seen.ram[Kind(path_kind)][:reach].count(1)}
        for tier in self._tiering.readable:
            chunks_by_tier[tier.tier.name] = int(np.count_nonzero(held_by(self._index, [tier], nodes, path_kind)))
        at = miss.chunk * KEY_BYTES
        return Lookup(
            chunks=len(seen.nodes),
            chunk_tokens=_chunk_tokens(namespace),
            high_tokens=call.high_tokens,
            path_chunks=reach,
            chunks_by_tier=chunks_by_tier,
            boundary_tokens=seen.boundary_tokens,
            offered_tokens=offer.boundary_tokens,
            offered_tier=offer.tier,
            offered_place=self._place(namespace, seen, offer),
            estimate_seconds=offer.seconds,
            miss=miss.reason or "",
            missing_chunk=miss.chunk,
            missing_key=call.keys[at : at + KEY_BYTES] or ROOT_KEY,
            other_namespace=miss.other.id if miss.other is not None else b"",
        )

    def _place(self, namespace: Namespace, seen: Seen, offer: Offer) -> str:
        """Return which of several peers have the last object of the path that the offer's slowest tier has."""
        shared = (tier for tier in self._tiering.readable if tier.shared is not None)
        tier = next((tier for tier in shared if tier.tier.name == offer.tier), None)
        if tier is None:
            return ""
        nodes = seen.nodes[: offer.boundary_tokens // _chunk_tokens(namespace)]
        held = np.flatnonzero(held_by(self._index, [tier], nodes, namespace.path_kind))
        return tier.tier.stored(tier.handle(int(nodes[held[-1]]), namespace.path_kind)).place if len(held) else ""


def _foreign(namespace: Namespace, other: Namespace) -> bool:
    """Return whether the other namespace is another tenant's, as far as is known."""
    return other.spec is None or namespace.spec is None or other.spec.tenant != namespace.spec.tenant


def path_chunks(namespace: Namespace, seen: Seen) -> int:
    """Return how many chunks, from the first on, make a path without a gap, in any tier."""
    path = seen.presence[Kind(namespace.path_kind)]
    reach = path.find(0)
    return len(path) if reach < 0 else reach


def _chunk_tokens(namespace: Namespace) -> int:
    assert namespace.planner is not None, "only registered namespaces are located in"
    return namespace.planner.chunk_tokens
