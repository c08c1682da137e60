"""The driver's end of a fork server, and of the processes that it forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Final

from tests.rigs.fork_server import Client
from tests.rigs.patience import patient

ROOT: Final = Path(__file__).resolve().parents[2]
FORK_TIMEOUT_SECONDS = 120.0
"""The first copy waits for the server's own imports."""


def log_of(address: str) -> Path:
    """The log of the server that listens there."""
    return Path(address).with_name("fork.log")


class ForkingProcess:
    """A process that has imported something in one environment. It ends with this process, and every copy with it.

    Args:
        serve: module whose `serve` is called in that process, with two descriptors and `arguments`.
        environment: of the process, where it differs from the one that copies are asked for with.
    """

    def __init__(
        self, serve: str, environment: dict[str, str], arguments: Sequence[str] = (), directory: Path | None = None
    ) -> None:
        place = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.client = Client(str(place / "fork.sock"), environment)
        self._log = log_of(self.client.address)
        program = f"import sys; from {serve} import serve; serve(*map(int, sys.argv[1:3]), *sys.argv[3:])()"
        program += f"  # {'room for the commands of copies' * 128}"
        alive, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(self.client.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(listener.fileno()), str(alive), *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory or ROOT, env=environment,
                pass_fds=(listener.fileno(), alive),
            )  # fmt: skip
        os.close(alive)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def serves(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def fork(self, streams: list[int], payload: bytes) -> tuple[int, int]:
        """The pid of a new copy, and the descriptor that says its exit status. Raises NoForkError."""
        pid, status, parent = self.client.fork(streams, 0, payload, patient(FORK_TIMEOUT_SECONDS))
        os.close(parent)
        return pid, status

    def close(self) -> None:
        os.close(self._alive)
        self._process.wait(patient(30))


class ForkedProcess:
    """A child of the server, with the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, status: int, stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not wait([self._status], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            try:
                self._code = forkserver.read_signed(self._status)
            except EOFError:  # the server has ended, and killed it before
                self._code = -1
            os.close(self._status)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing once it has ended: its pid may be another process's."""
        if self.poll() is None:
            os.kill(self.pid, number)
