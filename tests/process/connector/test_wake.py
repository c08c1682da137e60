"""The connector over a real daemon, by the real client: wake-ups, other layouts and other rank counts (row I1)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import sides

from tests.chaos.process_clock import ProcessClock
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import cold, prompt
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.layout_turns import turn_layout
from tests.rigs.live_engine import LiveEngine
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import status_of

CYCLES = 20


@pytest.fixture
def engine(
    daemon: DaemonProcess, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LiveEngine]:
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    settings = {"lookup_timeout_seconds": 5.0, "lookup_min_seconds": 5.0}  # a busy machine is no miss
    with closing(LiveEngine(daemon.endpoint, folder, monkeypatch, ProcessClock(), settings=settings)) as made:
        yield made


def threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("kvdepot"))


def stored_and_served(engine: LiveEngine, daemon: DaemonProcess, tokens: list[int]) -> None:
    """A prompt of which nothing may be served, and then all of it."""
    engine.wait_attached()
    for hit in (0, len(tokens) // BLOCK * BLOCK):
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == hit
        wait_until(lambda: not leases(daemon), "leases that do not end")
        engine.reset()


def leases(daemon: DaemonProcess) -> int:
    return sum(session.leases + session.lent_objects for session in status_of(daemon.socket).sessions)


def test_twenty_wake_ups_leave_the_session_and_the_threads_as_they_were(
    engine: LiveEngine, daemon: DaemonProcess
) -> None:
    tokens = prompt(5.5)
    stored_and_served(engine, daemon, tokens)
    session, running = engine.side.session, threads()
    attachments = session.attachments
    for _ in range(CYCLES):
        engine.sleep()
        engine.change_weights()
        engine.wake_up()
        stored_and_served(engine, daemon, tokens)
        assert (engine.side.session, session.attachments, threads()) == (session, attachments, running)
    assert len(status_of(daemon.socket).sessions) == 1
    assert session.open_leases == 0


def test_another_layout_goes_on_in_the_same_session(engine: LiveEngine, daemon: DaemonProcess) -> None:
    stored_and_served(engine, daemon, prompt(5.5, seed=1))
    session, running = engine.side.session, threads()
    turn_layout(engine)
    engine.shake_hands()
    stored_and_served(engine, daemon, prompt(5.5, seed=1))
    assert engine.side.session is session
    assert threads() == running


def test_another_rank_count_has_another_session_and_the_former_one_ends(
    engine: LiveEngine, daemon: DaemonProcess
) -> None:
    stored_and_served(engine, daemon, prompt(5.5, seed=2))
    session, running = engine.side.session, threads()
    connector: Any = engine.connector
    (facts,) = engine.facts().values()
    connector._vllm_config.parallel_config.world_size = 2
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts, (0, 1): replace(facts, rank=1)})
    assert engine.side.session is not session
    assert engine.generate(prompt(5.5, seed=2)) == cold(prompt(5.5, seed=2))
    assert list(engine.hits.values())[-1] == 0, "its second rank is nowhere"
    wait_until(lambda: threads() == running, "the former session's threads end")
