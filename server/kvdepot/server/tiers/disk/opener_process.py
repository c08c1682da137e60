"""The daemon's end of the opening process (`kvdepot.server.io.disk_opener`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.io.waiting import readable
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.messages import Ended, Message, Request, pack, take_messages

_MODULE = "kvdepot.server.io.disk_opener"


class OpenerProcess:
    """One process at a time. Whatever it does, nothing here waits for it but `wait`."""

    def __init__(self, config: DiskConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._stream = ChildStream(loop, self._heard)
        self._hear: Callable[[Message], None] = lambda _: None
        self._received = bytearray()

    @property
    def running(self) -> bool:
        return self._stream.running

    @property
    def pid(self) -> int:
        return self._stream.pid

    def start(self, hear: Callable[[Message], None]) -> None:
        config = self._config
        self._stream.start(
            _MODULE, lambda fd: (fd, os.getpid(), config.path, config.capacity_bytes, config.quarantine_bytes)
        )
        self._hear = hear

    def send(self, request: Request) -> None:
        self._stream.send(pack(request))

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
            message: Message | None = next(take_messages(self._received), None)
            if message is not None:
                self._loop.call_soon(self._take)
                return message
        return None

    def end(self) -> None:
        self._stream.end()
        self._received.clear()

    def _heard(self, data: bytes) -> None:
        if not data:
            self._ended()
            return
        self._received += data
        self._stream.paused = True
        self._take()

    def _take(self) -> None:
        """One message a turn of the loop, so that a long stream leaves room for everything else."""
        if not self._stream.running:
            return
        try:
            message = next(take_messages(self._received), None)
        except Exception:  # noqa: BLE001 - a MessageError, or whatever else comes of such bytes
            self._ended()
            return
        if message is None:
            self._stream.paused = False
            return
        self._loop.call_soon(self._take)
        self._hear(message)

    def _ended(self) -> None:
        self.end()
        self._hear(Ended())
