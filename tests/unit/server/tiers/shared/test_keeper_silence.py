"""When a daemon says that its keeper says nothing: after some heartbeats, or some times what is usual of late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.tiers.shared.keeper.settings import KeeperSettings
from kvdepot.server.tiers.shared.keeper.words import pack_word
from kvdepot.server.tiers.shared.keeper_process import KeeperProcess
from kvdepot.server.tiers.shared.links import Failed, Report, Word

REPORT = Report("node", "node", True, 0, 0, 0, 0, True, 0)


class Loop:
    """Its time is the test's."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def call_later(self, *_: object) -> None:
        pass


class Daemon:
    def __init__(self, root: Path) -> None:
        self.loop = Loop()
        self.words: list[Word] = []
        self.process = KeeperProcess(KeeperSettings(root, 1 << 30), cast(asyncio.AbstractEventLoop, self.loop))
        self.process._heard_at = self.loop.now
        self.process.start(self.words.append)

    def hear(self, after: float) -> None:
        """A report that comes so long after the one before; the daemon looks every heartbeat."""
        self.silent(after)
        self.process._heard(pack_word(REPORT))

    def silent(self, seconds: float) -> None:
        until = self.loop.now + seconds
        while self.loop.now < until:
            self.loop.now = min(self.loop.now + 2.0, until)
            self.process._tick()

    @property
    def failures(self) -> list[str]:
        return [word.reason for word in self.words if isinstance(word, Failed)]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setattr(ChildStream, "running", True)
    monkeypatch.setattr(ChildStream, "unsent", False)
    monkeypatch.setattr(ChildStream, "send", lambda *_: None)
    return Daemon(tmp_path)


def test_a_keeper_on_a_quick_server_is_silent_after_three_heartbeats(daemon: Daemon) -> None:
    for _ in range(5):
        daemon.hear(2.0)
    daemon.silent(8.0)
    assert len(daemon.failures) == 1
    assert "no word from the keeper" in daemon.failures[0]


def test_a_keeper_whose_words_come_every_twenty_seconds_is_not_silent(daemon: Daemon) -> None:
    daemon.hear(20.0)
    said = len(daemon.failures)
    for _ in range(10):
        daemon.hear(20.0)
    assert len(daemon.failures) == said <= 1
    daemon.silent(62.0)
    assert len(daemon.failures) == said + 1


def test_a_long_pause_is_not_expected_again_for_ever(daemon: Daemon) -> None:
    daemon.hear(140.0)
    for _ in range(8):
        daemon.hear(2.0)
    said = len(daemon.failures)
    daemon.silent(8.0)
    assert len(daemon.failures) == said + 1
