"""The worker processes of a pool: made, registered, ended, and replaced after a while.

A worker is *starting* until its process says that it is up. It is *serving* while it is given jobs, and *leaving* when
it gets no more: it finishes what it has, or was killed and hangs in the kernel. It is forgotten when its death is
proven.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from kvdepot.core.errors import NoRoom
from kvdepot.server.io.jobs import JOBS, ServePeer
from kvdepot.server.io.worker_jobs import NO_NUMBER, Worker
from kvdepot.server.io.worker_process import WorkerListener, WorkerProcess, WorkerSettings
from kvdepot.server.platform.backoff import Backoff
from kvdepot.server.platform.deadline import Deadline
from kvdepot.server.platform.guard import Guard
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.storage.base import WorkerRegistry

START_SECONDS: Final = 20.0
"""What the start of a worker may take. It touches nothing of the path, and so says nothing about it.

It needs a tenth of a second of CPU. On a host with too much to do that comes late, and no worker would ever start if
each one had the same time: so the next one has twice as much, until one has started.
"""
START_SECONDS_MAX: Final = 160.0
HANG_SECONDS: Final = 5.0
"""A killed worker that is not dead by then hangs in the kernel. A busy host needs a part of it to end a process."""
_LATE_STARTS_MAX: Final = 10
_LATE_STARTS_MIN: Final = 2
"""Jobs wait for the worker after a late one. They do not wait after two in a row."""
_PATIENCE_SECONDS: Final = 1.0
"""Jobs wait so long for a worker that has to be started again."""


class CrewListener(WorkerListener, Protocol):
    """The pool."""

    def start(self) -> None:
        """Make the workers that are missing: the time to wait after a failure is over."""

    def start_overdue(self, worker: Worker, why: str) -> None:
        """Take note that the worker did not start in time and was killed."""


class Crew:
    """The workers of one path. Their jobs are the pool's."""

    def __init__(
        self, settings: WorkerSettings, *, listener: CrewListener, registry: WorkerRegistry | None,
        loop: asyncio.AbstractEventLoop, log: logging.Logger, count: Callable[[str, float], None], guard: Guard,
    ) -> None:  # fmt: skip
        self.workers: dict[WorkerProcess, Worker] = {}
        """All whose death is not proven."""
        self.serving: list[Worker] = []
        self.leaving: list[Worker] = []
        self.prober: Worker | None = None
        """Neither of the two: it does the probe alone."""
        self._settings = settings
        self._listener = listener
        self._registry = registry
        self._loop = loop
        self._log = log
        self._count = count
        self._guard = guard
        self._throttle = LogThrottle(loop.time)
        self._backoff = Backoff()
        self._late_starts = 0  # in a row
        self._failure = ""  # of the last worker; empty once one has started, or if jobs can wait for the next one
        self._respawn: asyncio.TimerHandle | None = None
        self._closed = False

    def renew(self, guard: str, peer: str = "") -> None:
        """Let workers that are made from now on enter the directory with this token, or have this peer."""
        self._settings = replace(self._settings, guard=guard, peer=peer or self._settings.peer)

    def serve_peer(self, path: Path, peer: str) -> None:
        """Have all workers serve this peer (packed `PeerSettings`). None of them has had a job yet."""
        self._settings = replace(self._settings, directory=path, peer=peer)
        frame = JOBS.pack(ServePeer(peer))
        for worker in tuple(self.workers.values()):
            if not self._guard.call("naming a peer", worker.process.tell, frame):
                self.kill(worker)

    def spawn(self) -> Worker | None:
        """Return None where there is no room for another process now. Another is tried later."""
        now = self._loop.time()
        try:
            process = WorkerProcess(self._settings, self._loop, self._listener)
        except Exception as error:  # noqa: BLE001 - there is no room, or whatever it is
            self._cannot("started", error)
            return None
        worker = Worker(process, NO_NUMBER, now)
        self.workers[process] = worker
        try:
            if self._registry is not None:
                worker.number = self._registry.started(process.pid)
        except Exception as error:  # noqa: BLE001 - the table is full, or whatever it is
            self.kill(worker)
            self._cannot("registered", error)
            return None
        self._count("io_workers.started", 1)
        seconds = min(START_SECONDS * 2**self._late_starts, START_SECONDS_MAX)
        worker.start_timer = Deadline(self._loop, seconds, self._start_overdue, worker, seconds)
        return worker

    @property
    def why_none_serves(self) -> str:
        """Return why no worker is given jobs; empty if one is, or if jobs can wait for one that starts.

        After a failure that is not over soon, a worker that starts is no reason to queue jobs: it may fail like the
        last one, after minutes.
        """
        for worker in self.serving:
            if worker.up:
                return ""
        if self.serving or self.waits:
            return f"no worker serves: {self._failure}" if self._failure else ""
        return f"all {len(self.leaving)} workers hang in the kernel" if self.leaving else "no worker was started"

    def free(self, quick_seconds: float) -> Worker | None:
        """Return a free worker, but none that is starting: until it has started, another may be free."""
        quick_since = self._loop.time() - quick_seconds
        free = [worker for worker in self.serving if worker.up and worker.takes_more(quick_since)]
        return min(free, key=lambda worker: len(worker.inflight), default=None)

    def started(self, process: WorkerProcess) -> Worker:
        worker = self.workers[process]
        worker.up = True
        self._late_starts, self._failure = 0, ""
        self._end_start(worker)
        return worker

    def leave(self, worker: Worker) -> None:
        """Give this worker no more jobs."""
        self._move(worker, self.leaving)

    def kill(self, worker: Worker) -> None:
        """Kill a worker without waiting for its death."""
        self.leave(worker)
        self._end_start(worker)
        if not worker.killed:
            worker.killed = True
            worker.process.kill()
            worker.death_timer = self._loop.call_later(HANG_SECONDS, self._abandoned, worker)

    def retire(self) -> None:
        """Give no more jobs to workers of before. Idle ones are killed at once. A prober answers, and ends."""
        for worker in (*self.serving, *((self.prober,) if self.prober is not None else ())):
            if worker.inflight:
                self.leave(worker)
            else:
                self.kill(worker)

    def remove(self, process: WorkerProcess) -> Worker:
        """Remove a worker whose death is proven. `unregister` is due when the worker holds nothing any more."""
        worker = self.workers.pop(process)
        self._end_start(worker)
        if worker.death_timer is not None:
            worker.death_timer.cancel()
        self._move(worker, None)
        return worker

    def unregister(self, worker: Worker) -> None:
        if self._registry is not None and worker.number != NO_NUMBER:
            self._guard.call("a worker's death", self._registry.dead, worker.number)

    def start_later(self, crashed: Worker | None, why: str) -> None:
        """Have the listener start workers after a while, which grows unless the one that crashed was stable."""
        if self._closed or self._respawn is not None:
            return
        if crashed is not None:
            self._backoff.ran(self._loop.time() - crashed.started_at)
        seconds = self._backoff.next_seconds()
        if seconds > _PATIENCE_SECONDS:
            self._failure = why
        self._log.warning("%s: %s; the next one starts in %.1f s", self._settings.directory, why, seconds)
        self._respawn = self._loop.call_later(seconds, self._start)

    def forget(self) -> None:
        """Stop listening to all workers. The deaths of those that hang stay unproven, as after a crash."""
        for process in self.workers:
            process.forget()

    def close(self) -> None:
        """Make no further workers."""
        self._closed = True
        if self._respawn is not None:
            self._respawn.cancel()

    @property
    def waits(self) -> bool:
        """Return whether the next worker is only made after a pause, because of a failure."""
        return self._respawn is not None

    def _start(self) -> None:
        self._respawn = None
        self._listener.start()

    def _cannot(self, what: str, error: Exception) -> None:
        if not isinstance(error, OSError | NoRoom):
            self._guard.caught(f"a worker that is to be {what}", error)
        why = error.message if isinstance(error, NoRoom) else str(error)
        self.start_later(None, f"an I/O worker cannot be {what}: {why}")

    def _start_overdue(self, worker: Worker, seconds: float) -> None:
        why = f"I/O worker {worker.process.pid} has not started within {seconds:g} s"
        self._late_starts = min(self._late_starts + 1, _LATE_STARTS_MAX)
        if self._late_starts >= _LATE_STARTS_MIN:
            self._failure = why
        self._count("io_workers.overdue", 1)
        self.kill(worker)
        self.start_later(None, why)
        self._listener.start_overdue(worker, why)

    def _abandoned(self, worker: Worker) -> None:
        """Note that a killed worker is not dead: it hangs in the kernel, with what it was lent."""
        self._count("io_workers.abandoned", 1)
        if self._throttle.due("hangs"):  # probes of a path that is disabled hang too
            pid, directory = worker.process.pid, self._settings.directory
            self._log.warning("%s: I/O worker %d was killed and is not dead: it hangs in the kernel", directory, pid)

    @staticmethod
    def _end_start(worker: Worker) -> None:
        if worker.start_timer is not None:
            worker.start_timer.cancel()

    def _move(self, worker: Worker, to: list[Worker] | None) -> None:
        for workers in (self.serving, self.leaving):
            if worker in workers:
                workers.remove(worker)
        if worker is self.prober:
            self.prober = None
        if to is not None:
            to.append(worker)
