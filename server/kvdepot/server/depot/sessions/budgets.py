"""Budgets of RAM: how many bytes a party may have reserved, and be lent to read, at a time (ADR 67).

What is reserved or lent cannot be evicted, so a party with all of RAM would stop everybody else. A load that waits for
a lower tier holds what it will be lent. A party is a tenant or, without tenants, a user. Nothing is ever taken back
because of a budget: a call waits, or its objects are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, SESSIONS_MAX, LentMode
from kvdepot.core.limits import FRAGMENTS_PER_REPLY_MAX
from kvdepot.core.report import TenantStatus
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.sessions.session import ReadLease, Session, Wanted
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.sessions.shares import part, parts
from kvdepot.server.depot.tree.lent import SESSION_NUMBERS
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import DepotConfig

ALONE_SHARE: Final = 7 / 8
"""Of RAM, for a user and all others together: the rest is for the next one, and for who has less than its share."""
LEAST_SHARE: Final = 1 / 4
"""Of RAM, for a user among many."""
Call = Literal["stores", "loads"]
Numbers = npt.NDArray[np.int64]
_NONE: Final[Numbers] = np.empty(0, np.int64)
_NOTHING: Final = Wanted(_NONE, np.empty(0, np.uint8), _NONE, _NONE)
_KINDS: Final = 1 << 8
"""Kinds that a call can name: each is a byte."""
OVER_BUDGET: Final = "the engines of this user or tenant hold their share of RAM: end loads and stores first"


@dataclass(frozen=True, slots=True)
class Reservable:
    """How much more a session may have reserved, and what its party may hold at all."""

    size_bytes: int
    objects: int
    bound_bytes: int


@dataclass(slots=True)
class _Held:
    """Sessions with leases, and what they hold."""

    sessions: list[Session] = field(default_factory=list)
    write_loans: int = 0
    loans: int = 0
    """All loans, and those that they will have for what their loads wait for."""
    promised_bytes: int = 0
    """A bound of what they have reserved and wait for. An object that two loads wait for counts twice."""
    read_bytes_max: int = 0
    """A bound of what is lent to them to read. An object that is lent twice counts twice."""


class _Holders(NamedTuple):
    """What a party holds, and what all other parties do. Adopted sessions are nobody's yet."""

    own: _Held
    others: _Held


class Budgets:
    """The bounds of all parties. What they hold is read from sessions and the lent table: there is nothing to keep.

    Each call looks at all sessions once.
    """

    def __init__(self, sessions: Sessions, ram: RamTier, config: DepotConfig, counters: Counters) -> None:
        self._sessions = sessions
        self._ram = ram
        self._counters = counters
        self._reads, self._writes = ram.lent.reads.data, ram.lent.writes.data
        self._refusals: Counter[tuple[str, Call]] = Counter()  # by tenant
        self.configure(config)

    def configure(self, config: DepotConfig) -> None:
        self._config = config
        self._credits = {name: one.credit_bytes for name, one in config.tenants.items()}

    def refused(self, session: Session, call: Call) -> None:
        """Count an object that was not reserved, or a load, because the party holds its share."""
        self._counters.add(f"budget_refusals.{call}")
        if session.owner is not None and session.owner.tenant is not None:
            self._refusals[session.owner.tenant, call] += 1

    def tenants(self, namespaces: Iterable[Namespace]) -> tuple[TenantStatus, ...]:
        """Return what each configured tenant holds and may hold. `namespaces`: all."""
        used: Counter[str | None] = Counter()
        for namespace in namespaces:
            used[namespace.tenant] += self._ram.account.held_bytes(namespace.slot)
        sessions: dict[str, list[Session]] = {name: [] for name in self._config.tenants}
        for one in self._sessions.by_slot.values():
            if one.owner is not None and one.owner.tenant in sessions:
                sessions[one.owner.tenant].append(one)
        lent = self._lent_bytes(list(sessions.values()))
        credit_bytes = {name: self._tenant_bytes(name) for name in self._credits}
        sessions_max = parts(SESSIONS_MAX, {name: one.sessions for name, one in self._config.tenants.items()})
        return tuple(
            TenantStatus(
                name,
                used_bytes=used[name],
                credit_bytes=credit_bytes[name],
                credit_used_bytes=_reserved_bytes(own) + (self._read_bytes(own) if _await(own) else lent_bytes),
                sessions=len(own),
                sessions_max=sessions_max[name],
                refused_objects=self._refusals[name, "stores"],
                refused_loads=self._refusals[name, "loads"],
            )
            for (name, own), lent_bytes in zip(sessions.items(), lent, strict=True)
        )

    def _lent_bytes(self, parties: list[list[Session]]) -> list[int]:
        """Return what is lent to read to the sessions of each party, by one pass over the lent table."""
        lent = self._ram.lent
        party_of = np.full(SESSION_NUMBERS, len(parties), np.int64)  # the last one is of all others
        for party, sessions in enumerate(parties):
            party_of[[one.slot for one in sessions]] = party
        entries = np.flatnonzero(lent.modes == LentMode.READ)
        pairs = np.unique(party_of[lent.sessions[entries]] * self._ram.rows.count + lent.rows[entries])
        of, heads = np.divmod(pairs, self._ram.rows.count)
        return [int(one) for one in self._bytes_of(heads, of, len(parties) + 1)[:-1]]

    def reservable(self, session: Session, wanted_bytes: int) -> Reservable:
        """Return how much more the session may have reserved; the bytes not exactly if all that it wants fits.

        The objects are bounded too, because the tables of rows and loans are shared.
        """
        holders = self._holders(session)
        own, bound_bytes = holders.own, self._bound_bytes(session, holders)
        left, at_most = bound_bytes - own.promised_bytes, own.read_bytes_max
        if left - at_most < wanted_bytes and (at_most or _await(own.sessions)):
            left, at_most = bound_bytes - _reserved_bytes(own.sessions), self._read_bytes(own.sessions)
        rows = self._part(session, holders, bound_bytes, self._ram.rows.count) - own.write_loans
        objects = min(rows, self._loans_left(session, holders, bound_bytes))
        return Reservable(left - at_most, objects, bound_bytes)

    def may_lend(
        self, session: Session, namespace: Namespace, kinds: bytes, nodes: Numbers, rows: Numbers
    ) -> bool:  # fmt: skip
        """Return whether these objects may be lent too. NO_ROW: the object is not in RAM yet.

        A user that holds nothing while nobody else does may load what it likes: a later try would find no more room.
        A tenant may not, because its credit leaves the others theirs.
        """
        holders = self._holders(session)
        own = holders.own
        user = session.owner is not None and session.owner.tenant is None
        if user and not holders.others.sessions and not own.sessions:
            return True
        bound_bytes = self._bound_bytes(session, holders)
        if len(rows) > self._loans_left(session, holders, bound_bytes):
            return False
        sizes = np.zeros(_KINDS, np.int64)
        for kind, size_bytes in namespace.object_bytes.items():
            sizes[kind] = self._ram.rounded(size_bytes)
        kind_of = np.frombuffer(kinds, np.uint8)
        wanted = sizes[kind_of]
        if own.read_bytes_max + own.promised_bytes + int(wanted.sum()) <= bound_bytes:
            return True
        read_bytes = self._read_bytes(own.sessions, Wanted(nodes, kind_of, rows, wanted))
        return _reserved_bytes(own.sessions) + read_bytes <= bound_bytes

    def _holders(self, session: Session) -> _Holders:
        """Return who holds what, in one pass over the sessions: each call asks, and a node may have many."""
        party, own, others = session.party, _Held(), _Held()
        for one in self._sessions.by_slot.values():
            if not one.leases or one.party is None:
                continue
            held = own if one.party == party else others
            read_loans, write_loans = self._reads[one.slot], self._writes[one.slot]
            held.sessions.append(one)
            held.write_loans += write_loans
            held.loans += read_loans + write_loans + one.awaited_objects
            held.promised_bytes += one.credit_used_bytes + one.awaited_bytes
            held.read_bytes_max += read_loans * one.object_bytes_max
        return _Holders(own, others)

    def _bound_bytes(self, session: Session, holders: _Holders) -> int:
        """Return what the party of a session may hold."""
        data_bytes, others = self._ram.data_bytes, holders.others
        if session.owner is not None and session.owner.tenant is not None:
            return self._tenant_bytes(session.owner.tenant)
        if others.sessions:
            return _user_part(data_bytes, others.sessions, others.promised_bytes + others.read_bytes_max)
        return max(int(data_bytes * ALONE_SHARE), self._config.credit_bytes)

    def _tenant_bytes(self, tenant: str) -> int:
        """Return what a tenant may hold: its credit within its part of RAM, or its share of the only one."""
        room = self._ram.rooms.of_tenant(tenant)
        if room is None:
            return part(self._ram.data_bytes, self._credits, tenant)
        credit_bytes = self._credits.get(tenant)
        return room.size_bytes if credit_bytes is None else min(credit_bytes, room.size_bytes)

    def _part(self, session: Session, holders: _Holders, bound_bytes: int, table: int) -> int:
        """Return what the party of a session may have of a table: of rows, or of loans."""
        others = holders.others
        if others.sessions and session.owner is not None and session.owner.tenant is None:
            return _user_part(table, others.sessions, others.loans)
        return int(table * min(bound_bytes / self._ram.data_bytes, 1.0))

    def _loans_left(self, session: Session, holders: _Holders, bound_bytes: int) -> int:
        return self._part(session, holders, bound_bytes, self._ram.lent.count) - holders.own.loans

    def _read_bytes(self, own: list[Session], *more: Wanted) -> int:
        """Return what is lent to these to read, what their loads wait for, and what is wanted too: each object once.

        O(the number of all these).
        """
        there = [one.rows[one.rows != NO_ROW] for one in more]
        heads = np.unique(np.concatenate([self._lent_heads(own), *there]))
        leases = [lease for one in own if one.awaited_objects for lease in one.leases.values()]
        loads = [lease for lease in leases if isinstance(lease, ReadLease) and lease.pending is not None]
        columns = zip(_NOTHING, *more, *(load.pending.awaited for load in loads), strict=True)
        nodes, kinds, rows, sizes = map(np.concatenate, columns)
        fresh = ~np.isin(rows, heads)
        _, first = np.unique(nodes[fresh] << 8 | kinds[fresh], return_index=True)
        return self._bytes(heads) + int(sizes[fresh][first].sum())

    def _lent_heads(self, own: list[Session]) -> npt.NDArray[np.int64]:
        """Return the head rows of what is lent to them to read, each once. O(what is lent to them)."""
        leases = [lease for one in own for lease in one.leases.values() if isinstance(lease, ReadLease)]
        entries = np.concatenate([np.empty(0, np.uint32), *(lease.entries for lease in leases)])
        return np.unique(self._ram.lent.rows[entries]).astype(np.int64)

    def _bytes(self, heads: npt.NDArray[np.int64]) -> int:
        """Return what objects take of RAM. O(their rows)."""
        return int(self._bytes_of(heads, np.zeros(len(heads), np.int64), 1)[0])

    def _bytes_of(
        self, heads: npt.NDArray[np.int64], of: npt.NDArray[np.int64], parties: int
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """Return what the objects of each party take of RAM. `of`: the party of each head.

        Damaged links may lead round in a circle: no object that is lent has more rows than a reply names.
        """
        rows, granule, granules = heads, self._ram.rooms.granule_bytes, np.zeros(parties, np.int64)
        for _ in range(FRAGMENTS_PER_REPLY_MAX):
            np.add.at(granules, of, -(-self._ram.rows.lengths[rows].astype(np.int64) // granule))
            rows = self._ram.rows.nexts[rows].astype(np.int64)
            of, rows = of[rows < self._ram.rows.count], rows[rows < self._ram.rows.count]
            if not len(rows):
                break
        return granules * granule


def _user_part(total: int, others: list[Session], used: int) -> int:
    """Return what a user may have of a total: its fair share, and what others leave unused of `ALONE_SHARE`."""
    users = 1 + len({one.party for one in others})
    return max(int(total * max(1 / users, LEAST_SHARE)), int(total * ALONE_SHARE) - used)


def _reserved_bytes(sessions: list[Session]) -> int:
    return sum(one.credit_used_bytes for one in sessions)


def _await(sessions: list[Session]) -> bool:
    """Return whether a load of these waits for room."""
    return any(one.awaited_objects for one in sessions)
