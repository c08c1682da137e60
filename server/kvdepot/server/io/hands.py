"""A worker of a pool, and what it has in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvdepot.server.io.jobs import JOBS_PER_WORKER
from kvdepot.server.io.tasks import Task
from kvdepot.server.io.worker_process import WorkerProcess
from kvdepot.server.tiers.base import Loan

NO_NUMBER: Final = -1
_HANDED_MAX: Final = JOBS_PER_WORKER + 2
"""Of a path that answers quickly: until an answer has come here and another job has gone there, the medium would have
one request less, for a millisecond or two where cores are few."""


@dataclass(eq=False, slots=True)
class Worker:
    process: WorkerProcess
    number: int  # of the registry
    started_at: float
    hand: dict[int, Task] = field(default_factory=dict)
    kept: dict[int, Loan] = field(default_factory=dict)  # of jobs that were answered TIMEOUT
    up: bool = False  # its process has started
    quick: bool = False  # its last object took less than `quick_seconds`
    killed: bool = False
    start_timer: asyncio.TimerHandle | None = None

    def begun(self) -> Iterable[Task]:
        """What it has threads for: it takes its jobs in the order of their coming."""
        return islice(self.hand.values(), JOBS_PER_WORKER)

    def takes_more(self, quick_since: float) -> bool:
        """Ahead of its threads while it is quick, and what it has begun may be: else another worker may come first."""
        if len(self.hand) < JOBS_PER_WORKER:
            return True
        if not self.quick or len(self.hand) >= _HANDED_MAX:
            return False
        return all(task.timer and task.timer.when() - task.deadline_seconds > quick_since for task in self.begun())
