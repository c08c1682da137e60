"""The daemon's side of a checksum worker, of which the test is the worker, the kernel and the clock."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.server.daemon import checksums
from kvdepot.server.daemon.checksums import ChecksumService
from kvdepot.server.io.checksum_wire import ANSWERS, JOBS, Compare, Compared, Sum, Summed
from kvdepot.server.platform.deadline import Deadline

from tests.rigs.engine_rig import Rig


class Timer:
    """What the service wants to do later."""

    def __init__(self, seconds: float, what: Callable[[], None]) -> None:
        self.seconds, self.what = seconds, what
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Knows what is watched, and runs nothing."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.timers: list[Timer] = []
        self.readers: dict[int, Callable[[], None]] = {}
        self.writers: dict[int, Callable[[], None]] = {}

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, what: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, what))
        return self.timers[-1]

    def due(self, what: Callable[[], None]) -> list[float]:
        """Return in how many seconds each call of it is due."""
        return [timer.seconds for timer in self.timers if timer.what == what and not timer.cancelled]

    @property
    def deadlines(self) -> list[Timer]:
        """All timers of deadlines, cancelled ones too."""
        return [timer for timer in self.timers if isinstance(getattr(timer.what, "__self__", None), Deadline)]

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        self.writers[fd] = callback

    def remove_writer(self, fd: int) -> None:
        self.writers.pop(fd, None)


class Process:
    """A worker process that says what was done to it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.done: list[str] = []

    def kill(self) -> None:
        self.done.append("kill")

    def wait(self) -> int:
        self.done.append("wait")
        return -signal.SIGKILL


class Checksums:
    """A service with a started worker. `worker` is the worker's end of its socket."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.loop = Loop()
        self.quarantined: list[bytes] = []
        self.processes: list[Process] = []
        self.refusal: Exception | None = None
        """Of the next worker."""
        self.worker: socket.socket
        self._received = bytearray()
        monkeypatch.setattr(checksums, "spawn", self._spawn)
        loop: Any = self.loop
        arena: Any = SimpleNamespace(parts=((-1, rig.layout.data_bytes),))
        self.service = ChecksumService(
            arena=arena, depot=rig.depot, loop=loop, log=logging.getLogger("checksums"),
            quarantine=self.quarantined.append,
        )  # fmt: skip
        self.service.start()

    def _spawn(self, *_: object, **__: object) -> tuple[Process, socket.socket, int]:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        ours, self.worker = socket.socketpair()
        ours.setblocking(False)
        self.worker.setblocking(False)
        self._received.clear()
        self.processes.append(Process(100 + len(self.processes)))
        return self.processes[-1], ours, os.open(os.devnull, os.O_RDONLY)

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def handed_out(self) -> list[int]:
        """Return the rows that the worker has not answered."""
        return list(self.service._jobs)

    def jobs(self) -> list[tuple[int, Sum | Compare]]:
        """Return what the worker has been sent since the last time."""
        try:
            while data := self.worker.recv(1 << 20):
                self._received += data
        except BlockingIOError:
            pass
        return list(JOBS.take(self._received))

    def answer(self, *rows: int) -> None:
        """Answer for the worker that these are summed."""
        generation = self.rig.depot._ram.rows.generation
        self.say(b"".join(ANSWERS.pack(Summed(int(generation[row]), row, 1), row) for row in rows))

    def drift(self, row: int) -> None:
        """Answer for the worker that the object of this row is not what was computed again."""
        self.say(ANSWERS.pack(Compared(drifted=True, slices=4, beyond=1, worst=2.5), row))

    def say(self, data: bytes) -> None:
        self.worker.sendall(data)
        self.readable()

    def readable(self) -> None:
        assert self.service._socket is not None
        self.loop.readers[self.service._socket.fileno()]()

    def die(self) -> None:
        """The kernel says that the worker has ended."""
        self.loop.readers[self.service._pidfd]()

    def start_again(self) -> None:
        """The time until the next start is over."""
        (timer,) = [timer for timer in self.loop.timers if timer.what == self.service.start]
        self.loop.timers.remove(timer)
        timer.what()
