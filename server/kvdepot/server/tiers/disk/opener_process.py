"""The daemon's end of the opening process (`kvdepot.server.io.disk_opener`)."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable

from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.messages import Ended, Message, MessageError, Request, pack, take_messages
from kvdepot.server.tiers.disk.records import BadRecord

_MODULE = "kvdepot.server.io.disk_opener"
_RECEIVE_BYTES = 1 << 18


class OpenerProcess:
    """One process at a time. Whatever it does, nothing here waits for it but `wait`."""

    def __init__(self, config: DiskConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._hear: Callable[[Message], None] = lambda _: None
        self._received = bytearray()
        self._unsent = bytearray()
        self._ending: list[subprocess.Popen[bytes]] = []

    @property
    def running(self) -> bool:
        return self._socket is not None

    def start(self, hear: Callable[[Message], None]) -> None:
        assert self._socket is None
        self._reap()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        config = self._config
        with theirs:
            arguments = (theirs.fileno(), os.getpid(), config.path, config.capacity_bytes, config.quarantine_bytes)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, *map(str, arguments)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        self._hear, self._socket = hear, ours
        self._loop.add_reader(ours.fileno(), self._readable)

    def send(self, request: Request) -> None:
        self._unsent += pack(request)
        self._flush()

    def wait(self, seconds: float) -> Message | None:
        assert self._socket is not None
        until = self._loop.time() + seconds
        while (left := until - self._loop.time()) > 0 and select.select([self._socket], [], [], left)[0]:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self._received += data
            message: Message | None = next(take_messages(self._received), None)
            if message is not None:
                self._loop.call_soon(self._take)
                return message
        return None

    def end(self) -> None:
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._received.clear()
        self._unsent.clear()
        assert self._process is not None
        self._process.kill()  # it dies at once, or hangs in the kernel: then it is reaped later, or by nobody
        self._ending.append(self._process)
        self._reap()

    def _reap(self) -> None:
        self._ending = [process for process in self._ending if process.poll() is None]

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # it died: the reader hears it
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        self._received += data
        self._loop.remove_reader(self._socket.fileno())
        self._take()

    def _take(self) -> None:
        """One message a turn of the loop, so that a long stream leaves room for everything else."""
        if self._socket is None:
            return
        try:
            message = next(take_messages(self._received), None)
        except (MessageError, BadRecord, ValueError, TypeError):
            self._ended()
            return
        if message is None:
            self._loop.add_reader(self._socket.fileno(), self._readable)
            return
        self._loop.call_soon(self._take)
        self._hear(message)

    def _ended(self) -> None:
        self.end()
        self._hear(Ended())
