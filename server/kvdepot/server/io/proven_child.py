"""The daemon's end of a child process that is lent something: told, listened to, ended, and proven dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from kvdepot.server.io.child import spawn

_RECEIVE_BYTES = 1 << 16
_PAUSE_SECONDS: Final = 0.001
"""What messages wait for others, so that all are taken at once: each receipt costs the loop as much as a message."""


M = TypeVar("M")


class ChildListener(Protocol[M]):
    """The receiver of what a child sends, on the loop's thread."""

    def take(self, received: bytearray) -> list[tuple[int, M]]:
        """Take number and message of each whole frame from the start of `received`. Raise for bytes that are none."""

    def handle(self, number: int, message: M) -> None: ...

    def broken(self, why: str) -> None:
        """Stop trusting the child: it sent something that no such child sends."""

    def died(self, status: int) -> None:
        """Take note that every thread of the child has ended and that the process is reaped.

        Nothing that the child was lent can change any more.
        """


class ProvenChild:
    """One process. Raise OSError if the host has no room for one; nothing is left of it then."""

    def __init__(
        self, module: str, arguments: Callable[[int], Sequence[object]], fds: Sequence[int], *, niceness: int,
        loop: asyncio.AbstractEventLoop, listener: ChildListener[Any],
        expects_more: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Start it as `spawn` does. `expects_more`: whether the message that has come may wait for others."""
        self._loop = loop
        self._listener = listener
        self._expects_more = expects_more
        self._unsent = bytearray()
        self._flushing = False  # at the end of this turn
        self._waiting = False  # for room in the socket
        self._pause: asyncio.TimerHandle | None = None  # nothing is received before
        self._received = bytearray()
        self._process, self._socket, self._pidfd = spawn(module, arguments, fds, niceness=niceness)
        self._open = True
        loop.add_reader(self._socket.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unsent(self) -> bool:
        """Return whether the socket has no room for all that the child was sent."""
        return self._waiting

    def send(self, frame: bytes) -> None:
        """Send a frame without blocking, with all others of this turn. What the socket does not take is sent later."""
        self._unsent += frame
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def kill(self) -> None:
        """Send SIGKILL without waiting. `died` follows when the kernel lets go of the process."""
        self._process.kill()

    def forget(self) -> None:
        """Stop listening, its death unproven."""
        if self._open:
            self._detach()

    def _flush(self) -> None:
        self._flushing = False
        if not self._open:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # it died: its pidfd is ready next
            sent = len(self._unsent)
        del self._unsent[:sent]
        if bool(self._unsent) != self._waiting:
            self._waiting = bool(self._unsent)
            if self._waiting:
                self._loop.add_writer(self._socket.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        if self._expects_more():
            self._loop.remove_reader(self._socket.fileno())
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
        elif not self._receive():  # its end: the pidfd is what proves it
            self._loop.remove_reader(self._socket.fileno())

    def _resume(self) -> None:
        self._pause = None
        if self._receive() and self._open:
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _receive(self) -> bool:
        """Take what is there. False at the end of the stream."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += data
        try:
            messages = self._listener.take(self._received)
        except Exception as error:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
            self._loop.remove_reader(self._socket.fileno())
            self._listener.broken(str(error))
            return False
        for number, message in messages:
            self._listener.handle(number, message)
        return bool(data)

    def _ended(self) -> None:
        while self._open and self._pending() and self._receive():  # what it sent before it died still counts
            pass
        if self._open:
            status = self._process.wait()
            self._detach()
            self._listener.died(status)

    def _pending(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def _detach(self) -> None:
        self._open = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
