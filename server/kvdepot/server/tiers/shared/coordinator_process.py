"""The daemon's end of the coordinator process (`kvdepot.server.tiers.shared.coordinator.main`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final

from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.platform.boot_clock import boot_seconds
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Ended,
    Failed,
    Message,
    Published,
    Report,
)

_MODULE: Final = "kvdepot.server.tiers.shared.coordinator.main"
_SILENT_HEARTBEATS: Final = 3
"""Or so many times what passed between its latest messages: on a slow server these are rare."""
_PAUSE_HEARTBEATS_MAX: Final = 32


class CoordinatorProcess:
    """A `CoordinatorLink`. One process at a time, made again after a while when it dies. One that hangs is kept."""

    def __init__(
        self, settings: CoordinatorSettings, loop: asyncio.AbstractEventLoop, heir: Callable[[], bool] = lambda: False,
        boot_clock: Callable[[], float] = boot_seconds,
    ) -> None:  # fmt: skip
        """Prepare, without a process. `boot_clock` runs while the machine sleeps, as that of other nodes does.

        `heir` returns whether every process that wrote for earlier runs of `settings.owner` is proven dead.
        """
        self._settings = settings
        self._heir = heir
        self._loop = loop
        self._stream = ChildStream(loop, self._on_data)
        self._on_message: Callable[[Message], None] | None = None
        self._received = bytearray()
        self._published_bytes = self._wanted_bytes = 0
        self._settled = ""
        self._refused = False
        self._sent = Published(0, 0, "", refused=False)
        self._report: Report | None = None  # the last one
        self._message_at = 0.0
        self._boot_clock = boot_clock
        self._interval_seconds = settings.heartbeat_seconds  # between its messages
        self._silence_logged = False
        self._pause_heartbeats = 1
        self._start_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        return self._stream.pid

    def start(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._start_at = self._loop.time()
        self._tick()

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "", *, refused: bool = False) -> None:
        self._published_bytes = max(self._published_bytes, total_bytes)
        self._wanted_bytes = wanted_bytes
        self._settled = settled
        self._refused = refused

    def end(self) -> None:
        self._on_message = None
        if self._timer is not None:
            self._timer.cancel()
        self._stream.end()
        self._received.clear()

    def _tick(self) -> None:
        """Do what is due, once a heartbeat."""
        self._timer = self._loop.call_later(self._settings.heartbeat_seconds, self._tick)
        now = self._loop.time()
        try:
            self._tend(now)
        finally:  # whatever that raises: what was allowed is not used for longer
            if self._report is not None and self._report.until is not None and self._boot_clock() > self._report.until:
                self._expire(self._report)

    def _tend(self, now: float) -> None:
        if self._stream.running:
            settled = self._settled if self._heir() else ""
            published = Published(self._published_bytes, self._wanted_bytes, settled, self._refused)
            if published != self._sent and not self._stream.unsent:
                self._stream.send(TO_COORDINATOR.pack(published))
                self._sent = published
            silent = now - self._message_at
            if silent > _SILENT_HEARTBEATS * self._interval_seconds and not self._silence_logged:
                self._silence_logged = True
                self._deliver(Failed(f"no message from the coordinator of {self._settings.root} for {silent:.0f} s"))
        elif now >= self._start_at:
            self._make()

    def _make(self) -> None:
        root = self._settings.root
        report = self._report
        before = Before(self._published_bytes, report.directory_id if report else "")
        arguments = self._settings.pack(), json.dumps(asdict(before))
        self._received.clear()
        try:
            self._stream.start(_MODULE, lambda fd: (fd, os.getpid(), *arguments))
        except OSError as error:
            self._fail(f"no coordinator of {root} can be made: {error}")
            return
        self._sent = Published(self._published_bytes, 0, "", refused=False)
        self._message_at = self._loop.time()
        self._silence_logged = False

    def _on_data(self, data: bytes) -> None:
        if not data:
            self._ended()
            return
        self._received += data
        try:
            for _, message in FROM_COORDINATOR.take(self._received):
                self._note_interval()
                self._message_at = self._loop.time()
                self._silence_logged = False
                if isinstance(message, Report):
                    self._report = message
                    self._pause_heartbeats = 1
                self._deliver(message)
        except Exception:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
            self._stream.end()
            self._ended()

    def _note_interval(self) -> None:
        heartbeat_seconds, unheard_seconds = self._settings.heartbeat_seconds, self._settings.unheard_seconds
        latest = min(self._loop.time() - self._message_at, unheard_seconds / _SILENT_HEARTBEATS)
        self._interval_seconds = max(heartbeat_seconds, latest, self._interval_seconds / 2)

    def _ended(self) -> None:
        self._pause()
        self._deliver(Ended())

    def _fail(self, reason: str) -> None:
        self._pause()
        self._deliver(Failed(reason))

    def _pause(self) -> None:
        self._start_at = self._loop.time() + self._pause_heartbeats * self._settings.heartbeat_seconds
        self._pause_heartbeats = min(2 * self._pause_heartbeats, _PAUSE_HEARTBEATS_MAX)

    def _expire(self, report: Report) -> None:
        """Use what was granted no more: it may be another node's by now (ADR 0018)."""
        seconds = self._settings.unheard_seconds
        self._report = replace(report, limit_bytes=self._published_bytes, until=self._boot_clock() + seconds)
        self._deliver(self._report)
        self._deliver(Failed(f"no report from the coordinator of {self._settings.root} for {seconds:.0f} s"))

    def _deliver(self, message: Message) -> None:
        if self._on_message is not None:
            self._on_message(message)
