"""The daemon's end of the opening process (`kvdepot.server.tiers.disk.opener`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvdepot.server.io.child_stream import NICENESS, ChildStream
from kvdepot.server.io.waiting import readable
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.messages import MESSAGES, REQUESTS, Ended, Message, Request

_MODULE = "kvdepot.server.tiers.disk.opener"


class OpenerProcess:
    """An `OpenerLink`. There is one process at a time. Only `wait` waits for it."""

    def __init__(self, config: DiskConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._stream = ChildStream(loop, self._on_data)
        self._on_message: Callable[[Message], None] = lambda _: None
        self._received = bytearray()

    @property
    def running(self) -> bool:
        return self._stream.running

    @property
    def pid(self) -> int:
        return self._stream.pid

    def start(self, on_message: Callable[[Message], None]) -> None:
        config = self._config
        self._stream.start(
            _MODULE,
            lambda fd: (fd, os.getpid(), config.path, config.capacity_bytes, config.quarantine_bytes, NICENESS),
            niceness=0,  # it lowers its own priority once it has the directory
        )
        self._on_message = on_message

    def send(self, request: Request) -> None:
        self._stream.send(REQUESTS.pack(request))

    def wait(self, seconds: float) -> Message | None:
        until = self._loop.time() + seconds
        while (left := until - self._loop.time()) > 0 and readable(self._stream, left):
            try:
                data = self._stream.receive()
            except BlockingIOError:
                continue
            if not data:
                return None  # the reader hears of it, too
            self._received += data
            try:
                frame = next(MESSAGES.take(self._received), None)
            except Exception:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
                self._ended()
                return None
            if frame is not None:
                self._loop.call_soon(self._take)
                return frame[1]
        return None

    def end(self) -> None:
        self._stream.end()
        self._received.clear()

    def _on_data(self, data: bytes) -> None:
        if not data:
            self._ended()
            return
        self._received += data
        self._stream.paused = True
        self._take()

    def _take(self) -> None:
        """Take in one message for each turn of the loop, so that a long stream leaves room for everything else."""
        if not self._stream.running:
            return
        try:
            frame = next(MESSAGES.take(self._received), None)
        except Exception:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
            self._ended()
            return
        if frame is None:
            self._stream.paused = False
            return
        self._loop.call_soon(self._take)
        self._on_message(frame[1])

    def _ended(self) -> None:
        self.end()
        self._on_message(Ended())
