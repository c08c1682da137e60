"""Who a peer is: by the id of its arena, which its answers say. Engines name daemons by it (ADR 80)."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.server.io.jobs import Answer, Job, Priority
from kvdepot.server.storage.base import Loan
from kvdepot.server.tiers.workers import Workers


class SourceWorkers:
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow."""

    def __init__(self, workers: Workers) -> None:
        self.breaker = workers.breaker
        self.source_id = 0
        self._workers = workers

    @property
    def usable(self) -> bool:
        return self._workers.usable

    @property
    def why_unusable(self) -> str:
        return self._workers.why_unusable

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        def answered(answer: Answer) -> None:
            self.source_id = answer.source_id or self.source_id
            done(answer)

        self._workers.submit(job, priority=priority, done=answered, loan=loan)

    def renew(self, guard: str) -> None:
        self._workers.renew(guard)

    async def close(self, seconds: float = 3.0) -> int:
        return await self._workers.close(seconds)
