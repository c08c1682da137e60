"""What a bucket's owner is charged for: requests and bytes that are read, with a limit for each day (UTC).

Both limits are hard. A job is charged before it begins, for the requests that it most likely takes; its answer says how
many they were. A job that a limit does not allow is answered CANCELLED, and no request is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvdepot.server.io.jobs import UNKNOWN, Answer, Job, Priority, Probe, PublishFile, ReadFile, StatFiles
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.workers import PassedWorkers, Workers

_PROBE_REQUESTS: Final = 4


class Meter:
    """The two budgets of one bucket. Counts `bucket_requests` and `bucket_received_bytes`."""

    def __init__(
        self, *, requests: int | None, read_bytes: int | None, wall_clock: Callable[[], float],
        count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        """Start with nothing used. None: no limit."""
        self._requests = DailyBudget("request budget", requests, wall_clock)
        self._read = DailyBudget("read budget", read_bytes, wall_clock)
        self._count = count

    @property
    def stops_writing(self) -> bool:
        return self._requests.spent

    @property
    def stops_reading(self) -> bool:
        return self._requests.spent or self._read.spent

    @property
    def reason(self) -> str:
        """Return which budgets are spent; empty if none is."""
        return "; ".join(budget.reason for budget in (self._requests, self._read) if budget.spent)

    def charge(self, job: Job) -> bool:
        """Count what a job costs. Return False, and count nothing, if a limit does not allow it."""
        requests, read_bytes = _cost(job)
        if not self._read.allows(read_bytes):
            self._read.refuse()  # what is offered is not loaded any more, so nothing more may be offered
            return False
        if not self._requests.allows(requests):
            return False
        self._requests.spend(requests)
        self._read.spend(read_bytes)
        return True

    def settle(self, job: Job, answer: Answer) -> None:
        """Correct what was charged by what the answer says. A worker that died says nothing: its charge stays."""
        requests, read_bytes = _cost(job)
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


def _cost(job: Job) -> tuple[int, int]:
    """Return the requests and the bytes to be received that a job takes if nothing is in its way."""
    match job:
        case StatFiles():
            return len(job.files), 0
        case ReadFile():
            return 1, job.name.raw_bytes
        case PublishFile():
            return 1, 0
        case Probe():
            return _PROBE_REQUESTS, 0
        case _:
            return 0, 0


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
