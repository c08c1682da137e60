"""The token hit rate is one number, wherever an operator reads it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import sides
from kvdepot.core.hit_rate import HitRate
from kvdepot.core.units import count_text
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.chaos.process_clock import ProcessClock
from tests.fakes.frontend import Frontend
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import prompt
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.live_engine import LiveEngine
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import status_of

PATIENT = {"lookup_timeout_seconds": 5.0, "lookup_min_seconds": 5.0, "load_weight": 1000.0}
TOKEN_SECONDS = 0.01


@pytest.fixture
def engine(
    new_daemon: DaemonProcess, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveEngine]:
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    running = LiveEngine(new_daemon.endpoint, folder, monkeypatch, ProcessClock(), settings=PATIENT)
    yield running
    running.close()
    unregister_vllm_metrics()


def fetched(daemon: DaemonProcess, path: str) -> str:
    with urllib.request.urlopen(f"{daemon.metrics}{path}") as answer:
        return str(answer.read().decode())


def scraped(daemon: DaemonProcess) -> HitRate:
    """Return the hit rate of the daemon's metrics, as a dashboard has it."""
    samples = re.findall(r'^kvdepot_(\w+)_total(?:{source="(\w+)"})? (\S+)$', fetched(daemon, "/metrics"), re.M)
    return HitRate.of({f"{name}.{source}" if source else name: float(value) for name, source, value in samples})


@pytest.mark.requirement("O2")
def test_the_hit_rate_of_a_workload_is_the_same_on_every_screen_page_and_metric(
    new_daemon: DaemonProcess, engine: LiveEngine
) -> None:
    frontend, tokens = Frontend(engine), prompt(10.5)

    def stored(chunks: int) -> None:
        wait_until(lambda: bool(engine.step()) and status_of(new_daemon.socket).tiers[0].objects >= chunks, "stored")

    engine.side.prefill_rate.token_seconds = TOKEN_SECONDS
    engine.generate(tokens)
    stored(10)
    engine.reset()
    engine.generate(prompt(4.5))
    engine.generate(tokens)  # begins with the same 4 chunks, which are the engine's own now
    engine.generate(prompt(0.5))
    asked = 2 * len(tokens) + len(prompt(4.5)) + len(prompt(0.5))
    wait_until(lambda: bool(engine.step()) and counted(new_daemon).prompt_tokens == asked, "all have ended")

    hits = counted(new_daemon)
    assert hits.served_tokens == {"engine": 4 * BLOCK, "ram": 10 * BLOCK}
    assert hits.saved_seconds == pytest.approx(10 * BLOCK * TOKEN_SECONDS)
    assert scraped(new_daemon) == hits
    of_vllm: dict[str, Any] = {
        f"{name.removesuffix('_total')}.{label}" if label else name.removesuffix("_total"): value
        for (name, label), value in frontend.samples().items()
    }
    assert HitRate.of(of_vllm) == hits

    for printed in (kvdepotctl(new_daemon, "status").stdout, kvdepotctl(new_daemon, "status", "--wide").stdout):
        assert re.search(rf"hit rate +{re.escape(str(hits))}", printed), printed
    assert f"hit rate {hits}" in fetched(new_daemon, "/metrics/summary")
    top = kvdepotctl(new_daemon, "top", "--count", "1", "--interval", "0.2").stdout
    assert f"{hits.percent:.0f} % of {count_text(asked)} since the start" in top
    page = json.loads(fetched(new_daemon, "/live.json"))["last_hour"]["hit_rate"]
    assert (page["prompt_tokens"], page["percent"]) == (asked, pytest.approx(hits.percent))
    assert page["percent_by_source"] == {
        source: pytest.approx(hits.percent_of(served)) for source, served in hits.served_tokens.items()
    }
    assert page["saved_seconds"] == pytest.approx(hits.saved_seconds)


def counted(daemon: DaemonProcess) -> HitRate:
    return HitRate.of(status_of(daemon.socket).counters)
