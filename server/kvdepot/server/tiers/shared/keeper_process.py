"""The daemon's end of the keeper process (`kvdepot.server.io.shared_keeper`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final

from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.tiers.shared.keeper.settings import Before, KeeperSettings
from kvdepot.server.tiers.shared.keeper.words import pack_published, take_words
from kvdepot.server.tiers.shared.links import Ended, Failed, Report, Word

_MODULE: Final = "kvdepot.server.io.shared_keeper"
_SILENT_HEARTBEATS: Final = 3
"""Or so many times what passed between its words lately: on a slow server they come seldom."""
_PAUSE_HEARTBEATS_MAX: Final = 32


class KeeperProcess:
    """A `KeeperLink`. One process at a time, made again after a while when it dies. One that hangs is kept."""

    def __init__(
        self, settings: KeeperSettings, loop: asyncio.AbstractEventLoop, heir: Callable[[], bool] = lambda: False
    ) -> None:
        """`heir`: whether every process is proven dead that wrote for earlier runs of `settings.owner`."""
        self._settings = settings
        self._heir = heir
        self._loop = loop
        self._stream = ChildStream(loop, self._heard)
        self._hear: Callable[[Word], None] | None = None
        self._received = bytearray()
        self._published_bytes = self._wanted_bytes = 0
        self._settled = ""
        self._sent = (0, 0, "")
        self._report: Report | None = None  # the last one
        self._heard_at = self._reported_at = 0.0
        self._interval_seconds = settings.heartbeat_seconds  # between its words
        self._told = False  # that it says nothing
        self._pause_heartbeats = 1
        self._start_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        return self._stream.pid

    def start(self, hear: Callable[[Word], None]) -> None:
        self._hear = hear
        self._start_at = self._loop.time()
        self._tick()

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "") -> None:
        self._published_bytes = max(self._published_bytes, total_bytes)
        self._wanted_bytes = wanted_bytes
        self._settled = settled

    def end(self) -> None:
        self._hear = None
        if self._timer is not None:
            self._timer.cancel()
        self._stream.end()
        self._received.clear()

    def _tick(self) -> None:
        """Once a heartbeat."""
        self._timer = self._loop.call_later(self._settings.heartbeat_seconds, self._tick)
        now = self._loop.time()
        try:
            self._tend(now)
        finally:  # whatever that raises: what was allowed is not used for longer
            if self._report is not None and now - self._reported_at > self._settings.unheard_seconds:
                self._expire(self._report)

    def _tend(self, now: float) -> None:
        if self._stream.running:
            told = self._published_bytes, self._wanted_bytes, self._settled if self._heir() else ""
            if told != self._sent and not self._stream.unsent:
                self._stream.send(pack_published(*told))
                self._sent = told
            silent = now - self._heard_at
            if silent > _SILENT_HEARTBEATS * self._interval_seconds and not self._told:
                self._told = True
                self._say(Failed(f"no word from the keeper of {self._settings.root} for {silent:.0f} s"))
        elif now >= self._start_at:
            self._make()

    def _make(self) -> None:
        root = self._settings.root
        report = self._report
        before = Before(self._published_bytes, report.directory_id if report else "")
        words = self._settings.pack(), json.dumps(asdict(before))
        self._received.clear()
        try:
            self._stream.start(_MODULE, lambda fd: (fd, os.getpid(), *words))
        except OSError as error:
            self._fail(f"no keeper of {root} can be made: {error}")
            return
        self._sent = self._published_bytes, 0, ""
        self._heard_at = self._loop.time()
        self._told = False

    def _heard(self, data: bytes) -> None:
        if not data:
            self._ended()
            return
        self._received += data
        try:
            for word in take_words(self._received):
                self._note_interval()
                self._heard_at = self._loop.time()
                self._told = False
                if isinstance(word, Report):
                    self._report, self._reported_at = word, self._heard_at
                    self._pause_heartbeats = 1
                self._say(word)
        except Exception:  # noqa: BLE001 - a WordError, or whatever else comes of such bytes
            self._stream.end()
            self._ended()

    def _note_interval(self) -> None:
        heartbeat_seconds, unheard_seconds = self._settings.heartbeat_seconds, self._settings.unheard_seconds
        latest = min(self._loop.time() - self._heard_at, unheard_seconds / _SILENT_HEARTBEATS)
        self._interval_seconds = max(heartbeat_seconds, latest, self._interval_seconds / 2)

    def _ended(self) -> None:
        self._pause()
        self._say(Ended())

    def _fail(self, reason: str) -> None:
        self._pause()
        self._say(Failed(reason))

    def _pause(self) -> None:
        self._start_at = self._loop.time() + self._pause_heartbeats * self._settings.heartbeat_seconds
        self._pause_heartbeats = min(2 * self._pause_heartbeats, _PAUSE_HEARTBEATS_MAX)

    def _expire(self, report: Report) -> None:
        """What was allowed may be another's by now (ADR 0018)."""
        self._reported_at = self._loop.time()
        self._say(replace(report, limit_bytes=self._published_bytes))
        seconds = self._settings.unheard_seconds
        self._say(Failed(f"no report from the keeper of {self._settings.root} for {seconds:.0f} s"))

    def _say(self, word: Word) -> None:
        if self._hear is not None:
            self._hear(word)
