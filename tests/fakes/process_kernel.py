"""Pids, start times and pidfds of a kernel, behind the functions of `kvdepot.server.platform.processes`.

A process is a pipe and its pidfds are copies of the reading end: readable once the process has ended, as a real one
is, and with an inode that is the process's alone. So all that watches them is the daemon's own code.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from unittest import mock

from kvdepot.server.platform import processes

PIDS = range(10, 16)
"""So few that pids are used again."""


class Sight(Enum):
    """What the daemon sees of a process."""

    ALL = "all"
    PID = "pid"  # and no /proc/PID: hidepid
    NOTHING = "nothing"  # another PID namespace


def file_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode: files of two file systems, such as a pipe and a memfd, may have the same inode."""
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class Identity:
    """Who runs a process, and in which PID namespace: 0 is one that nobody sees."""

    uid: int = 0
    gid: int = 0
    pid_namespace: int = 0


@dataclass(eq=False)
class FakeProcess:
    pid: int
    ticks: int
    sight: Sight
    identity: Identity = Identity()
    ends: tuple[int, int] = field(default_factory=os.pipe)
    ended: bool = False

    @property
    def file(self) -> tuple[int, int]:
        return file_of(os.fstat(self.ends[0]))

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            os.write(self.ends[1], b"\0")

    def pidfd(self) -> int:
        return os.dup(self.ends[0])


class FakeKernel:
    """`names_peers`: SO_PEERPIDFD (6.5). `numbers`: pidfds have inodes (6.9)."""

    def __init__(self, *, names_peers: bool = True, numbers: bool = True) -> None:
        self.names_peers = names_peers
        self.numbers = numbers
        self.all: list[FakeProcess] = []
        self._ticks = itertools.count(1000)
        self._connections = itertools.count()
        self._peers: dict[bytes, FakeProcess] = {}  # by the address that the client's socket has

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        number = processes.process_number
        with (
            mock.patch.object(processes, "peer_credentials", self._peer_credentials),
            mock.patch.object(processes, "pid_namespace", self._pid_namespace),
            mock.patch.object(processes, "peer_pidfd", self._peer_pidfd),
            mock.patch.object(processes, "open_pidfd", self._open_pidfd),
            mock.patch.object(processes, "start_ticks", self._start_ticks),
            mock.patch.object(processes, "process_number", lambda fd: number(fd) if self.numbers else 0),
        ):
            yield

    def start(self, sight: Sight = Sight.ALL, identity: Identity = Identity()) -> FakeProcess:
        used = {one.pid for one in self.all if not one.ended}
        pid = next(pid for pid in itertools.chain(PIDS, itertools.count(100)) if pid not in used)
        process = FakeProcess(pid, next(self._ticks), sight, identity)
        self.all.append(process)
        return process

    def connect(self, process: FakeProcess, path: str) -> socket.socket:
        """A connection that is this process's."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0kvdepot-{os.getpid()}-{id(self)}-{next(self._connections)}".encode()
        self._peers[address] = process
        client.bind(address)
        client.connect(path)
        client.setblocking(False)
        return client

    def open_pidfds(self) -> Counter[FakeProcess]:
        """How many of each process somebody in this one has, beside the fake itself."""
        files = {one.file: one for one in self.all}
        found: Counter[FakeProcess] = Counter()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own
                one = files.get(file_of(path.stat()))
                if one is not None:
                    found[one] += 1
        found.subtract(dict.fromkeys(self.all, 2))
        return +found

    def close(self) -> None:
        for process in self.all:
            for fd in process.ends:
                os.close(fd)

    def _peer(self, connection: socket.socket) -> FakeProcess:
        return self._peers[connection.getpeername()]

    def _peer_credentials(self, connection: socket.socket) -> tuple[int, int, int]:
        peer = self._peer(connection)
        return self._seen_pid(peer), peer.identity.uid, peer.identity.gid

    def shown_namespace(self, process: FakeProcess) -> int:
        """What the daemon can find out: a pidfd shows it, and so does a pid that is visible."""
        shown = self.names_peers or process.sight is not Sight.NOTHING
        return process.identity.pid_namespace if shown else 0

    def _pid_namespace(self, pid: int, pidfd: int | None) -> int:
        if pidfd is None:
            process = self._living(pid)
        else:
            process = next(one for one in self.all if one.file == file_of(os.fstat(pidfd)))
        return 0 if process is None else process.identity.pid_namespace

    @staticmethod
    def _seen_pid(process: FakeProcess) -> int:
        return 0 if process.sight is Sight.NOTHING else process.pid

    def _peer_pidfd(self, connection: socket.socket, pid: int) -> int | None:
        return self._peer(connection).pidfd() if self.names_peers else self._open_pidfd(pid)

    def _living(self, pid: int) -> FakeProcess | None:
        seen = (one for one in self.all if self._seen_pid(one) == pid and not one.ended)
        return next(seen, None) if pid > 0 else None

    def _open_pidfd(self, pid: int) -> int | None:
        process = self._living(pid)
        return None if process is None else process.pidfd()

    def _start_ticks(self, pid: int) -> int | None:
        process = self._living(pid)
        return None if process is None or process.sight is Sight.PID else process.ticks
