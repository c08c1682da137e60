"""An engine without a daemon: it serves, and its log says so once."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.client.vllm.scheduling import sides

from tests.chaos.process_clock import ProcessClock
from tests.rigs.connector_rig import cold, prompt
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.live_engine import LiveEngine
from tests.rigs.patience import wait_until


@pytest.mark.requirement("I3")
def test_a_daemon_that_starts_after_its_engines_is_missed_and_found_in_the_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    daemon = DaemonProcess()

    def lines(text: str) -> list[str]:
        return [line for line in caplog.messages if text in line and daemon.endpoint in line]

    try:
        engine = LiveEngine(daemon.endpoint, folder, monkeypatch, ProcessClock(), ranks=2, wait=False)
        try:
            assert engine.generate(prompt(3.5)) == cold(prompt(3.5))
            wait_until(lambda: bool(lines("no daemon answers")), "the absence is logged")
            daemon.start()
            wait_until(lambda: bool(engine.step()) and engine.side.session.attached, "attached")
            engine.wait_attached()
            assert engine.generate(prompt(4.5)) == cold(prompt(4.5))
        finally:
            engine.close()
        assert len(lines("no daemon answers")) == len(lines("daemon is back")) == 1, "of the whole engine"
    finally:
        daemon.close()
