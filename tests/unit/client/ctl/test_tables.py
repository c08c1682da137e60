"""Tables of kvdepotctl on terminals of every width: each id is in one line, to be copied."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from kvdepot.client.ctl.listings import print_namespaces
from kvdepot.client.ctl.printer import print_status
from kvdepot.core.kinds import Kind
from kvdepot.core.listing import NamespaceContents, NamespacePage
from kvdepot.core.report import (
    DaemonStatus,
    NamespaceStatus,
    PinStatus,
    QuotaOwnerStatus,
    QuotaStatus,
    SessionStatus,
    SwitchesStatus,
    TierStatus,
)
from rich.console import Console

ENGINE = "kvdepot-0f8fad5b-d9cb-469f-a165-70867728950e-dp12"
NAMESPACE, KEY = bytes(range(16)), bytes(range(16, 32))
TIER = "a-tier-with-a-name-of-32-letters"
TENANT = "tenant-4a7d1ed414474e4033ac29ccb8653d9b"
STATUS = DaemonStatus(
    "1.0", 1, 1.0, ready=True, reason="", arena_id=1, run=1,
    tiers=(TierStatus("ram", "ram", 1 << 30), TierStatus(TIER, "disk", 1 << 40, reason="no space left on the device")),
    sessions=(SessionStatus(ENGINE, 8, 8, scheduler_attached=True, pids=tuple(range(3_000_000, 3_000_008))),),
    namespaces=(
        NamespaceStatus(
            NAMESPACE, "a label of several words", TENANT, "epoch", 256, {Kind.ATTENTION: 10**9}, 1 << 40
        ),
    ),
    quotas=(QuotaStatus("*", "", TIER, 1 << 40, 1, (QuotaOwnerStatus(TENANT, NAMESPACE.hex(), 1 << 40),)),),
    pins=(PinStatus(NAMESPACE, KEY, 60.0),),
    switches=SwitchesStatus(loads_off_namespaces=tuple(bytes([one]) * 16 for one in range(20))),
)  # fmt: skip


def printed(width: int, status: DaemonStatus = STATUS) -> list[str]:
    out = StringIO()
    print_status(status, Console(file=out, width=width), counters=True)
    print_namespaces(
        NamespacePage((NamespaceContents(NAMESPACE, "label", TENANT, chunks=1),), ""),
        Console(file=out, width=width),
    )
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 80, 100, 120, 250])
def test_ids_are_whole_on_a_terminal_of_any_width(width: int) -> None:
    lines = printed(width)
    ids = [ENGINE, TIER, TENANT, NAMESPACE.hex()[:12], KEY.hex()[:12], *map(str, STATUS.sessions[0].pids)]
    ids += [one.hex()[:12] for one in STATUS.switches.loads_off_namespaces]
    assert [one for one in ids if not any(one in line for line in lines)] == []


def test_a_table_is_no_wider_than_its_ids_need() -> None:
    short = replace(STATUS, sessions=(), quotas=(), pins=(), switches=SwitchesStatus())
    short = replace(short, tiers=STATUS.tiers[:1], namespaces=(replace(STATUS.namespaces[0], tenant="t"),))
    assert max(len(line) for line in printed(80, short) if "tenant-" not in line) <= 100
