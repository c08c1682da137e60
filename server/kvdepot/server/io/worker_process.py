"""The daemon's end of one I/O worker process: made, told, listened to, ended, and proven dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvdepot.core.data_mapping import DataParts, pack_parts
from kvdepot.server.io.child import spawn
from kvdepot.server.io.jobs import ANSWERS, STARTED, Answer

_MODULE = "kvdepot.server.io.worker"
_NICENESS = 5
"""A lower priority than engines and daemon; loads still wait for it, so not much lower."""
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker inherits. Descriptors stay the caller's. `data`: of the arena; none where its jobs have no extents.

    `guard`: the token with which it enters the directory (`directory_guard`); empty where nobody guards it.
    `bucket`: packed `BucketSettings`, without secrets; empty where the files are the directory's.
    """

    directory: Path
    data: DataParts = ()
    guard: str = ""
    bucket: str = ""


class WorkerListener(Protocol):
    """The receiver of what a worker process sends, on the loop's thread."""

    def started(self, worker: WorkerProcess) -> None:
        """Take note that the worker takes jobs from now on."""

    def answered(self, worker: WorkerProcess, number: int, answer: Answer) -> None: ...

    def broken(self, worker: WorkerProcess, why: str) -> None:
        """Stop trusting the worker: it sent something that no worker sends."""

    def died(self, worker: WorkerProcess, status: int) -> None:
        """Take note that every thread of the worker has ended and that the process is reaped.

        Nothing that the worker was lent can change any more.
        """


class WorkerProcess:
    """One process. Raise OSError if the host has no room for one; nothing is left of it then."""

    def __init__(self, settings: WorkerSettings, loop: asyncio.AbstractEventLoop, listener: WorkerListener) -> None:
        self._loop = loop
        self._listener = listener
        self._unsent = bytearray()
        self._waiting = False  # for room in the socket
        self._received = bytearray()
        self._process, self._socket, self._pidfd = spawn(
            _MODULE,
            lambda socket_fd: (
                pack_parts(settings.data), socket_fd, os.getpid(), settings.directory, settings.guard,
                *((settings.bucket,) if settings.bucket else ()),
            ),
            tuple(fd for fd, _ in settings.data),
            niceness=_NICENESS,
        )  # fmt: skip
        self._open = True
        loop.add_reader(self._socket.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: bytes) -> None:
        """Send a job without blocking. What the socket does not take is kept and sent later."""
        self._unsent += frame
        self._flush()

    def kill(self) -> None:
        """Send SIGKILL without waiting. `died` follows when the kernel lets go of the process."""
        self._process.kill()

    def forget(self) -> None:
        """Stop listening, its death unproven."""
        if self._open:
            self._detach()

    def _flush(self) -> None:
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
        if not self._receive():  # its end: the pidfd is what proves it
            self._loop.remove_reader(self._socket.fileno())

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
            answers = list(ANSWERS.take(self._received))
        except Exception as error:  # noqa: BLE001 - a FrameError, or whatever else comes of such bytes
            self._loop.remove_reader(self._socket.fileno())
            self._listener.broken(self, str(error))
            return False
        for number, answer in answers:
            if number == STARTED:
                self._listener.started(self)
            else:
                self._listener.answered(self, number, answer)
        return bool(data)

    def _ended(self) -> None:
        while self._open and self._pending() and self._receive():  # what it sent before it died still counts
            pass
        if self._open:
            status = self._process.wait()
            self._detach()
            self._listener.died(self, status)

    def _pending(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def _detach(self) -> None:
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
