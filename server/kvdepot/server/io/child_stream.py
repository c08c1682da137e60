"""The daemon's end of a child process that it talks with over a stream, and never waits for."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.server.io.child import spawn

NICENESS: Final = 10
"""Index and directory work, for which no load waits."""
_RECEIVE_BYTES = 1 << 18
_PROCESSES_MAX = 2
"""That may be there: one that works, and one that was killed and hangs in the kernel."""


class ChildStream:
    """A child and its socket, one process at a time.

    `on_data` gets what it sends, and b"" once when it is gone. `paused` stops listening: what it sends then waits in
    the socket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_data: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._on_data = on_data
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._paused = False
        self._unsent = bytearray()
        self._ending: list[subprocess.Popen[bytes]] = []

    @property
    def running(self) -> bool:
        return self._socket is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def unsent(self) -> bool:
        """Return whether the child has not yet taken in all that it was sent."""
        return bool(self._unsent)

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        if value == self._paused or self._socket is None:
            return
        self._paused = value
        if value:
            self._loop.remove_reader(self._socket.fileno())
        else:
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def start(self, module: str, arguments: Callable[[int], Sequence[object]], *, niceness: int = NICENESS) -> None:
        """Start a process as `spawn` does. Raise OSError if the host has no room for one, or too many of these hang."""
        assert self._socket is None
        if self._hanging() >= _PROCESSES_MAX:
            raise OSError(errno.EAGAIN, f"{_PROCESSES_MAX} of them hang in the kernel")
        self._process, self._socket, pidfd = spawn(module, arguments, niceness=niceness)
        os.close(pidfd)
        self._unsent.clear()
        self._paused = False
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def receive(self) -> bytes:
        """Return the bytes that are there, or b"" at the end. Raise BlockingIOError if there are none.

        The caller has seen that the socket is readable.
        """
        assert self._socket is not None
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            raise
        except OSError:  # it died before it had read all: that is an end, too
            return b""

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def end(self) -> None:
        """Kill it. It dies at once, or hangs in the kernel: then it is reaped later, or by nobody."""
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._unsent.clear()
        assert self._process is not None
        self._process.kill()
        if self._process.poll() is None:
            self._ending.append(self._process)

    def _hanging(self) -> int:
        """Return how many killed processes have not ended yet. Reap those that have."""
        self._ending = [process for process in self._ending if process.poll() is None]
        return len(self._ending)

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
        try:
            data = self.receive()
        except BlockingIOError:
            return
        if not data:
            self.end()
        self._on_data(data)
