"""Fork processes from one that has imported what they need, instead of starting each of them fresh.

`Client` asks, `Server` forks. The server's process has imported a program and does nothing else. A copy gets the
environment, directory and standard streams that it is asked for with. It is a child of the server, which passes its
exit status on.

Fork is safe while the forking process has one thread: `check_forkable` refuses otherwise. So gRPC and pools of threads
begin in the copies. Copies share the server's seed of `hash()`, and what modules read of the environment when they were
imported.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

STREAMS: Final = (0, 1, 2)
_FDS_MAX: Final = 64


class NoForkError(RuntimeError):
    """The server forks nothing in the state in which it is, or for this process."""


class Client:
    """What a process needs to have copies forked."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        self.address = address
        self.environment = environment  # that the server was started for

    def fork(self, fds: list[int], group: int, payload: bytes, timeout_seconds: float | None) -> tuple[int, int, int]:
        """The pid of a new copy, the descriptor that says its exit status, and one that it sees closed at our end.

        `group`: process group that the copy joins; 0 for a copy that leads a new one.
        """
        status_r, status_w = os.pipe()
        data_r, data_w = os.pipe()
        sentinel = os.dup(data_w)
        try:
            with os.fdopen(data_w, "wb") as file:
                try:
                    with socket.socket(socket.AF_UNIX) as server:
                        server.connect(self.address)
                        socket.send_fds(server, [group.to_bytes(8, "little")], [data_r, status_w, *fds])
                finally:
                    close_all(data_r, status_w)
                file.write(payload)
            if not wait([status_r], timeout_seconds):
                raise NoForkError(f"no answer within {timeout_seconds} s")
            return forkserver.read_signed(status_r), status_r, sentinel
        except BaseException as error:
            close_all(status_r, sentinel)
            if isinstance(error, EOFError | OSError):
                raise NoForkError(f"{error!r}: see the server's log") from error
            raise


def close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def check_forkable() -> None:
    tasks = len(list(Path("/proc/self/task").iterdir()))
    if tasks != 1 or threading.active_count() != 1:
        raise NoForkError(f"{tasks} threads, of Python's: {[thread.name for thread in threading.enumerate()]}")


class Server:
    """Forks copies until the driver's end of `alive_fd` is closed, and then ends those that are left.

    Args:
        work: the job of a copy, with the descriptor of what was sent and those that came with the streams.
        whole_groups: whether a copy that is killed takes its process group with it.
    """

    def __init__(
        self, listener: socket.socket, alive_fd: int, work: Callable[[int, list[int]], Any], *, whole_groups: bool
    ) -> None:
        self._listener = listener
        self._work = work
        self._alive_fd = alive_fd
        self._whole_groups = whole_groups
        self._statuses: dict[int, int] = {}  # by the pids of copies: where their exit status is awaited
        self._fronts: set[int] = set()  # leaders of groups
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    def run(self) -> Callable[[], Any]:
        """Return what the calling process then has to do: in a copy its job, in the server nothing."""
        for number in (signal.SIGINT, signal.SIGTERM):  # of Ctrl-C and `timeout`, to the group: the driver's to handle
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._alive_fd, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._alive_fd in ready:
                    for pid in self._statuses:
                        os.killpg(os.getpgid(pid), signal.SIGKILL)
                    shutil.rmtree(Path(self._listener.getsockname()).parent)
                    return lambda: None
                if self._woken in ready:
                    os.read(self._woken, 1 << 16)
                    self._reap()
                elif self._listener.fileno() in ready:
                    job = self._answer()
                    if job is not None:
                        return job

    def _reap(self) -> None:
        while self._statuses:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            if ended.si_pid in self._fronts:
                self._fronts.remove(ended.si_pid)
                if self._whole_groups and ended.si_code == os.CLD_KILLED:  # with what joined its group since
                    os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            where = self._statuses.pop(ended.si_pid)
            with contextlib.suppress(BrokenPipeError):
                forkserver.write_signed(where, os.waitstatus_to_exitcode(status))
            os.close(where)

    def _answer(self) -> Callable[[], Any] | None:
        """In the new copy: its job."""
        with self._listener.accept()[0] as asking:
            message, fds, _, _ = socket.recv_fds(asking, 8, _FDS_MAX)
        group, (data, status, *inherited) = int.from_bytes(message, "little"), fds
        try:
            check_forkable()
            if group and group not in self._fronts:
                raise NoForkError(f"process group {group} has ended")
        except NoForkError as refused:
            print(refused, file=sys.stderr, flush=True)
            close_all(*fds)
            return None
        pid = os.fork()
        if not pid:
            os.setpgid(0, group)
            self._leave(status, inherited[: len(STREAMS)])
            return lambda: self._work(data, inherited[len(STREAMS) :])
        os.setpgid(pid, group or pid)  # both: neither knows which comes first
        self._statuses[pid] = status
        if not group:
            self._fronts.add(pid)
        with contextlib.suppress(BrokenPipeError):
            forkserver.write_signed(status, pid)
        close_all(data, *inherited)
        return None

    def _leave(self, status: int, streams: list[int]) -> None:
        """In a copy: let go of what is the server's, and take the streams that were sent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listener.close()
        close_all(self._alive_fd, self._woken, self._wake, status, *self._statuses.values())
        for number, stream in zip(STREAMS, streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
