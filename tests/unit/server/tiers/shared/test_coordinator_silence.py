"""When a daemon says that its coordinator says nothing: after some heartbeats, or some times what is usual of late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.tiers.shared.coordinator.settings import CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator_process import CoordinatorProcess
from kvdepot.server.tiers.shared.links import FROM_COORDINATOR, Failed, Message, Report

REPORT = Report("node", "node", True, 0, 0, 0, 0, True, 0)


class Timer:
    def __init__(self, ring: Callable[[], None]) -> None:
        self.ring = ring

    def cancel(self) -> None:
        self.ring = lambda: None


class Loop:
    """Its time is the test's."""

    now = 100.0
    timer: Timer
    """The last one."""

    def time(self) -> float:
        return self.now

    def call_later(self, _: float, ring: Callable[[], None]) -> Timer:
        self.timer = Timer(ring)
        return self.timer


class Daemon:
    slept_seconds = 0.0
    """For which CLOCK_MONOTONIC, and so the loop's time, stood still."""

    def __init__(self, root: Path) -> None:
        self.loop = Loop()
        self.messages: list[Message] = []
        self.settings = CoordinatorSettings(root, 1 << 30)
        self.process = CoordinatorProcess(
            self.settings, cast(asyncio.AbstractEventLoop, self.loop), boot_clock=lambda: self.boot_seconds
        )
        self.process._message_at = self.loop.now
        self.process.start(self.messages.append)

    @property
    def boot_seconds(self) -> float:
        return self.loop.now + self.slept_seconds

    @property
    def report_of_now(self) -> Report:
        return replace(REPORT, limit_bytes=9 << 20, until=self.boot_seconds + self.settings.unheard_seconds)

    def report(self, after: float) -> None:
        """A report that comes so long after the one before; the daemon looks every heartbeat."""
        self.silent(after)
        self.hear(self.report_of_now)

    def hear(self, report: Report) -> None:
        self.process._on_data(FROM_COORDINATOR.pack(report))

    def silent(self, seconds: float) -> None:
        until = self.loop.now + seconds
        while self.loop.now < until:
            self.loop.now = min(self.loop.now + 2.0, until)
            self.process._tick()

    @property
    def limit_bytes(self) -> int:
        return [message for message in self.messages if isinstance(message, Report)][-1].limit_bytes

    @property
    def failures(self) -> list[str]:
        return [message.reason for message in self.messages if isinstance(message, Failed)]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setattr(ChildStream, "running", True)
    monkeypatch.setattr(ChildStream, "unsent", False)
    monkeypatch.setattr(ChildStream, "send", lambda *_: None)
    return Daemon(tmp_path)


def test_a_coordinator_on_a_quick_server_is_silent_after_three_heartbeats(daemon: Daemon) -> None:
    for _ in range(5):
        daemon.report(2.0)
    daemon.silent(8.0)
    assert len(daemon.failures) == 1
    assert "no message from the coordinator" in daemon.failures[0]


def test_a_coordinator_whose_words_come_every_twenty_seconds_is_not_silent(daemon: Daemon) -> None:
    daemon.report(20.0)
    said = len(daemon.failures)
    for _ in range(10):
        daemon.report(20.0)
    assert len(daemon.failures) == said <= 1
    daemon.silent(62.0)
    assert len(daemon.failures) == said + 1


def test_half_of_a_long_pause_is_expected_after_the_next_word(daemon: Daemon) -> None:
    for pause in (30.0, 2.0):
        daemon.report(pause)
    said = len(daemon.failures)
    daemon.silent(44.0)
    assert len(daemon.failures) == said
    daemon.silent(4.0)
    assert len(daemon.failures) == said + 1


def test_a_long_pause_is_not_expected_again_for_ever(daemon: Daemon) -> None:
    daemon.report(140.0)
    for _ in range(8):
        daemon.report(2.0)
    said = len(daemon.failures)
    daemon.silent(8.0)
    assert len(daemon.failures) == said + 1


def test_what_was_allowed_before_the_machine_slept_is_not_used_after_it(daemon: Daemon) -> None:
    """Other nodes may have it: they have taken this one for gone."""
    daemon.hear(daemon.report_of_now)
    daemon.process.publish(1 << 20)
    daemon.silent(2.0)
    assert len(daemon.messages) == 1
    daemon.slept_seconds = 3600.0
    daemon.silent(2.0)
    assert daemon.limit_bytes == 1 << 20


def test_what_was_said_before_the_machine_slept_and_is_heard_after_it_is_old(daemon: Daemon) -> None:
    said = daemon.report_of_now
    daemon.process.publish(1 << 20)
    daemon.slept_seconds = 3600.0
    daemon.hear(said)
    daemon.silent(2.0)
    assert daemon.limit_bytes == 1 << 20
    daemon.report(2.0)
    assert daemon.limit_bytes == 9 << 20


def test_a_coordinator_that_was_ended_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ChildStream, "start", lambda _, module, __: begun.append(module))
    loop = Loop()
    process = CoordinatorProcess(CoordinatorSettings(tmp_path, 1 << 30), cast(asyncio.AbstractEventLoop, loop))
    process.start(lambda _: None)
    loop.timer.ring()
    assert len(begun) == 2, "it ended by itself"
    process.end()
    loop.timer.ring()
    assert len(begun) == 2
