"""What operators see of tiers below RAM: metrics with their labels, rows of `kvdepotctl status` (P10)."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from kvdepot.client.ctl.as_json import to_json
from kvdepot.client.ctl.printer import print_status
from kvdepot.core.report import DaemonStatus, QuotaOwnerStatus, QuotaStatus, TierStatus
from kvdepot.server.observe.metrics import exposition
from rich.console import Console

RAM = TierStatus("ram", "ram", 1 << 30, state="ready")
NVME = TierStatus(
    "nvme", "disk", 1 << 40, used_bytes=5 << 30, objects=7, state="read-only", reason="no space", breaker="open",
    queued_objects=3, queued_bytes=3 << 20, written_today_bytes=9 << 30, quarantined_bytes=1 << 20,
)  # fmt: skip
QUOTAS = (
    QuotaStatus("*", "", "ram", 8 << 30, 70, (
        QuotaOwnerStatus("a", "", 3 << 30, 4, 5), QuotaOwnerStatus(None, "", 1 << 30),
    ), 6, 7),
    QuotaStatus("b", "no such", "nvme", 1 << 40),
)  # fmt: skip
COUNTERS = {
    "acquires.granted": 4.0,
    "locates": 5.0,
    "tier_reads.nvme/ok": 2.0,
    "tier_reads.sata/io_error": 1.0,
    "tier_written_bytes.nvme/": 99.0,
    "tier_hit_bytes.nvme/": 36.0,
}


def status(*tiers: TierStatus) -> DaemonStatus:
    return DaemonStatus("1", 1, 1.0, ready=True, reason="", arena_id=1, run=1, tiers=tiers, counters=COUNTERS)


@pytest.mark.requirement("P10")
def test_counters_of_tiers_have_the_tier_as_a_label() -> None:
    lines = exposition(lambda: status(RAM, NVME))().decode().splitlines()
    assert 'kvdepot_tier_reads_total{outcome="ok",tier="nvme"} 2.0' in lines
    assert 'kvdepot_tier_reads_total{outcome="io_error",tier="sata"} 1.0' in lines
    assert 'kvdepot_tier_written_bytes_total{tier="nvme"} 99.0' in lines
    assert 'kvdepot_tier_hit_bytes_total{tier="nvme"} 36.0' in lines
    assert 'kvdepot_acquires_total{outcome="granted"} 4.0' in lines
    assert "kvdepot_locates_total 5.0" in lines


@pytest.mark.requirement("T5")
def test_gauges_say_that_a_tier_is_degraded_and_its_path_out_of_use() -> None:
    lines = exposition(lambda: status(RAM, NVME))().decode().splitlines()
    assert 'kvdepot_tier_degraded{tier="nvme"} 1.0' in lines
    assert 'kvdepot_tier_degraded{tier="ram"} 0.0' in lines
    assert 'kvdepot_tier_breaker_open{tier="nvme"} 1.0' in lines
    assert 'kvdepot_tier_queued_objects{tier="nvme"} 3.0' in lines


@pytest.mark.requirement("P10")
def test_only_disks_have_a_target_of_writes() -> None:
    disk, shared = replace(NVME, write_target_bytes=8 << 30), replace(NVME, name="pool", kind="shared")
    lines = exposition(lambda: status(RAM, disk, shared))().decode().splitlines()
    targets = [line for line in lines if line.startswith("kvdepot_tier_write_target_bytes{")]
    assert targets == ['kvdepot_tier_write_target_bytes{tier="nvme"} 8.589934592e+09']


@pytest.mark.requirement("T3")
def test_status_and_metrics_say_which_node_is_the_janitor() -> None:
    pool = TierStatus("pool", "shared", 1 << 40, state="ready", breaker="closed", node="n1", janitor="n1")
    for tier, role, gauge in ((pool, "janitor", "1.0"), (replace(pool, janitor="n2"), "node", "0.0")):
        out = StringIO()
        print_status(status(RAM, tier), Console(file=out, width=200), counters=False)
        (row,) = [line for line in out.getvalue().splitlines() if "pool" in line and "closed" in line]
        assert role in row.split()
        lines = exposition(lambda tier=tier: status(tier))().decode().splitlines()  # type: ignore[misc]
        assert f'kvdepot_tier_janitor{{tier="pool"}} {gauge}' in lines
        assert to_json(status(tier))["tiers"][0]["node"] == "n1"


def test_status_shows_what_only_media_have() -> None:
    out = StringIO()
    print_status(status(RAM, NVME), Console(file=out, width=200), counters=False)
    assert "read-only (no space)" in out.getvalue()
    (row,) = [line for line in out.getvalue().splitlines() if "nvme" in line and "open" in line]
    assert all(text in row for text in ("3.00 MiB", "9.00 GiB", "1.00 MiB"))
    assert to_json(status(NVME))["tiers"][0]["queued_objects"] == 3


def test_status_shows_what_a_hit_costs_the_drive() -> None:
    out = StringIO()
    print_status(status(RAM, NVME, replace(NVME, name="idle")), Console(file=out, width=200), counters=False)
    header, _, nvme, idle = out.getvalue().partition("\nmedia")[2].splitlines()[1:5]
    place = slice(header.index("written per hit byte"), header.index("quarantined"))
    costs = {row.split()[0]: row[place].strip() for row in (nvme, idle)}
    assert costs == {"nvme": "2.75", "idle": ""}, "nothing is said of a tier that has supplied nothing"


def test_without_such_tiers_there_is_no_such_table() -> None:
    out = StringIO()
    print_status(status(RAM), Console(file=out, width=200), counters=False)
    assert "breaker" not in out.getvalue()


@pytest.mark.requirement("T8")
def test_metrics_have_one_of_each_a_quota_however_many_owners_it_has() -> None:
    lines = exposition(lambda: replace(status(RAM), quotas=QUOTAS))().decode().splitlines()
    every, one = '{namespace="",tenant="*",tier="ram"}', '{namespace="no such",tenant="b",tier="nvme"}'
    for name, *values in (
        ("capacity_bytes", 8 << 30, 1 << 40), ("owners", 70, 0), ("used_bytes", 3 << 30, 0),
        ("refused_objects_total", 6, 0), ("evicted_objects_total", 7, 0),
    ):  # fmt: skip
        found = [line.rpartition(" ") for line in lines if line.startswith(f"kvdepot_quota_{name}{{")]
        assert [(text, float(value)) for text, _, value in found] == [
            (f"kvdepot_quota_{name}{every}", values[0]), (f"kvdepot_quota_{name}{one}", values[1]),
        ]  # fmt: skip


@pytest.mark.requirement("T8")
def test_status_shows_whom_each_quota_is_about() -> None:
    out = StringIO()
    print_status(replace(status(RAM), quotas=QUOTAS), Console(file=out, width=200), counters=False)
    rows = [re.split(r" {2,}", line.strip()) for line in out.getvalue().splitlines() if "iB" in line]
    assert ["a", "(total)", "ram", "3.00 GiB", "8.00 GiB", "4", "5"] in rows
    assert ["(unknown)", "(total)", "ram", "1.00 GiB", "8.00 GiB", "0", "0"] in rows
    assert ["*", "(total)", "ram", "68 more", "8.00 GiB", "6", "7"] in rows
    assert ["b", "no such", "nvme", "nobody", "1.00 TiB", "0", "0"] in rows
    owner = to_json(replace(status(RAM), quotas=QUOTAS))["quotas"][0]["owners"][1]
    assert (owner["tenant"], owner["used_bytes"]) == (None, 1 << 30)


@pytest.mark.requirement("T8")
def test_without_quotas_there_is_no_such_table() -> None:
    out = StringIO()
    print_status(status(RAM), Console(file=out, width=200), counters=False)
    assert "quotas" not in out.getvalue()
