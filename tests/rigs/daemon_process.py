"""A real `kvdepotd serve` process on directories of its own, for every test that needs one."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, Protocol, Self

from tests.rigs import forked_program
from tests.rigs.arena_data import data_of
from tests.rigs.patience import Deadline, patient
from tests.rigs.stopping import stop

ARENA_FILES: Final = ("arena", "arena.hold", "arena.hold.lock", "arena.lock")
"""What a daemon without a state file of its own has in `arena_directory`, without the part before the first dot."""
START_SECONDS = 60.0
STOP_SECONDS = 20.0
_MEMORY = Path("/dev/shm")
_PROGRAM: Final = "kvdepot.server.daemon.app"
_SERVERS: Final = 2
_turns = itertools.count()


class Process(Protocol):
    """The part of `subprocess.Popen` that users of a daemon need."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: signal.Signals) -> None: ...


class DaemonProcess:
    """Start, stop, kill and restart one daemon. Sockets and arena live in `directory`, arena pages in memory.

    A start is a fork (`tests/rigs/forked_program.py`). Two servers take turns, so two nodes have other seeds of
    `hash()`, and so has a daemon that starts again. So are its children (`tests/rigs/forked_children.py`).
    `under` and `pass_fds` need a fresh process.

    To touch all pages is two thirds of the CPU time of a start. A fork for whose readiness a test waits does so only
    if `touched` says it: it grants no extent sooner, and pages come with the first write.
    """

    def __init__(
        self, *, ram: str = "320MiB", config: str | None = None, options: tuple[str, ...] = (),
        under: tuple[str, ...] = (), program: tuple[str, ...] = (_PROGRAM,), fresh: bool = False,
        touched: bool = False,
    ) -> None:  # fmt: skip
        """`under`: a module, with arguments, that runs the daemon's in its process.

        `program`: the module that is the daemon, with arguments that come before the daemon's own.
        `fresh`: no fork, so that it and its children share no memory with others.
        `touched`: the test is about the memory of the arena.

        It may be changed between two starts, and so may `pass_fds`: descriptors that the process gets as they are.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.arena_directory = Path(tempfile.mkdtemp(prefix="kvd", dir=_MEMORY if _MEMORY.is_dir() else "/tmp"))
        self.socket = self.directory / "d.sock"
        self.log_path = self.directory / "log"
        self.ram = ram  # so is this
        self._options = options
        self._fresh = fresh
        self.touched = touched  # and this
        self.config = config  # written at each start
        self.under = under
        self._program, *self._before = program
        self.pass_fds: tuple[int, ...] = ()
        self.process: Process | None = None
        self._turns = itertools.count(next(_turns))

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def attach_socket(self) -> Path:
        return self.socket.with_name("d.sock.attach")

    @property
    def admin_socket(self) -> Path:
        return self.socket.with_name("d.sock.admin")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def data(self) -> Path:
        return data_of(self.arena)

    @property
    def arena(self) -> Path:
        """Raises FileNotFoundError while there is none: before the first start has made it, and after a reboot."""
        for path in self.arena_directory.glob("*.arena"):
            return path
        raise FileNotFoundError(f"no arena in {self.arena_directory}")

    @property
    def arena_files(self) -> tuple[str, ...]:
        """To compare with ARENA_FILES."""
        return tuple(sorted(path.name.partition(".")[2] for path in self.arena_directory.iterdir()))

    @property
    def metrics(self) -> str:
        """Base URL of the HTTP listener of the latest run."""
        line = [line for line in self.log.splitlines() if "metrics on http://" in line][-1]
        return line.split("metrics on ")[1].split("/metrics")[0]

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", *self.under, self._program, *self._arguments(*options)]

    def _arguments(self, *options: str) -> list[str]:
        config = []
        if self.config is not None:
            path = self.directory / "kvdepot.toml"
            path.write_text(self.config)
            config = [str(path)]
        own = ["--socket", str(self.socket), "--arena-dir", str(self.arena_directory)]
        own += ["--ram", self.ram, "--metrics", "127.0.0.1:0"]
        own += [] if config else ["--disk", ""]
        return [*self._before, "serve", *config, *own, *self._options, *options]

    def start(self, *, ready: bool = True, options: tuple[str, ...] = ()) -> Self:
        """Returns when the daemon is ready to serve. Raises AssertionError with its log when it is not.

        `options` come last on its command line.
        """
        assert self.process is None
        before = len(self.log)
        with self.log_path.open("ab") as log, Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            if not (self.under or self.pass_fds or self._fresh):
                number = next(self._turns) % _SERVERS
                self.process = forked_program.start(
                    self._program, self._arguments(*options), streams, server_number=number,
                    untouched=ready and not self.touched,
                )  # fmt: skip
            if self.process is None:
                self.process = subprocess.Popen(
                    self.command(*options), stdout=log, stderr=log, stdin=nothing, pass_fds=self.pass_fds
                )
        if ready:
            self.wait_for_log("metrics on http://", before)
            self.wait_for_log("arena populated", before)
            self.wait_for_log("ready to serve", before)
        return self

    def wait_for_log(self, text: str, start: int = 0) -> None:
        """Wait until `text` is in the log after its first `start` characters."""
        until = Deadline(START_SECONDS)
        while text not in self.log[start:]:
            assert self.process is None or self.process.poll() is None, f"the daemon ended:\n{self.log}"
            assert not until.is_over(), f"no {text!r} in:\n{self.log}"
            time.sleep(0.01)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL; returns the exit code."""
        return self._end(signal.SIGKILL)

    def suspend(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(patient(STOP_SECONDS))
        self.process = None
        return code

    def close(self) -> None:
        """End it and remove what it left."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.process = None
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.arena_directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # what does not begin must not stay either
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
