"""`kvdepotctl what-if` beside a real daemon: no number without evidence, then a table, JSON, a metric and the page."""

from __future__ import annotations

import json
from urllib.request import urlopen

import pytest
from kvdepot.core.what_if import REQUESTS_MIN

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of

OBJECT_BYTES = 1 << 20
"""So large that everything is in the sample."""


def seen(daemon: DaemonProcess) -> int:
    """Return how many requests the curve of RAM has."""
    found: int = json.loads(kvdepotctl(daemon, "what-if", "--json").stdout)["ram"]["requests"]
    return found


@pytest.mark.long(seconds=15)
def test_the_curve_of_a_daemon_is_shown_everywhere_once_there_are_enough_requests(new_daemon: DaemonProcess) -> None:
    early = kvdepotctl(new_daemon, "what-if")
    assert early.returncode == 1, early
    assert f"not enough sampled requests yet (0 of {REQUESTS_MIN})" in early.stdout
    with RawEngine(new_daemon.socket, "engine", spec=dense_spec("a-model", OBJECT_BYTES)) as engine:
        keys = keys_of("prompt", 2)  # which it never stores
        for number in range(REQUESTS_MIN):
            engine.locate(keys, f"request-{number}")
        wait_until(lambda: seen(new_daemon) == REQUESTS_MIN, "a sketch that has worked on all requests")
    late = kvdepotctl(new_daemon, "what-if")
    assert late.returncode == 0, late
    assert "measured, all tiers: 0 %" in late.stdout
    assert late.stdout.count("99.8 %*") == 6, late.stdout
    record = json.loads(kvdepotctl(new_daemon, "what-if", "-o", "json").stdout)
    assert record["ram"]["measured_hit_ratio"] == 0.0
    with urlopen(f"{new_daemon.metrics}/metrics") as answer:
        assert 'kvdepot_tier_expected_hit_ratio{capacity_factor="0.25",tier="ram"} 0.998' in answer.read().decode()
    with urlopen(f"{new_daemon.metrics}/live.json") as answer:
        (ram,) = [tier for tier in json.load(answer)["tiers"] if tier["name"] == "ram"]
    assert [one["percent"] for one in ram["what_if"]["points"]] == [99.8] * 6
