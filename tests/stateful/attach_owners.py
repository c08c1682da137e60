"""Who owns what, as the world knows it of its own accord: owners share no session, and parties keep to their shares.

An owner is (uid, PID namespace, tenant). A party is a tenant or, without tenants, a user (ADR 65, ADR 67).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final
from unittest import mock

from kvdepot.core.calls import LocateCall
from kvdepot.core.errors import PermissionDenied, UnknownNamespace
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.attach import attach
from kvdepot.server.config.tenants import NO_TENANTS, Tenants
from kvdepot.server.depot.sessions import shares
from kvdepot.server.depot.sessions.session import Session, engine_digest
from kvdepot.server.depot.sessions.shares import share_of
from kvdepot.server.depot.types import Owner, TenantBudget

from tests.fakes.process_kernel import FakeKernel, FakeProcess, Identity
from tests.rigs.engine_rig import DENSE, Client, Rig

IDENTITIES: Final = (
    Identity(1001, 1, 0), Identity(1001, 1, 7), Identity(1002, 2, 0), Identity(1002, 3, 0), Identity(1003, 2, 0),
)  # fmt: skip
"""Two users in one PID namespace, one of them in a second one too; groups of one user that are of two tenants."""
STREAMS_MAX: Final = 4
"""Proxies of one user."""
_SESSIONS: Final = 2
_ATTACHMENTS: Final = 3
_TENANTS: Final = Tenants(users={1001: "a"}, groups={2: "b", 3: "c"}, configured=True)


@dataclass(frozen=True, slots=True)
class Parties:
    """How engines are divided. `tight`: into shares so small that a few engines fill them."""

    tenants: bool = False
    tight: bool = False

    @property
    def of(self) -> Tenants:
        return _TENANTS if self.tenants else NO_TENANTS

    @property
    def budgets(self) -> Mapping[str, TenantBudget]:
        budget = TenantBudget(sessions=_SESSIONS) if self.tight else TenantBudget()
        return dict.fromkeys(("a", "b", "c"), budget) if self.tenants else {}

    @property
    def data_pages(self) -> int:
        return 24 if self.tight else 96

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Groups are those of `Identity` alone, and not those of the process that runs this."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(attach, "groups_of", lambda _: ()))
            if self.tight:
                user = replace(shares.USER, sessions=_SESSIONS, attachments=_ATTACHMENTS)
                stack.enter_context(mock.patch.object(shares, "USER", user))
                parts = len(self.budgets) or 1
                stack.enter_context(mock.patch.object(shares, "ATTACHMENTS_MAX", _ATTACHMENTS * parts))
            yield


class Owners:
    """What each slot's process is, and what each session has been given to in this run."""

    def __init__(self, kernel: FakeKernel, parties: Parties) -> None:
        self._kernel = kernel
        self._parties = parties
        self._of_slot: dict[int, Owner] = {}
        self._joined: dict[Session, set[Owner]] = {}  # since the daemon started
        self._adopted: set[Session] = set()

    def of(self, process: FakeProcess) -> Owner:
        identity = process.identity
        tenant = self._parties.of.of(identity.uid, (identity.gid,))
        return Owner(identity.uid, self._kernel.shown_namespace(process), tenant)

    def engine(self, process: FakeProcess, engine_id: str) -> bytes:
        return engine_digest(engine_id, self.of(process))

    def spec(self, process: FakeProcess) -> NamespaceSpec:
        return _spec(self.of(process).tenant)

    def attached(self, slot: int, process: FakeProcess, session: Session) -> None:
        self._of_slot[slot] = self.of(process)
        self._joined.setdefault(session, set()).add(self.of(process))

    def restarted(self, rig: Rig) -> None:
        self._joined.clear()
        self._adopted = set(rig.depot._sessions.by_slot.values())

    def check(self, rig: Rig) -> None:
        attachments = rig.depot._sessions.attachments
        self._of_slot = {slot: owner for slot, owner in self._of_slot.items() if slot in attachments}
        sessions = [one for one in rig.depot._sessions.by_slot.values() if not one.worker]
        for session in sessions:
            owners = {self._of_slot[slot] for slot in session.attachments}
            assert len(owners) <= 1, "two owners have one session"
            joined = self._joined.get(session, set())
            assert len({one.tenant for one in joined}) <= 1, "two tenants have one session"
            counted = session.owner in joined if joined else session.owner is None
            assert counted, "it counts for somebody else"
        for own in self._by_party(sessions).values():
            self._check_shares([one for one in own if one not in self._adopted])  # these come back all the same

    def _by_party(self, sessions: list[Session]) -> dict[int | str, list[Session]]:
        found: dict[int | str, list[Session]] = {}
        for session in sessions:
            for party in {one.party for one in self._joined.get(session, ())}:
                found.setdefault(party, []).append(session)
        return found

    def _check_shares(self, own: list[Session]) -> None:
        if not own:
            return
        owner = next(iter(self._joined[own[0]]))
        share = share_of(owner, self._parties.budgets)
        assert len(own) <= share.sessions, f"{owner.party_name} has more sessions than its share"
        attachments = sum(len(one.attachments) for one in own)
        assert attachments <= share.attachments, f"{owner.party_name} has more attachments than its share"

    # Refusals

    def check_refusal(self, rig: Rig, process: FakeProcess, engine_id: str, error: str) -> bool:
        """Return whether it is the refusal of a party that has its share, or of a process of maybe another tenant."""
        owner, sessions = self.of(process), rig.depot._sessions
        if "is not known until" in error:
            engine = self.engine(process, engine_id)
            adopted = [one for one in self._adopted if one.engine == engine and one not in self._joined]
            assert self._parties.tenants and adopted, "its own engine"
            return True
        if "in another tenant" in error:
            engine = self.engine(process, engine_id)
            joined = [self._joined.get(one, set()) for one in sessions.by_slot.values() if one.engine == engine]
            assert any(other.tenant != owner.tenant for others in joined for other in others), "its own engine"
            return True
        if not error.startswith((f"sessions of {owner.party_name}:", f"attachments of {owner.party_name}:")):
            return False
        own = self._by_party(list(sessions.by_slot.values())).get(owner.party, [])
        share = share_of(owner, self._parties.budgets)
        full = sum(len(one.attachments) for one in own) >= share.attachments
        assert full or len(own) >= share.sessions, "it has not got its share"
        assert all(one.connected or one.leases for one in own), "one of its sessions could go"
        return True

    def has_its_proxies(self, process: FakeProcess, running: list[Owner]) -> bool:
        """Return whether its user has its share of proxies, or its tenant an equal part of those of four users."""
        owner, parts = self.of(process), len(self._parties.budgets)
        of_tenant = sum(one.tenant == owner.tenant for one in running)
        full = bool(parts) and of_tenant >= 4 * STREAMS_MAX // parts
        return full or sum(one.uid == owner.uid for one in running) >= STREAMS_MAX

    # Others' namespaces

    def check_apart(self, rig: Rig, client: Client, process: FakeProcess) -> None:
        """An engine names every namespace of other tenants, by spec and by id: neither leads anywhere."""
        tenant = self.of(process).tenant
        for other in self._parties.budgets.keys() - {tenant}:
            spec = _spec(other)
            _refused(PermissionDenied, lambda spec=spec: rig.depot.register_namespace(client.session, spec))  # type: ignore[misc]
            call = LocateCall(client.session, spec.namespace_id(), bytes(16), 1 << 20, "request")
            _refused(UnknownNamespace, lambda call=call: rig.depot.locate(call, lambda _: None))  # type: ignore[misc]

    # Budgets of RAM

    def check_budget(self, rig: Rig, session: Session) -> None:
        """After a reservation: what its party has reserved is within its bound, read in ADR 67."""
        sessions = [one for one in rig.depot._sessions.by_slot.values() if not one.worker]
        owner = session.owner
        assert owner is not None
        total = rig.layout.data_bytes
        own = sum(one.credit_used_bytes for one in sessions if one.owner and one.party == owner.party)
        others = [one for one in sessions if one.leases and one.owner and one.party != owner.party]
        if owner.tenant is not None:
            bound = total // len(self._parties.budgets)
        elif others:
            users = 1 + len({one.party for one in others})
            used = sum(one.credit_used_bytes for one in others)
            bound = max(int(total * max(1 / users, 1 / 4)), int(total * 7 / 8) - used)
        else:
            bound = max(int(total * 7 / 8), rig.config.credit_bytes)
        assert own <= bound, f"{owner.party_name} has reserved {own} of {bound} bytes"


def _spec(tenant: str | None) -> NamespaceSpec:
    return replace(DENSE, tenant=tenant or "")


def _refused(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError("it reaches another tenant's namespace")
