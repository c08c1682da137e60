"""What a tier needs of a pool of I/O workers (`kvdepot.server.io.pool`), and its word about a place they may touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Priority
from kvdepot.server.storage.base import Loan


class NotAsked(Answer):
    """An answer of no worker, because none could be asked: it says nothing about the object."""


class Workers(Protocol):
    """A pool of I/O workers (`kvdepot.server.io.pool.IoPool`)."""

    breaker: Breaker

    @property
    def usable(self) -> bool: ...

    @property
    def why_unusable(self) -> str: ...

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        """Queue a job. `done` is called once, never from in here.

        The loan has ended when `done` is called; after TIMEOUT it ends later. A job whose worker died may be done again
        by another worker, under the loan, which begins again. What the first worker did then lies there, whatever the
        answer is. The answer is `NotAsked` where no worker can be asked for the file of this job.
        """

    def renew(self, guard: str) -> None:
        """Replace the workers by ones that open their files again and were admitted with this token."""

    async def close(self, seconds: float = ...) -> int: ...


class PassedWorkers:
    """`Workers` that are other ones, for a subclass that adds something to `submit`."""

    def __init__(self, workers: Workers) -> None:
        self.breaker = workers.breaker
        self._workers = workers

    @property
    def usable(self) -> bool:
        return self._workers.usable

    @property
    def why_unusable(self) -> str:
        return self._workers.why_unusable

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        self._workers.submit(job, priority=priority, done=done, loan=loan)

    def renew(self, guard: str) -> None:
        self._workers.renew(guard)

    async def close(self, seconds: float = 3.0) -> int:
        return await self._workers.close(seconds)


class Hold:
    """A loan around another one (or none) that says when a worker cannot touch the place any more.

    Another may, while there is no answer: what a worker died of is tried again, under a loan that begins again.
    """

    def __init__(self, loan: Loan | None, ended: Callable[[], None] = lambda: None) -> None:
        self._loan = loan
        self._ended = ended
        self.workers = 0
        """How many can touch the place now."""
        self.tries = 0
        """How many have had the job, ever."""

    def begin(self, worker: int) -> bool:
        begun = self._loan is None or self._loan.begin(worker)
        self.workers += begun
        self.tries += begun
        return begun

    def end(self) -> None:
        self.workers -= 1
        try:
            if self._loan is not None:
                self._loan.end()
        finally:
            self._ended()
