"""The daemon's side of the checksum worker: jobs, answers, and the replacement of a dead worker."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from math import inf

from kvdepot.core.calls import Kind
from kvdepot.core.data_mapping import pack_parts
from kvdepot.server.arena.arena_file import ArenaFile
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import Drift
from kvdepot.server.io.checksum_wire import ANSWERS, JOBS, Compare, Compared, Sum, Summed
from kvdepot.server.io.child import spawn
from kvdepot.server.io.framing import FrameError
from kvdepot.server.platform.backoff import Backoff
from kvdepot.server.platform.deadline import Deadline
from kvdepot.server.platform.guard import engine_guard

_JOBS_MAX = 64
_JOB_BYTES_MAX = 256 << 20
"""What the worker has before it: deep enough that it never waits for the loop, bounded because it stays lent."""
ANSWER_SECONDS_MAX = 60.0
"""Between two answers of a worker that has something to do: some milliseconds, more where it gets little of the CPU.
A worker that is stopped, or hangs, would keep for ever what it is lent; dead, it keeps nothing."""
_MODULE = "kvdepot.server.io.checksum_worker"
_NICENESS = 19
_DRIFT_LOG_SECONDS = 60.0
"""At most one line of drift so often; the next one says how many there were."""


class ChecksumService:
    """Owns the worker process. `wake` hands it what there is; everything runs on the loop's thread.

    `quarantine` is told of the namespace of an object that is not what an engine computed again.

    A dead worker's death is proven (it is a child, reaped here) before its objects go to the next one.
    """

    def __init__(
        self, *, arena: ArenaFile, depot: Depot, loop: asyncio.AbstractEventLoop, log: logging.Logger,
        quarantine: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        self._arena = arena
        self._depot = depot
        self._loop = loop
        self._log = log
        self._guard = engine_guard(depot.counters.add)
        self._quarantine = quarantine
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._jobs: dict[int, int] = {}  # row -> bytes
        self._unsent = bytearray()
        self._received = bytearray()
        self._backoff = Backoff()
        self._started_at = 0.0
        self._respawn: asyncio.TimerHandle | None = None
        self._overdue: Deadline | None = None  # while it has something to do
        self._drifts = 0  # since the last line
        self._drift_logged_at = -inf

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def drained(self) -> bool:
        """Return whether every committed object has a checksum."""
        self.wake()
        return not self._depot.unsummed

    def start(self) -> None:
        """Start a worker; where the host has no room for one now, try again later."""
        try:
            self._process, self._socket, self._pidfd = spawn(
                _MODULE,
                lambda socket_fd: (pack_parts(self._arena.parts), socket_fd, os.getpid()),
                tuple(fd for fd, _ in self._arena.parts),
                niceness=_NICENESS,
            )
        except Exception as error:  # noqa: BLE001 - an OSError, or whatever it is: tried again
            if not isinstance(error, OSError):
                self._guard.caught("checksums", error)
            self._start_later(f"cannot start: {error}")
            return
        self._started_at = self._loop.time()
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._died)
        self.wake()

    def wake(self) -> None:
        """Hand out objects while the worker has room before it."""
        if self._socket is None:
            return
        self._guard.each("checksums", self._take_sums, self._take_comparisons)
        if self._jobs and self._overdue is None:
            self._overdue = Deadline(self._loop, ANSWER_SECONDS_MAX, self._miss_deadline)
        self._send()

    def _take_sums(self) -> None:
        """Send objects to the worker.

        One that cannot be packed stays lent until the worker ends, so that others come first.
        """
        job_bytes = sum(self._jobs.values())
        while len(self._jobs) < _JOBS_MAX and job_bytes < _JOB_BYTES_MAX:
            job = self._depot.next_to_sum()
            if job is None:
                break
            self._unsent += JOBS.pack(Sum(job.generation, job.extents), job.row)
            self._jobs[job.row] = size_bytes = sum(length for _, length in job.extents)
            job_bytes += size_bytes

    def _take_comparisons(self) -> None:
        while (pair := self._depot.next_to_compare()) is not None:  # few, by the audit's own limits
            job = Compare(pair.stored, pair.recomputed, pair.runs)
            self._unsent += JOBS.pack(job, pair.row)
            self._jobs[pair.row] = 2 * sum(length for _, length in pair.stored)

    def close(self) -> None:
        """End the worker. What it was lent stays written down as lent, as after a crash."""
        if self._respawn is not None:
            self._respawn.cancel()
        if self._process is not None:
            self._detach()
            self._process.kill()
            self._process.wait()
            self._depot.sum_worker_died()
            self._process = None

    def _send(self) -> None:
        assert self._socket is not None
        if not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # it died: the pidfd says so next
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._send)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # its end: the pidfd is what proves it
            self._loop.remove_reader(self._socket.fileno())
            return
        self._received += data
        try:
            answers = list(ANSWERS.take(self._received))
        except FrameError as error:  # it is not to be trusted with anything: its death ends its loans
            self._loop.remove_reader(self._socket.fileno())
            self._kill(f"it sent {error}")
            return
        for row, answer in answers:
            self._jobs.pop(row, None)
            self._guard.call("checksums", self._answered, row, answer)
        if answers:
            self._end_deadline()
        self.wake()

    def _answered(self, row: int, answer: Summed | Compared) -> None:
        if isinstance(answer, Summed):
            self._depot.summed(row, answer.generation, answer.low, answer.high)
            return
        drift = self._depot.compared(row, drifted=answer.drifted)
        if drift is not None:
            self._guard.call("checksums", self._quarantine, drift.namespace_id)
            self._log_drift(drift, answer)

    def _log_drift(self, drift: Drift, measured: Compared) -> None:
        self._drifts += 1
        if self._loop.time() - self._drift_logged_at < _DRIFT_LOG_SECONDS:
            return
        files = f"; not deleted: files of tier {', '.join(drift.shared_tiers)}" if drift.shared_tiers else ""
        self._log.error(
            "audit: %s of chunk %s in namespace %s differs from what an engine computed again: %d of %d slices beyond"
            " tolerance, at most by %.2f; dropped %d chunks%s; %d differences since the last line",
            Kind(drift.kind).name.lower(), drift.key.hex(), drift.namespace_id.hex(), measured.beyond, measured.slices,
            measured.worst, drift.chunks, files, self._drifts,
        )  # fmt: skip
        self._drifts, self._drift_logged_at = 0, self._loop.time()

    def _miss_deadline(self) -> None:
        self._kill(f"{len(self._jobs)} jobs, no answer for {ANSWER_SECONDS_MAX:.0f} s")

    def _kill(self, why: str) -> None:
        """Kill the worker. Its loans end with its proven death (I6)."""
        assert self._process is not None
        self._log.warning("checksum worker killed: pid %d, %s", self._process.pid, why)
        self._process.kill()

    def _end_deadline(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _died(self) -> None:
        assert self._process is not None
        self._detach()
        status = self._process.wait()
        self._process = None
        self._guard.call("checksums", self._depot.sum_worker_died)
        self._backoff.ran(self._loop.time() - self._started_at)
        self._start_later(f"status {status}")

    def _start_later(self, why: str) -> None:
        seconds = self._backoff.next_seconds()
        self._log.warning("checksum worker ended: %s, restart in %.1f s", why, seconds)
        self._respawn = self._loop.call_later(seconds, self.start)

    def _detach(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._end_deadline()
        self._jobs.clear()
        self._unsent.clear()
        self._received.clear()
