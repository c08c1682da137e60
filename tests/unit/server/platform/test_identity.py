"""Who a process is, and whose it is."""

from __future__ import annotations

import pytest
from kvdepot.server.platform.identity import Owner, ProcessIdentity

BOOT = bytes(16)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ProcessIdentity(7, 3, BOOT), ProcessIdentity(7, 3, BOOT), True),
        (ProcessIdentity(0, 3, BOOT), ProcessIdentity(0, 3, BOOT), True),  # the kernel's number, without a pid
        (ProcessIdentity(7, 3, BOOT), ProcessIdentity(8, 3, BOOT), False),
        (ProcessIdentity(7, 3, BOOT), ProcessIdentity(7, 4, BOOT), False),
        (ProcessIdentity(7, 3, BOOT), ProcessIdentity(7, 3, b"b" * 16), False),
        (ProcessIdentity(0, 0, BOOT), ProcessIdentity(0, 0, BOOT), False),
    ],
)
def test_processes_of_which_nothing_is_known_are_never_the_same(
    one: ProcessIdentity, other: ProcessIdentity, same: bool
) -> None:
    assert one.is_same(other) is same


def test_a_share_is_a_tenant_s_or_without_tenants_a_user_s() -> None:
    assert (Owner(1001).party, Owner(1001).party_name) == (1001, "uid 1001")
    assert (Owner(1001, tenant="a").party, Owner(1001, tenant="a").party_name) == ("a", "tenant 'a'")
