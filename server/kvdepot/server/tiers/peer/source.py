"""Who a peer is, by the id of its arena (ADR 80), and what its objects come over (ADR 82). Its answers say both."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvdepot.server.io.jobs import Answer, Job, Priority, ReadFile
from kvdepot.server.io.peer_wire import Lane
from kvdepot.server.storage.base import Loan
from kvdepot.server.tiers.workers import PassedWorkers, Workers


class SourceWorkers(PassedWorkers):
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow.

    Counts `peer_loaded_bytes.` and the lane. The log says when another lane is used.
    """

    def __init__(
        self, workers: Workers, *, place: str, log: logging.Logger, count: Callable[[str, float], None]
    ) -> None:
        super().__init__(workers)
        self.source_id = 0
        self._place = place
        self._log = log
        self._count = count
        self._lane = ""

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        def answered(answer: Answer) -> None:
            self.source_id = answer.source_id or self.source_id
            if answer.lane:
                self._note(answer.lane)
                if isinstance(job, ReadFile):
                    self._count(f"peer_loaded_bytes.{answer.lane.partition(':')[0]}", answer.stored_bytes)
            done(answer)

        super().submit(job, priority=priority, done=answered, loan=loan)

    def _note(self, lane: str) -> None:
        if lane != self._lane and (self._lane or lane != Lane.STREAM):
            self._lane = lane
            self._log.info("%s: objects come over %s", self._place, lane)
