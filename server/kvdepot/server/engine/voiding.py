"""Making void what engines have stored: an operator's bump of the epoch (docs/adr/0036).

A void namespace cannot be registered, so nobody asks for what it has, in whatever tier and run. What is done here
besides ends what was asked for before, and makes room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import StaleEpoch
from kvdepot.core.keys import NamespaceSpec, bumped_id
from kvdepot.core.misses import MissReason
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.leases import NO_ENTRY, Lease, ReadLease, WriteLease
from kvdepot.server.engine.load import Loads
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.prefetch import Prefetch
from kvdepot.server.engine.removal import Removal
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.sessions import Sessions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.store import Stores
from kvdepot.server.engine.switches import Switches


@dataclass(frozen=True, slots=True)
class Voided:
    """What a bump found."""

    namespaces: int = 0
    chunks: int = 0
    leases: int = 0  # of loads and stores in progress


class Voiding:
    """`epochs` are what engines have to keep to."""

    def __init__(
        self, space: Space, sessions: Sessions, stores: Stores, loads: Loads, prefetch: Prefetch, switches: Switches
    ) -> None:
        self.epochs = Epochs()
        self._space = space
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._prefetch = prefetch
        self._switches = switches
        self._removals: deque[Removal] = deque()

    def check(self, spec: NamespaceSpec) -> None:
        """Raises StaleEpoch for a namespace that is void, or whose turn has not come."""
        bumps = self.epochs.counter(spec.base_id())
        if spec.bumps != bumps:
            self._space.counters.add("stale_registrations")
            raise StaleEpoch(bumps)

    def void(self, namespace_id: bytes) -> bool:
        """Whether it is known to be: of what no engine has registered only its own id says so."""
        namespace = self._space.namespaces.by_id.get(namespace_id)
        return namespace_id in self.epochs.void or (namespace is not None and namespace.void)

    def begin(self, epochs: Epochs) -> Voided:
        """Nothing of what becomes void by it is granted any more when this returns, and nothing in progress succeeds.

        Loads: what is copied has another generation from now on, so that ranks report failure; it stays lent. Stores:
        their leases expire. What is left of the namespaces is dropped by `tick`, and found by nobody meanwhile.
        """
        raised, self.epochs = epochs.bump > self.epochs.bump, epochs
        namespaces = self._space.namespaces.by_slot.values()
        gone = [one for one in namespaces if not one.void and self._becomes_void(one, raised=raised)]
        chunks = sum(one.nodes for one in gone)
        for namespace in gone:
            self._leave(namespace)
        leases = self._end({one.slot for one in gone}) if gone else 0
        self._prefetch.end_namespaces(self._refusal)
        return Voided(len(gone), chunks, leases)

    def tick(self) -> None:
        """A slice of dropping."""
        if self._removals and not self._removals[0].run_once():
            self._removals.popleft()

    def _becomes_void(self, namespace: Namespace, *, raised: bool) -> bool:
        if namespace.base_id is None:  # nobody has registered it in this run
            return raised or namespace.id in self.epochs.void
        return self.epochs.counter(namespace.base_id) != namespace.bumps

    def _refusal(self, namespace_id: bytes) -> MissReason | None:
        return MissReason.EPOCH_BUMPED if self.void(namespace_id) else None

    def _leave(self, namespace: Namespace) -> None:
        """Sessions find it no more; whom its keys are asked for next is told why."""
        namespace.void = True
        for session in self._sessions.by_slot.values():
            if session.namespaces.pop(namespace.id, None) is not None:
                namespace.sessions -= 1
        heir = namespace.id
        if namespace.base_id is not None:
            heir = bumped_id(namespace.base_id, self.epochs.counter(namespace.base_id))
            self._switches.inherit(namespace.id, heir)
        self._removals.append(
            Removal(self._space, namespace.id, b"", reason=MissReason.EPOCH_BUMPED, told_in=heir)
        )  # fmt: skip

    def _end(self, slots: set[int]) -> int:
        """Leases in these namespaces; how many there were."""
        found = [
            lease
            for session in self._sessions.by_slot.values()
            for lease in session.leases.values()
            if self._slot(lease) in slots
        ]
        for session in {lease.session.slot: lease.session for lease in found}.values():
            self._loads.switched_off(session, self._refusal)
        for lease in found:
            if isinstance(lease, WriteLease) and lease.held:
                self._stores.expire(lease)
        self._drop_lent([lease for lease in found if isinstance(lease, ReadLease) and lease.pending is None])
        return len(found)

    def _slot(self, lease: Lease) -> int:
        """Of the namespace; all objects of a lease are of one."""
        entry = next((int(entry) for entry in lease.entries if entry != NO_ENTRY), NO_ENTRY)
        return self._space.rows.namespace[self._space.lent.row_of(entry)] if entry != NO_ENTRY else NO_ENTRY

    def _drop_lent(self, leases: list[ReadLease]) -> None:
        """Ends of paths first, so that each is dropped by itself: some 25 us an object."""
        space = self._space
        if not leases:
            return
        rows = np.unique(space.lent.rows[np.concatenate([lease.entries for lease in leases])])
        rows = rows[space.rows.states[rows] == COMMITTED]
        for row in rows[np.argsort(space.rows.boundaries[rows])[::-1]].tolist():
            node = space.node_of(row)
            if node != NONE:
                space.drop_row(node, space.rows.kind[row], MissReason.EPOCH_BUMPED)
