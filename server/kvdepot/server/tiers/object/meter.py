"""What a bucket's owner is charged for: requests and bytes that are read, with a limit for each day (UTC).

Both limits are hard. A job is charged before it begins, for the most that it can take; its answer says how much it was.
A job that a limit does not allow is answered CANCELLED, and no request is made. The budget then counts as spent, until
a job in flight has taken less than it was charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvdepot.server.io.bucket_objects import cost_max
from kvdepot.server.io.jobs import UNKNOWN, Answer, Job, Priority, PublishFile
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.workers import PassedWorkers, Workers


class Meter:
    """The two budgets of one bucket. Counts `bucket_requests`, `bucket_received_bytes` and `bucket_refused_jobs`."""

    def __init__(
        self, *, requests: int | None, read_bytes: int | None, wall_clock: Callable[[], float],
        count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        """Start with nothing used. None: no limit."""
        self._requests = DailyBudget("request budget", requests, wall_clock)
        self._read = DailyBudget("read budget", read_bytes, wall_clock)
        self._count = count
        self._reads_to_write = False  # a write was refused for what it may have to read

    @property
    def stops_writing(self) -> bool:
        return self._requests.spent or (self._reads_to_write and self._read.spent)

    @property
    def stops_reading(self) -> bool:
        return self._requests.spent or self._read.spent

    @property
    def reason(self) -> str:
        """Return which budgets are spent; empty if none is."""
        return "; ".join(budget.reason for budget in (self._requests, self._read) if budget.spent)

    def charge(self, job: Job) -> bool:
        """Count what a job costs. Return False, and count nothing, if a limit does not allow it."""
        requests, read_bytes = cost_max(job)
        if read_bytes and not self._read.allows(read_bytes):
            self._count("bucket_refused_jobs.read", 1)
            self._read.refuse()  # what is offered is not loaded any more, so nothing more may be offered
            self._reads_to_write = self._reads_to_write or isinstance(job, PublishFile)
            return False
        if not self._requests.allows(requests):
            self._count("bucket_refused_jobs.requests", 1)
            self._requests.refuse()  # no larger job is allowed either, and the tier would not say why
            return False
        self._requests.spend(requests)
        self._read.spend(read_bytes)
        return True

    def settle(self, job: Job, answer: Answer) -> None:
        """Correct what was charged by what the answer says. A worker that died says nothing: its charge stays."""
        requests, read_bytes = cost_max(job)
        if answer.outcome is IoOutcome.CANCELLED:  # no worker had it
            self._requests.spend(-requests)
            self._read.spend(-read_bytes)
            return
        if answer.requests == UNKNOWN:
            self._count("bucket_requests", requests)
            return
        self._requests.spend(answer.requests - requests)
        self._read.spend(answer.received_bytes - read_bytes)
        self._count("bucket_requests", answer.requests)
        self._count("bucket_received_bytes", answer.received_bytes)


class MeteredWorkers(PassedWorkers):
    """`Workers` whose jobs are charged to a meter."""

    def __init__(self, workers: Workers, meter: Meter, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(workers)
        self._meter = meter
        self._loop = loop

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        if not self._meter.charge(job):
            self._loop.call_soon(done, Answer(IoOutcome.CANCELLED, self._meter.reason))
            return

        def settled(answer: Answer) -> None:
            self._meter.settle(job, answer)
            done(answer)

        super().submit(job, priority=priority, done=settled, loan=loan)
