"""Who a peer is: by the id of its arena, which its answers say. Engines name daemons by it (ADR 80)."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.server.io.jobs import Answer, Job, Priority
from kvdepot.server.storage.base import Loan
from kvdepot.server.tiers.workers import PassedWorkers, Workers


class SourceWorkers(PassedWorkers):
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self.source_id = 0

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        def answered(answer: Answer) -> None:
            self.source_id = answer.source_id or self.source_id
            done(answer)

        super().submit(job, priority=priority, done=answered, loan=loan)
