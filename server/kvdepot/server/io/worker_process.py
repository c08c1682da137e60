"""The daemon's end of one I/O worker process: made, told, listened to, ended, and proven dead."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvdepot.core.data_mapping import DataParts, pack_parts
from kvdepot.server.io.jobs import ANSWERS, STARTED, Answer
from kvdepot.server.io.proven_child import ProvenChild

_MODULE = "kvdepot.server.io.worker"
_MANY: Final = 8
"""Jobs with which a worker is busy for longer than its answers wait for each other."""
_NICENESS = 5
"""A lower priority than engines and daemon; loads still wait for it, so not much lower."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker inherits. Descriptors stay the caller's. `data`: of the arena; none where its jobs have no extents.

    `guard`: the token with which it enters the directory (`directory_guard`); empty where nobody guards it.
    `bucket`: packed `BucketSettings`, without secrets; empty where the files are not a bucket's. `peer`: packed
    `PeerSettings`, without secrets, too.
    """

    directory: Path
    data: DataParts = ()
    guard: str = ""
    bucket: str = ""
    peer: str = ""


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
        self._listener = listener
        self._unanswered = 0
        self._child = ProvenChild(
            _MODULE,
            lambda socket_fd: (
                pack_parts(settings.data), socket_fd, os.getpid(), settings.directory, settings.guard, settings.bucket,
                settings.peer,
            ),
            tuple(fd for fd, _ in settings.data),
            niceness=_NICENESS, loop=loop, listener=self, expects_more=lambda: self._unanswered >= _MANY,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, frame: bytes) -> None:
        """Send a job without blocking. What the socket does not take is kept and sent later."""
        self._unanswered += 1
        self.tell(frame)

    def tell(self, frame: bytes) -> None:
        """Send, as `send` does, what has no answer."""
        self._child.send(frame)

    def kill(self) -> None:
        """Send SIGKILL without waiting. `died` follows when the kernel lets go of the process."""
        self._child.kill()

    def forget(self) -> None:
        """Stop listening, its death unproven."""
        self._child.forget()

    def take(self, received: bytearray) -> list[tuple[int, Answer]]:
        return list(ANSWERS.take(received))

    def handle(self, number: int, message: Answer) -> None:
        if number == STARTED:
            self._listener.started(self)
        else:
            self._unanswered -= 1
            self._listener.answered(self, number, message)

    def broken(self, why: str) -> None:
        self._listener.broken(self, why)

    def died(self, status: int) -> None:
        self._listener.died(self, status)
