"""A worker of a pool, and its jobs in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvdepot.server.io.jobs import JOBS_PER_WORKER
from kvdepot.server.io.tasks import Task
from kvdepot.server.io.worker_process import WorkerProcess
from kvdepot.server.platform.deadline import Deadline
from kvdepot.server.storage.base import Loan

NO_NUMBER: Final = -1
_SECONDS_MIN: Final = 1e-6
_QUEUE_MAX: Final = 14


@dataclass(eq=False, slots=True)
class Worker:
    """A worker process, and what it has of its pool."""

    process: WorkerProcess
    number: int  # of the registry
    started_at: float
    inflight: dict[int, Task] = field(default_factory=dict)
    kept: dict[int, Loan] = field(default_factory=dict)  # of jobs that were answered TIMEOUT
    up: bool = False  # its process has started
    queue_max: int = 0  # more jobs than it has threads for
    killed: bool = False
    start_timer: Deadline | None = None
    death_timer: asyncio.TimerHandle | None = None  # since it was killed

    def begun(self) -> Iterable[Task]:
        """Return the jobs that it has threads for: it takes jobs in the order of their arrival."""
        return islice(self.inflight.values(), JOBS_PER_WORKER)

    def took(self, seconds: float, quick_seconds: float) -> None:
        """Note how long its last object took. At that rate, twice `quick_seconds` is what all in its queue may take.

        Without a queue, the device has one request less until the answer is here and another job is there: a
        millisecond or two if cores are few. And the answers of many small objects are taken together.
        """
        jobs = min(int(2 * quick_seconds / max(seconds, _SECONDS_MIN)), _QUEUE_MAX)
        self.queue_max = jobs if seconds < quick_seconds else 0

    def takes_more(self, quick_since: float) -> bool:
        """Return whether it gets another job: more than it has threads for only if it and its jobs are quick so far."""
        if len(self.inflight) < JOBS_PER_WORKER:
            return True
        if len(self.inflight) >= JOBS_PER_WORKER + self.queue_max:
            return False
        return all(task.timer and task.timer.began_at > quick_since for task in self.begun())
