"""An engine without a daemon: it serves, and its log says what it is not attached to, how long, and at what cost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kvdepot.client.vllm.scheduling import sides

from tests.chaos.process_clock import ProcessClock
from tests.rigs.connector_rig import cold, prompt
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.live_engine import LiveEngine
from tests.rigs.patience import wait_until

TOLD_SECONDS = 5.0


@pytest.mark.requirement("I3", "O3")
def test_a_daemon_that_starts_after_its_engines_is_missed_and_found_in_the_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    caplog.set_level(logging.INFO)
    daemon = DaemonProcess()

    def lines(text: str) -> list[str]:
        return [line for line in caplog.messages if text in line and daemon.endpoint in line]

    try:
        engine = LiveEngine(daemon.endpoint, folder, monkeypatch, ProcessClock(), ranks=2, wait=False)
        try:
            wait_until(lambda: bool(lines("no daemon at")), "the absence is logged", TOLD_SECONDS)
            assert not lines("attached to"), "nothing says that all is well"
            for length in (3.5, 5.5):  # the engine has only the first chunks of the second itself
                assert engine.generate(prompt(length)) == cold(prompt(length))
            daemon.start()
            wait_until(lambda: bool(engine.step()) and engine.side.session.attached, "attached")
            engine.wait_attached()
            assert engine.generate(prompt(4.5)) == cold(prompt(4.5))
            wait_until(lambda: bool(lines("; namespace ")), "the attachment is logged")
            spec = engine.side.namespaces.spec
        finally:
            engine.close()
        assert len(lines("no daemon at")) == len(lines("is back after")) == 1, "of the whole engine"
        assert lines("is back after")[0].endswith("; 2 requests were computed")
        [attached] = lines("; namespace ")
        assert f"kvdepot: attached to {daemon.endpoint} (kvdepotd " in attached and "; ram " in attached
        assert f"namespace {spec.namespace_id().hex()} " in attached
        assert attached.endswith(f"chunks of {spec.chunk_tokens} tokens")
    finally:
        daemon.close()
