"""The lines of the engine's log about its daemon: away, how long and at what cost, back, and what it is attached to."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.client.attachment import Attachment, EngineProcess, Miss
from kvdepot.client.daemon_log import BEGIN_SECONDS, REPEAT_SECONDS, DaemonLog
from kvdepot.client.endpoint import Endpoint

from tests.rigs.engine_rig import DENSE
from tests.rigs.patience import wait_until

ENDPOINT = Endpoint("/run/kvdepot/kvdepot.sock")
URL = "unix:///run/kvdepot/kvdepot.sock"
LOG = logging.getLogger("test.daemon_log")
AWAY = f"kvdepot: no daemon at {URL}: No such file; requests are computed until the daemon is there"
BACK = f"kvdepot: the daemon at {URL} is back after {{}}; {{}} requests were computed"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    return Clock()


@pytest.fixture
def lines(clock: Clock) -> DaemonLog:
    return DaemonLog(ENDPOINT, LOG, clock)


@pytest.mark.requirement("O3")
def test_an_outage_is_logged_at_once_and_at_its_end_with_its_length_and_cost(
    lines: DaemonLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lines.computed = 5  # of an earlier outage
    lines.answered()
    assert not caplog.messages, "there was no outage"
    lines.computed += 1  # before anybody has tried to attach
    lines.absent("No such file")
    assert caplog.messages == [AWAY]
    clock.now = 14.6
    lines.absent("No such file")
    lines.computed += 72
    lines.answered()
    lines.answered()
    assert caplog.messages == [AWAY, BACK.format("15 s", 73)]


@pytest.mark.requirement("O3")
def test_an_outage_that_lasts_is_logged_every_five_minutes_with_the_requests_so_far(
    lines: DaemonLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(int(2 * REPEAT_SECONDS) + 1):
        clock.now = second
        lines.absent("No such file")
        lines.computed += 1
    still = f"kvdepot: no daemon at {URL} for {{}}: No such file; {{}} requests were computed"
    assert caplog.messages == [AWAY, still.format("5 min", 300), still.format("10 min", 600)]


def test_a_daemon_in_a_crash_loop_does_not_fill_the_log(
    lines: DaemonLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        lines.absent("No such file")
        lines.answered()
    assert caplog.messages == [AWAY, BACK.format("0 s", 0)]
    lines.absent("No such file")
    clock.now = BEGIN_SECONDS
    lines.absent("No such file")
    assert caplog.messages[2:] == [AWAY], "an outage that lasts is logged all the same"


def test_a_daemon_that_is_silent_and_then_gone_is_one_outage(
    lines: DaemonLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lines.silent()
    clock.now = 5.0
    lines.absent("No such file")
    lines.computed = 2
    lines.answered()
    silent = f"kvdepot: no answer from the daemon at {URL}; requests are computed until it answers"
    assert caplog.messages == [silent, BACK.format("5 s", 2)]


def test_a_refusal_is_repeated_and_ends_too(lines: DaemonLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lines.refused("no room")
    assert not caplog.messages, "the attachment has logged it"
    clock.now = REPEAT_SECONDS
    lines.refused("no room")
    lines.answered()
    still = f"kvdepot: not attached to {URL} for 5 min: no room; 0 requests were computed"
    assert caplog.messages == [still, BACK.format("5 min", 0)]


def test_an_attachment_names_daemon_tiers_namespace_and_chunk_once(
    lines: DaemonLog, caplog: pytest.LogCaptureFixture
) -> None:
    begin = f"kvdepot: attached to {URL} (kvdepotd 0.1.0"
    lines.attached("0.1.0", None, {})
    tiers = {"nvme": 8 << 30, "ram": 714 << 20}
    for spec in (DENSE, DENSE, replace(DENSE, epoch="later")):
        lines.attached("0.1.0", spec, tiers)
    first, second, third = caplog.messages
    assert first == f"{begin}); no namespace yet, because the weights are being identified"
    assert second == (
        f"{begin}; ram 714.00 MiB, nvme 8.00 GiB); namespace {DENSE.namespace_id().hex()} "
        f"({DENSE.label}, epoch {DENSE.epoch!r}, bump 0), chunks of {DENSE.chunk_tokens} tokens"
    )
    assert "epoch 'later'" in third
    caplog.clear()
    lines.attached("0.2.0", DENSE, {})
    assert "(kvdepotd 0.2.0); namespace" in caplog.text, "an upgrade is seen, and an older daemon names no tiers"


def test_an_attachment_reports_each_attempt_that_failed_and_whether_a_daemon_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missed: list[tuple[str, Miss]] = []
    attachment = Attachment(
        Endpoint(str(tmp_path / "s")),
        EngineProcess("e", scheduler=True),
        log=LOG,
        on_missed=lambda *why: missed.append(why),
    )
    attachment.start()
    try:
        wait_until(lambda: len(missed) > 1, "attempts")
        assert set(missed) == {("No such file or directory", Miss.ABSENT)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
            daemon.bind(str(tmp_path / "s.attach"))
            daemon.listen()
            peer = daemon.accept()[0]
            peer.recv(4096)
            peer.send(b"\xff")  # malformed
            wait_until(lambda: missed[-1][1] is Miss.REFUSED, "the answer is no attachment")
            peer.close()
    finally:
        attachment.close()
    assert [line.split(": ")[1] for line in caplog.messages] == [f"not attached to unix://{tmp_path}/s"]


def test_a_daemon_that_refuses_goes_and_comes_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = Attachment(ENDPOINT, EngineProcess("engine", scheduler=True), log=LOG)
    monkeypatch.setattr("kvdepot.client.attachment.time.monotonic", clock := Clock())
    clock.now = 1000.0
    for refusal in ("no room", "no room", "no room", "another", "no room"):
        attachment._refused(refusal)
        attachment._missed("", "there is no daemon", Miss.ABSENT)
        clock.now += 10.0
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ["no room", "another", "no room"]
    clock.now += 61.0
    attachment._refused("no room")
    assert len(caplog.records) == 4
