"""The log lines about a daemon that is not there: one per absence, and one at its return."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kvdepot.client.attachment import ABSENCE_REPEAT_SECONDS, Absence, Attachment, EngineProcess
from kvdepot.client.endpoint import Endpoint

from tests.rigs.patience import wait_until

ENDPOINT = Endpoint("/run/kvdepot/kvdepot.sock")
LOG = logging.getLogger("test.absence")
AWAY = "kvdepot: no daemon answers at unix:///run/kvdepot/kvdepot.sock: prompts are recomputed and nothing is stored"
BACK = "kvdepot: daemon is back at unix:///run/kvdepot/kvdepot.sock"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def starts(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Of each line, whether it is about the beginning of an absence; it names the socket in any case."""
    assert all(text.startswith((AWAY, BACK)) for text in caplog.messages), caplog.messages
    return [text.startswith(AWAY) for text in caplog.messages]


def test_an_absence_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    absence = Absence(ENDPOINT, LOG, clock)
    absence.ended()
    assert not caplog.messages, "there was none"
    for _ in range(3):
        absence.missed("No such file or directory")
        clock.now += ABSENCE_REPEAT_SECONDS
    assert len(caplog.messages) == 1 and "No such file or directory" in caplog.text
    absence.ended()
    absence.ended()
    assert starts(caplog) == [True, False]


def test_a_daemon_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    absence = Absence(ENDPOINT, LOG, clock)
    for _ in range(10):
        absence.missed("refused")
        absence.ended()
    assert starts(caplog) == [True, False]
    absence.missed("refused")
    clock.now = ABSENCE_REPEAT_SECONDS
    absence.missed("refused")
    assert starts(caplog) == [True, False, True], "an absence that lasts is logged all the same"


def test_only_an_attachment_that_is_to_log_an_absence_does(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for logs in (True, False):
        caplog.clear()
        attempts: list[float] = []

        class Counting:
            def next_seconds(self, attempts: list[float] = attempts) -> float:
                attempts.append(0.0)
                return 0.01

            def reset(self) -> None: ...

        process = EngineProcess("e", scheduler=True)
        attachment = Attachment(Endpoint(str(tmp_path / "s")), process, log=LOG, backoff=Counting(), log_absence=logs)  # type: ignore[arg-type]
        attachment.start()
        wait_until(lambda attempts=attempts: len(attempts) > 3, "some attempts")
        attachment.close()
        assert [str(tmp_path / "s") in line.getMessage() for line in caplog.records] == [True] * logs
