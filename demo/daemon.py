"""kvdepotd as a process that can be watched, stopped, killed and started again on its arena."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from kvdepot.client.ctl.calls import Operator
from kvdepot.core.report import DaemonStatus

START_TIMEOUT_SECONDS = 60.0
SETTLE_TIMEOUT_SECONDS = 60.0
RELEASE_TIMEOUT_SECONDS = 2.0
QUIET_SECONDS = 0.3
_POLL_SECONDS = 0.02


class DaemonProcessError(RuntimeError):
    """kvdepotd did not start, stop or settle in time. The message says where its log is."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the daemon has given to engines since its start, by its own counters."""

    tokens: int
    bytes: int

    def since(self, earlier: Served) -> Served:
        return Served(self.tokens - earlier.tokens, self.bytes - earlier.bytes)


class Daemon:
    """One kvdepotd and the folder it lives in; `close` removes both, and the arena.

    Without a configuration the daemon runs on its embedded default, with the folder as
    runtime directory; else `configuration` is TOML that starts inside the `[ram]` table.
    """

    def __init__(
        self, configuration: str | None = None, patience: Callable[[], float] = lambda: 1.0, *, of_daemon: str = "",
        program: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Make its folders.

        Args:
            patience: how many times as long as usual things may take now, asked again and again during each wait.
            of_daemon: TOML of the `[daemon]` table, beside a configuration.
            program: what runs it instead of `kvdepotd`, before its arguments.
        """
        self._patience = patience
        self._program = program or (str(Path(sys.executable).parent / "kvdepotd"),)
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.memory = Path(tempfile.mkdtemp(prefix="kvd-", dir="/dev/shm"))
        self.log = self.directory / "kvdepotd.log"
        self.socket = self.directory / "kvdepot" / "kvdepot.sock"
        self.socket.parent.mkdir(mode=0o700)
        self._arguments: list[str] = []
        if configuration is not None:
            file = self.directory / "kvdepot.toml"
            file.write_text(
                f'[daemon]\nlisten = ["{self.endpoint}"]\nmetrics = "127.0.0.1:0"\n{of_daemon}'
                f'[ram]\npath = "{self.memory}"\n{configuration}'
            )
            self._arguments = [str(file)]
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Returns once the daemon says that it is ready.

        It has a process group of its own and no session: Linux shares processors out by session (sched(7), autogroup),
        and a worker of vLLM that spins by sched_yield(2), the only one of its session that wants a processor, yields to
        nobody then. On two cores threads of other engines waited for seconds.
        """
        assert self._process is None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program, "serve", *self._arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                env=os.environ | {
                    "XDG_RUNTIME_DIR": str(self.directory), "XDG_CACHE_HOME": str(self.directory),
                    "PYTHONFAULTHANDLER": "1",
                },
            )  # fmt: skip
        try:
            self.wait(lambda status: status.ready, START_TIMEOUT_SECONDS, "ready")
        except DaemonProcessError as error:
            error.add_note(self._end_with_stacks())
            raise
        return self

    def _end_with_stacks(self) -> str:
        """End a daemon that does not become ready. Return what its log says then: where each thread was."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGABRT)
            process.wait(30 * self._patience())
        return self.log_tail(100)

    @property
    def arena(self) -> Path:
        """The file of the arena's tables, by the daemon's own rule."""
        from kvdepot.server.config.config import embedded

        place: dict[str, dict[str, Any]] = {"daemon": {"listen": [self.endpoint]}}
        if self._arguments:
            place["ram"] = {"path": str(self.memory)}
        return embedded(place).arena_path

    def status(self, timeout_seconds: float = 30.0) -> DaemonStatus:
        """Raises grpc.RpcError while the daemon does not answer."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(
                f"unix:{self.socket}.admin",
                options=[("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)],
            )
        return Operator(self._channel, timeout_seconds).status()

    def served(self) -> Served:
        """Up to now. A hit is counted when its load is over, which an engine says a moment behind the request's end.

        That is waited for, but not for long: a test may have a rank held up in the middle of a load.
        """

        def over(status: DaemonStatus) -> bool:
            ended = sum(status.counters.get(f"released_loads.{use}", 0) for use in ("used", "unused"))
            return ended >= status.counters.get("acquires.granted", 0)

        try:
            counters = self.wait(over, RELEASE_TIMEOUT_SECONDS, "done with all loads").counters
        except DaemonProcessError:
            counters = self.status().counters
        return Served(int(counters.get("hit_tokens", 0)), int(counters.get("granted_read_bytes", 0)))

    def wait(self, condition: Callable[[DaemonStatus], bool], timeout_seconds: float, what: str) -> DaemonStatus:
        """The first status for which `condition` holds. Raises DaemonProcessError after the timeout."""
        left, seen_at = timeout_seconds, time.monotonic()
        status: DaemonStatus | None = None
        while left > 0:
            if self._process is not None and self._process.poll() is not None:
                raise DaemonProcessError(f"kvdepotd exited with {self._process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(grpc.RpcError):
                status = self.status()
                if condition(status):
                    return status
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            left -= (now - seen_at) / self._patience()
            seen_at = now
        raise DaemonProcessError(f"not {what} within {timeout_seconds} s; last status: {status}\n{self.log_tail()}")

    def settle(
        self, objects_min: int = 0, *, summed: bool = False, timeout_seconds: float = SETTLE_TIMEOUT_SECONDS
    ) -> DaemonStatus:
        """Wait until nothing is lent, reserved or unverified, for a while, with at least `objects_min` objects there.

        Stores happen after a request's last token: whoever resets or restarts something
        and expects hits has to wait for the commits first; and, with `summed`, for the
        checksums, without which a killed daemon's successor keeps nothing.
        """
        quiet_since: float | None = None

        def settled(status: DaemonStatus) -> bool:
            nonlocal quiet_since
            ram = status.tiers[0]
            enough = ram.objects >= objects_min and not (summed and ram.pending_checksums)
            if not enough or not is_idle(status):
                quiet_since = None
                return False
            quiet_since = quiet_since or time.monotonic()
            return time.monotonic() - quiet_since >= QUIET_SECONDS * self._patience()

        return self.wait(settled, timeout_seconds, f"settled with {objects_min} objects or more")

    def wait_attached(self, engines: int, timeout_seconds: float = START_TIMEOUT_SECONDS) -> DaemonStatus:
        """Wait until `engines` sessions have a scheduler and all their ranks."""

        def attached(status: DaemonStatus) -> bool:
            complete = [s for s in status.sessions if s.scheduler_attached and s.ranks_attached == s.world_size]
            return len(complete) == len(status.sessions) == engines

        return self.wait(attached, timeout_seconds, f"attached to {engines} engines")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the daemon alone; its checksum worker has to notice by itself."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(30 * self._patience())

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        process, self._process = self._process, None
        assert process is not None
        process.terminate()
        return process.wait(60 * self._patience())

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def close(self) -> None:
        arena = self.arena
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self.kill()
        if self._channel is not None:
            self._channel.close()
        for file in arena.parent.glob(f"{arena.name}*"):  # its lock, its holder's socket
            file.unlink(missing_ok=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_idle(status: DaemonStatus) -> bool:
    """Nothing lent or reserved, and every adopted object verified."""
    sessions_idle = all(not s.leases and not s.credit_used_bytes and not s.lent_objects for s in status.sessions)
    tier = status.tiers[0]
    return sessions_idle and not tier.lent_bytes and not tier.unverified_objects
