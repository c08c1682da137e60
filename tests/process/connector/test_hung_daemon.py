"""The connector beside a real daemon that is stopped: no call of vLLM waits for it (I2), no request notices (I3)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.session import DepotSession
from kvdepot.client.vllm.scheduling import loads as loads_module
from kvdepot.client.vllm.scheduling import sides
from kvdepot.client.vllm.scheduling import stores as stores_module
from kvdepot.core.report import DaemonStatus

from tests.chaos.process_clock import ProcessClock
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import cold, prompt
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.live_engine import CALLED, LiveEngine
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import status_of

CALL_SECONDS_MAX = 0.5
"""Below every timeout that is set here, so a call that waited for an answer would be longer."""
LOGGED_SECONDS_MAX = 5.0
"""From the first request without an answer to the line in the log."""
LOAD_TIMEOUT_SECONDS = 2.0
LOOKUP_TIMEOUT_SECONDS = 1.5
MakeLive = Callable[..., LiveEngine]


@pytest.fixture(scope="module")
def clock() -> ProcessClock:
    return ProcessClock()


@pytest.fixture
def make_live(
    daemon: DaemonProcess, folder: Path, clock: ProcessClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeLive]:
    """Starts engines on the daemon. What would keep an idle engine stepping for a dead daemon is cut short."""
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    monkeypatch.setattr(stores_module, "PENDING_SECONDS_MAX", 1.0)
    monkeypatch.setattr(loads_module, "PENDING_SECONDS_MAX", 1.0)
    engines: list[LiveEngine] = []

    def start(**options: Any) -> LiveEngine:
        timeouts = {
            "load_timeout_seconds": LOAD_TIMEOUT_SECONDS, "lookup_timeout_seconds": LOOKUP_TIMEOUT_SECONDS,
            "lookup_min_seconds": LOOKUP_TIMEOUT_SECONDS,
        }  # fmt: skip
        options["settings"] = timeouts | options.get("settings", {})
        engines.append(LiveEngine(daemon.endpoint, folder, monkeypatch, clock, **options))
        return engines[-1]

    yield start
    daemon.resume()
    for engine in engines:
        engine.close()


def status(daemon: DaemonProcess) -> DaemonStatus:
    return status_of(daemon.socket)


def check_calls(engine: LiveEngine) -> None:
    assert {name: seconds for name, seconds in engine.longest.items() if seconds > CALL_SECONDS_MAX} == {}
    for connector in (engine.connector, *engine.workers):
        assert not connector.failures.counts, connector.failures.counts


def wait_clean(daemon: DaemonProcess, engine: LiveEngine) -> None:
    """Nothing is held, pinned, lent or reserved any more."""

    def clean() -> bool:
        engine.step()
        found = status(daemon)
        return (
            engine.side.session.open_leases == engine.side.loads.active == engine.side.stores.open_requests == 0
            and not found.tiers[0].lent_bytes
            and all(one.leases == one.lent_objects == one.credit_used_bytes == 0 for one in found.sessions)
        )

    wait_until(clean, "nothing is owed any more", seconds=60)
    assert not engine.side.holds.pinned_blocks
    assert not engine.side.holds.held_blocks
    engine.reset()


def wait_given_back(daemon: DaemonProcess, name: str) -> None:
    """This process lives on, so what an engine held stays lent (I6) until it says that it holds nothing any more."""
    again = DepotSession(Endpoint.parse(daemon.endpoint), name)
    again.start()
    try:
        wait_until(lambda: not status(daemon).tiers[0].lent_bytes, "what it held is free", seconds=60)
    finally:
        again.close()


def wait_served(daemon: DaemonProcess, engine: LiveEngine, tokens: list[int]) -> None:
    """It stores and loads again: with timeouts as short as these not always at the first attempt."""

    def served() -> bool:
        assert engine.generate(tokens) == cold(tokens)
        wait_clean(daemon, engine)
        return list(engine.hits.values())[-1] == len(tokens) // BLOCK * BLOCK

    wait_until(served, "it stores and loads again", seconds=60)


@pytest.mark.requirement("I2")
@pytest.mark.parametrize(
    ("steps", "hybrid"), [(0, False), (1, True), (2, False), (3, True), (6, False)], ids=lambda value: str(value)
)
def test_no_call_of_the_engine_waits_for_a_daemon_that_hangs(
    make_live: MakeLive, daemon: DaemonProcess, hybrid: bool, steps: int
) -> None:
    """Stopped after so many steps of requests that load and store; they all end while it is stopped."""
    known, new = prompt(9.5, seed=steps), prompt(7.5, seed=100 + steps)
    engine = make_live(hybrid=hybrid)
    assert engine.generate(known) == cold(known)
    wait_clean(daemon, engine)
    assert engine.side.counters["stored_objects"] == 9 + hybrid
    ids = [engine.add(known), engine.add(new, max_tokens=8), engine.add(prompt(5.5, seed=200 + steps), max_tokens=300)]
    for _ in range(steps):
        engine.step()
        time.sleep(0.005)
    daemon.suspend()
    engine.run()
    assert engine.outputs[ids[0]] == cold(known)
    assert engine.outputs[ids[1]] == cold(new, 8)
    later = engine.add(known)  # it arrives when nothing is answered any more
    engine.step()
    aborted = engine.add(new)
    engine.step()
    engine.abort(aborted)
    engine.connector.reset_cache()  # a new namespace, which nobody confirms
    engine.run()
    assert engine.outputs[later] == cold(known)
    assert {"build_connector_meta", "get_num_new_matched_tokens", "get_transfer_results"} < set(engine.longest)
    check_calls(engine)
    daemon.resume()
    wait_clean(daemon, engine)
    engine.wait_attached()
    wait_served(daemon, engine, prompt(6.5, seed=300 + steps))
    check_calls(engine)


@pytest.mark.requirement("I2")
def test_no_call_waits_for_a_hung_daemon_when_the_number_of_ranks_changes(
    make_live: MakeLive, daemon: DaemonProcess
) -> None:
    """The former session owes the daemon answers, and is closed all the same while the engine steps."""
    engine = make_live()
    tokens, connector, former = prompt(6.5, seed=1001), engine.connector, engine.side.session
    request_id = engine.add(tokens, max_tokens=8)
    while not engine.outputs[request_id]:
        engine.step()
    daemon.suspend()
    (facts,) = engine.facts().values()
    connector._vllm_config.parallel_config.world_size = 2
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts, (0, 1): replace(facts, rank=1)})
    assert engine.side.session is not former
    engine.run()
    wait_until(lambda: bool(engine.step()) and not connector.sides.former, "the former side is forgotten", seconds=60)
    assert engine.outputs[request_id] == cold(tokens, 8)
    check_calls(engine)
    wait_until(lambda: not former._attachment._thread.is_alive(), "the former session is detached", seconds=60)
    assert former._loop.state.ended
    daemon.resume()
    engine.close()
    wait_given_back(daemon, engine.name)


@pytest.mark.requirement("I2")
def test_an_engine_that_starts_beside_a_hung_daemon_serves_at_once_and_uses_it_later(
    make_live: MakeLive, daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.suspend()
    began = time.monotonic()
    engine = make_live(wait=False)
    tokens = prompt(6.5, seed=999)
    request_id = engine.add(tokens)
    engine.step()
    assert engine.outputs[request_id], "the first step already computes it"
    engine.run()
    check_calls(engine)
    silent = f"kvdepot: no answer from the daemon at {daemon.endpoint}; requests are computed until it answers"
    wait_until(lambda: silent in caplog.messages, "the silence is logged")
    assert time.monotonic() - began < patient(LOGGED_SECONDS_MAX)
    daemon.resume()
    wait_until(lambda: bool(engine.step()) and engine.side.session.attached, "attached", seconds=60)
    engine.wait_attached()
    wait_served(daemon, engine, tokens)


@pytest.mark.requirement("O3")
def test_a_daemon_that_hangs_is_logged_within_seconds_of_the_first_request_that_it_does_not_answer(
    make_live: MakeLive, daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_live(settings={"lookup_timeout_seconds": 0.25, "lookup_min_seconds": 0.05})
    caplog.clear()
    daemon.suspend()
    silent = f"kvdepot: no answer from the daemon at {daemon.endpoint}; requests are computed until it answers"
    began = time.monotonic()
    tokens = (prompt(3.5, seed=2000 + number) for number in itertools.count())

    def logged() -> bool:
        assert engine.generate(ids := next(tokens)) == cold(ids)
        return silent in caplog.messages

    wait_until(logged, "the silence is logged")
    assert time.monotonic() - began < patient(LOGGED_SECONDS_MAX)
    daemon.resume()
    wait_until(lambda: f"the daemon at {daemon.endpoint} is back after" in caplog.text, "its return is logged")
    assert caplog.messages.count(silent) == 1
    wait_clean(daemon, engine)


@pytest.mark.requirement("I2")
def test_an_engine_ends_in_bounded_time_beside_a_hung_daemon(make_live: MakeLive, daemon: DaemonProcess) -> None:
    engine = make_live()
    request_id = engine.add(prompt(6.5, seed=1000))
    while not engine.outputs[request_id]:
        engine.step()
    daemon.suspend()
    limit = Deadline(30)
    engine.close()
    assert not limit.is_over()
    daemon.resume()
    wait_given_back(daemon, engine.name)


def test_every_method_that_vllm_calls_is_timed() -> None:
    assert {"on_new_request", "start_load_kv", "wait_for_save", "has_pending_push_work", "reset_cache"} < set(CALLED)
