"""[[tenant]]: who is in which tenant, by what the kernel says of a process (S2)."""

from __future__ import annotations

import grp
import os
import pwd

import pytest
from kvdepot.core.errors import ConfigError, PermissionDenied
from kvdepot.server.config.schema import TenantTable
from kvdepot.server.config.tenants import NO_TENANTS, Tenants, resolve_tenants

A = TenantTable(name="a", users=["1001"], groups=["2001"])
B = TenantTable(name="b", users=["1002"], groups=["2002", "2003"])
TENANTS = resolve_tenants("f", [A, B])


def refused(tenants: Tenants, uid: int, *groups: int) -> str:
    with pytest.raises(PermissionDenied) as refusal:
        tenants.of(uid, groups)
    return str(refusal.value)


def test_without_tenants_nobody_is_in_one() -> None:
    assert NO_TENANTS.of(0, ()) is None and resolve_tenants("f", []).of(1001, (2001,)) is None


@pytest.mark.requirement("S2")
@pytest.mark.parametrize(
    ("uid", "groups", "tenant"),
    [(1001, (), "a"), (1002, (7,), "b"), (7, (2001,), "a"), (7, (7, 2003), "b"), (7, (2002, 2003), "b")],
)
def test_a_process_is_in_the_tenant_of_its_user_or_its_groups(uid: int, groups: tuple[int, ...], tenant: str) -> None:
    assert TENANTS.of(uid, groups) == tenant


@pytest.mark.requirement("S2")
def test_a_user_that_is_named_stays_in_its_tenant_whatever_its_groups_are() -> None:
    assert TENANTS.of(1001, (2002, 2003)) == "a"


@pytest.mark.requirement("S2")
@pytest.mark.parametrize("uid", [0, 7, os.geteuid()])
def test_nobody_is_in_a_tenant_by_default(uid: int) -> None:
    """Not even root, and not the daemon's user."""
    assert f"uid {uid} is in no tenant" in refused(TENANTS, uid, 7)


@pytest.mark.requirement("S2")
def test_groups_of_two_tenants_are_refused_by_name() -> None:
    assert "uid 7 is in groups of several tenants: a, b" in refused(TENANTS, 7, 2001, 2003)


def test_names_of_this_host_and_unknown_names() -> None:
    me, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    found = resolve_tenants("f", [TenantTable(name="a", users=[me, "no-such-user"], groups=[group, "no-such-group"])])
    assert found.users == {os.geteuid(): "a"} and found.groups == {os.getegid(): "a"}
    assert found.unknown == ("no-such-user", "no-such-group")


@pytest.mark.requirement("S2")
@pytest.mark.parametrize(
    ("other", "key", "reason"),
    [
        (TenantTable(name="a", users=["1"]), "tenant[1].name", "two tenants have the name 'a'"),
        (TenantTable(name="b", users=["1001"]), "tenant[1].users", "'1001' is in tenant 'a' already"),
        (TenantTable(name="b", users=["01001"]), "tenant[1].users", "'01001' is in tenant 'a' already"),
        (TenantTable(name="b", groups=["2001"]), "tenant[1].groups", "'2001' is in tenant 'a' already"),
    ],
)
def test_two_tenants_share_neither_name_nor_member(other: TenantTable, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_tenants("f", [A, other])
    assert (refusal.value.key, refusal.value.reason) == (key, reason)
