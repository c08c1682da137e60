"""Invalidate what engines have stored: an operator's bump of the epoch (docs/adr/0036).

An invalid namespace cannot be registered, so nobody asks for what it has, in any tier and any run. This module also
ends what was asked for before, and frees the room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import StaleEpoch
from kvdepot.core.keys import NamespaceSpec, bumped_id
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.loads.load import Loads
from kvdepot.server.depot.operators.deletion import Deletion
from kvdepot.server.depot.sessions.session import NO_ENTRY, Lease, ReadLease, WriteLease
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.stores.store import Stores
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.switches import Switches
from kvdepot.server.depot.tree.tree import Tree

_COUNTERS_TRIED_MAX: Final = 2048
"""From 0 on, and below the present one: 3 ms. Only a bump to a number far above leaves more between."""


@dataclass(frozen=True, slots=True)
class Invalidated:
    """What a bump invalidated."""

    namespaces: int = 0
    chunks: int = 0
    leases: int = 0  # of loads and stores in progress


class Invalidation:
    """The invalidation of namespaces. `epochs` are the epochs that engines have to use.

    `inherited` is told of each namespace to which switches have gone over when an engine registered it.
    """

    def __init__(
        self,
        tree: Tree,
        ram: RamTier,
        sessions: Sessions,
        stores: Stores,
        loads: Loads,
        prefetch: Prefetch,
        switches: Switches,
    ) -> None:
        self.epochs = Epochs()
        self.inherited: Callable[[bytes], None] = lambda _: None
        self._tree = tree
        self._ram = ram
        self._namespaces = tree.namespaces
        self._counters = tree.counters
        self._rows = ram.rows
        self._lent = ram.lent
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._prefetch = prefetch
        self._switches = switches
        self._deletions: deque[Deletion] = deque()

    def check(self, spec: NamespaceSpec) -> None:
        """Raise StaleEpoch for a namespace that is invalid, or whose turn has not come."""
        bumps = self.epochs.counter(spec.base_id())
        if spec.bumps != bumps:
            self._counters.add("stale_registrations")
            raise StaleEpoch(bumps)

    def inherit(self, spec: NamespaceSpec) -> None:
        """Switch off for this namespace what is still off for it under an earlier counter.

        A bump moves the switches itself where an engine has registered the namespace in this run: only then is known
        which one follows.
        """
        if not spec.bumps or not self._switches.by_name:
            return
        base_id, namespace_id = spec.base_id(), spec.namespace_id()
        first = min(spec.bumps, _COUNTERS_TRIED_MAX)
        tried = chain(range(first), range(max(first, spec.bumps - _COUNTERS_TRIED_MAX), spec.bumps))
        found = [self._switches.inherit(bumped_id(base_id, one), namespace_id) for one in tried]
        if any(found):
            self.inherited(namespace_id)

    def covers(self, namespace_id: bytes) -> bool:
        """Return whether the namespace is known to be invalid: by its own id before an engine registers it."""
        namespace = self._namespaces.by_id.get(namespace_id)
        return namespace_id in self.epochs.invalidated_namespaces or (namespace is not None and namespace.invalid)

    def is_valid(self, namespace: Namespace) -> bool:
        """Return whether no bump has invalidated a namespace.

        Of one that no engine has registered in this run, only the id is known, and not its counter. A disk may bring it
        back after a bump of all.
        """
        if namespace.base_id is not None:
            return not namespace.invalid
        return not (namespace.invalid or self.epochs.bump or namespace.id in self.epochs.invalidated_namespaces)

    def adopted(self) -> None:
        """Delete what an earlier run has made invalid and not deleted. `epochs` are those of that run."""
        for namespace in self._namespaces.by_slot.values():
            if namespace.id in self.epochs.invalidated_namespaces:
                self._leave(namespace)

    def begin(self, epochs: Epochs) -> Invalidated:
        """Invalidate namespaces by new epochs. Nothing of them is granted any more, and nothing in progress succeeds.

        This holds when this returns. Loads: what is copied has another generation from now on, so ranks report failure.
        What is copied stays lent. Stores: their leases expire. `tick` drops the rest of the namespaces. No lookup
        finds the rest meanwhile.
        """
        before, self.epochs = self.epochs, epochs
        raised = epochs.bump > before.bump
        namespaces = self._namespaces.by_slot.values()
        for one in namespaces:
            if one.invalid and one.base_id is not None:  # nobody has registered yet what follows it
                former, heir = (bumped_id(one.base_id, by.counter(one.base_id)) for by in (before, epochs))
                self._switches.inherit(former, heir)
        gone = [one for one in namespaces if not one.invalid and self._becomes_invalid(one, raised=raised)]
        chunks = sum(one.nodes for one in gone)
        for namespace in gone:
            self._leave(namespace)
        leases = self._end({one.slot for one in gone}) if gone else 0
        self._prefetch.end_namespaces(self._refusal)
        return Invalidated(len(gone), chunks, leases)

    def tick(self) -> None:
        """Delete a slice of what is invalid."""
        if self._deletions and not self._deletions[0].run_once():
            self._deletions.popleft()

    def _becomes_invalid(self, namespace: Namespace, *, raised: bool) -> bool:
        if namespace.base_id is None:  # nobody has registered it in this run
            return raised or namespace.id in self.epochs.invalidated_namespaces
        return self.epochs.counter(namespace.base_id) != namespace.bumps

    def _refusal(self, namespace_id: bytes) -> MissReason | None:
        return MissReason.EPOCH_BUMPED if self.covers(namespace_id) else None

    def _leave(self, namespace: Namespace) -> None:
        """Take the namespace from all sessions. Who asks for its keys next gets the reason."""
        namespace.invalid = True
        for session in self._sessions.by_slot.values():
            if session.namespaces.pop(namespace.id, None) is not None:
                namespace.sessions -= 1
        heir = namespace.id
        if namespace.base_id is not None:
            heir = bumped_id(namespace.base_id, self.epochs.counter(namespace.base_id))
            self._switches.inherit(namespace.id, heir)
        self._deletions.append(
            Deletion(self._tree, namespace.id, b"", reason=MissReason.EPOCH_BUMPED, told_in=heir)
        )  # fmt: skip

    def _end(self, slots: set[int]) -> int:
        """End the leases in these namespaces. Return their number."""
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
        """Return the slot of the namespace. All objects of a lease are of one."""
        entry = next((int(entry) for entry in lease.entries if entry != NO_ENTRY), NO_ENTRY)
        return self._rows.namespace[self._lent.row_of(entry)] if entry != NO_ENTRY else NO_ENTRY

    def _drop_lent(self, leases: list[ReadLease]) -> None:
        """Drop the ends of paths first, so that each object is dropped alone: 25 us an object."""
        if not leases:
            return
        rows = np.unique(self._lent.rows[np.concatenate([lease.entries for lease in leases])])
        rows = rows[self._rows.states[rows] == COMMITTED]
        for row in rows[np.argsort(self._rows.boundaries[rows])[::-1]].tolist():
            node = self._ram.node_of(row)
            if node != NONE:
                self._tree.drop_row(node, self._rows.kind[row], MissReason.EPOCH_BUMPED)
            elif self._ram.detached.flags[row]:
                self._ram.drop_detached(row)
