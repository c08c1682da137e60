"""Shares of tables: no tenant and no user fills what all engines use (S4, I4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvdepot.core.arena import NAMESPACES_MAX
from kvdepot.core.errors import LimitExceeded, NoRoom
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.depot.sessions import shares as shares_module
from kvdepot.server.depot.sessions.shares import share_of
from kvdepot.server.depot.tree import namespaces as namespaces_module
from kvdepot.server.depot.types import Membership, Owner, TenantBudget

from tests.rigs.engine_rig import DENSE, Client, Rig, audit, path, process

TWO = {"a": TenantBudget(), "b": TenantBudget()}


def spec(name: int | str, tenant: str = "") -> NamespaceSpec:
    return replace(DENSE, identity={"model": f'"{name}"'}, tenant=tenant)


def taken(take: Callable[[int], object], most: int) -> tuple[int, str]:
    """Return how often it went well, and the refusal."""
    for number in range(most):
        try:
            take(number)
        except (LimitExceeded, NoRoom) as refusal:
            return number, str(refusal)
    return most, ""


@pytest.mark.requirement("S4")
@pytest.mark.parametrize(
    ("tenants", "sessions"),
    [
        ({"a": None}, 1024),
        ({"a": None, "b": None}, 512),
        ({"a": 24, "b": None, "c": None}, 24),
        ({"a": None, "b": 24, "c": None}, 500),
    ],
)
def test_the_sessions_of_a_tenant_are_its_own_or_an_equal_part(tenants: dict[str, int | None], sessions: int) -> None:
    budgets = {name: TenantBudget(sessions=count) for name, count in tenants.items()}
    share = share_of(Owner(1, tenant="a"), budgets)
    assert (share.sessions, share.attachments) == (sessions, 8192 // len(tenants))
    assert (share.namespaces, share.spec_bytes) == (1024 // len(tenants), (32 << 20) // len(tenants))


@pytest.mark.requirement("S4")
def test_users_of_one_tenant_share_its_sessions() -> None:
    rig = Rig(tenants={"a": TenantBudget(sessions=3), "b": TenantBudget()})

    def attach(number: int, tenant: str = "a") -> None:
        owner = Owner(1000 + number, tenant=tenant)
        rig.depot.attach(
            process(10 + number), Membership(f"e{number}", scheduler=True, rank=0, world_size=1, owner=owner)
        )

    assert taken(attach, 9)[0] == 3
    with pytest.raises(LimitExceeded, match="sessions of tenant 'a': 4 is more than 3"):
        attach(3)
    attach(4, "b")
    audit(rig.depot)


@pytest.mark.requirement("S4", "I4")
@pytest.mark.parametrize(("tenant", "whose"), [(None, "uid 1"), ("a", "tenant 'a'")])
def test_a_party_has_its_share_of_the_namespaces(
    monkeypatch: pytest.MonkeyPatch, tenant: str | None, whose: str
) -> None:
    """In a full table it takes the slot of an idle one of its own, and never one of others."""
    monkeypatch.setattr(shares_module, "USER", replace(shares_module.USER, namespaces=4))
    monkeypatch.setattr(shares_module, "NAMESPACES_MAX", 8)
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 5)
    rig = Rig(tenants={} if tenant is None else TWO)
    others = rig.attach("other", 20, spec=spec("other", (tenant and "b") or ""), owner=Owner(2, tenant=tenant and "b"))
    others.store(path("o", 2))
    rig.depot.process_dead(others.attachment)
    rig.now += 1.0
    hog, mine = Owner(1, tenant=tenant), tenant or ""
    first = rig.attach("first", 10, spec=spec("first", mine), owner=hog)
    first.store(path("f", 2))
    rig.depot.process_dead(first.attachment)
    client = rig.attach("hog", 11, spec=spec(0, mine), owner=hog)
    count, refusal = taken(lambda number: _register(rig, client, spec(number + 1, mine)), 20)
    assert count == 3 and refusal.startswith(f"{whose} has 4 namespaces in use")
    assert first.namespace not in rig.depot._tree.namespaces.by_id, "its own idle one has gone"
    assert others.namespace in rig.depot._tree.namespaces.by_id
    audit(rig.depot)


def test_a_user_may_use_half_of_all_namespaces() -> None:
    rig = Rig()
    clients = [rig.attach(f"e{number}", 10 + number, owner=Owner(1)) for number in range(9)]
    count, refusal = taken(lambda number: _register(rig, clients[number // 60], spec(number)), 530)
    assert count == NAMESPACES_MAX // 2 - 1 and refusal.startswith("uid 1 has 512 namespaces in use")
    rig.attach("other", 30, spec=spec("other"), owner=Owner(2))


def _register(rig: Rig, client: Client, one: NamespaceSpec) -> None:
    rig.depot.register_namespace(client.session, one)
