"""What operators see of tiers below RAM: metrics with their labels, rows of `kvdepotctl status` (P10)."""

from __future__ import annotations

from io import StringIO

from kvdepot.client.ctl.printer import print_status, status_record
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.server.metrics import exposition
from rich.console import Console

RAM = TierStatus("ram", "ram", 1 << 30, state="ready")
NVME = TierStatus(
    "nvme", "disk", 1 << 40, used_bytes=5 << 30, objects=7, state="read-only", reason="no space", breaker="open",
    queued_objects=3, queued_bytes=3 << 20, written_today_bytes=9 << 30, quarantined_bytes=1 << 20,
)  # fmt: skip
COUNTERS = {
    "acquires.granted": 4.0,
    "locates": 5.0,
    "tier_reads.nvme/ok": 2.0,
    "tier_reads.sata/io_error": 1.0,
    "tier_written_bytes.nvme/": 99.0,
}


def status(*tiers: TierStatus) -> DaemonStatus:
    return DaemonStatus("1", 1, 1.0, ready=True, reason="", arena_id=1, run=1, tiers=tiers, counters=COUNTERS)


def test_p10_counters_of_tiers_have_the_tier_as_a_label() -> None:
    lines = exposition(lambda: status(RAM, NVME))().decode().splitlines()
    assert 'kvdepot_tier_reads_total{reason="ok",tier="nvme"} 2.0' in lines
    assert 'kvdepot_tier_reads_total{reason="io_error",tier="sata"} 1.0' in lines
    assert 'kvdepot_tier_written_bytes_total{tier="nvme"} 99.0' in lines
    assert 'kvdepot_acquires_total{reason="granted"} 4.0' in lines
    assert "kvdepot_locates_total 5.0" in lines


def test_t5_gauges_say_that_a_tier_is_degraded_and_its_path_out_of_use() -> None:
    lines = exposition(lambda: status(RAM, NVME))().decode().splitlines()
    assert 'kvdepot_tier_degraded{tier="nvme"} 1.0' in lines
    assert 'kvdepot_tier_degraded{tier="ram"} 0.0' in lines
    assert 'kvdepot_tier_breaker_open{tier="nvme"} 1.0' in lines
    assert 'kvdepot_tier_queued_objects{tier="nvme"} 3.0' in lines


def test_status_shows_what_only_media_have() -> None:
    out = StringIO()
    print_status(status(RAM, NVME), Console(file=out, width=200), counters=False)
    assert "read-only (no space)" in out.getvalue()
    (row,) = [line for line in out.getvalue().splitlines() if "nvme" in line and "open" in line]
    assert all(text in row for text in ("3.00 MiB", "9.00 GiB", "1.00 MiB"))
    assert status_record(status(NVME))["tiers"][0]["queued_objects"] == 3


def test_without_such_tiers_there_is_no_such_table() -> None:
    out = StringIO()
    print_status(status(RAM), Console(file=out, width=200), counters=False)
    assert "breaker" not in out.getvalue()
