"""Jobs submitted to a pool, and the order in which workers get them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.server.io.jobs import JOBS, Answer, Append, Job, Priority, job_bytes
from kvdepot.server.platform.deadline import Arguments, Deadline
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import Loan

CRASHES_MAX = 2


@dataclass(eq=False, slots=True)
class Task:
    """A job with everything that becomes of it. `frame`: as it goes over the wire, under `number`; empty at first."""

    number: int
    job: Job
    frame: bytes
    priority: Priority
    done: Callable[[Answer], None]
    loan: Loan | None
    deadline_seconds: float
    crashes: int = 0  # of workers that had begun it
    timer: Deadline | None = None

    @property
    def repeatable(self) -> bool:
        """Return whether another worker may repeat the job. An Append may already have been done."""
        return self.crashes < CRASHES_MAX and not isinstance(self.job, Append)

    def watch(
        self, loop: asyncio.AbstractEventLoop, seconds: float, missed: Callable[[*Arguments], object],
        *arguments: *Arguments,
    ) -> None:  # fmt: skip
        """Call `missed` after so many seconds, unless the job ends before."""
        self.timer = Deadline(loop, seconds, missed, *arguments)

    def unwatch(self) -> None:
        """Let no deadline end the job any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class TaskQueue:
    """Tasks that no worker has: by priority, and in the order of their coming within one."""

    def __init__(self) -> None:
        self._queues: dict[Priority, deque[Task]] = {priority: deque() for priority in Priority}
        self.payload_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def put(self, task: Task, *, first: bool = False) -> None:
        """Queue a task. `first`: before all others of its priority."""
        queue = self._queues[task.priority]
        (queue.appendleft if first else queue.append)(task)
        self.payload_bytes += job_bytes(task.job)

    def take(self) -> Task:
        """Return the next task. There is one."""
        task = next(filter(None, self._queues.values())).popleft()
        self.payload_bytes -= job_bytes(task.job)
        return task


def pack(task: Task, guard: Guard) -> str:
    """Pack a job. Return why no worker can be told of it; empty if one can."""
    try:
        task.frame = JOBS.pack(task.job, task.number)
    except Exception as error:  # noqa: BLE001 - whatever it is
        guard.caught(f"packing {type(task.job).__name__}", error)
        return f"the job cannot be packed: {error}"
    return ""
