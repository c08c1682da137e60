"""Who a peer is, by the id of its arena (ADR 80), and what its objects come over (ADR 82). Its answers say both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.jobs import Answer, Job, Priority, ReadFile
from kvdepot.server.io.peer_wire import Lane, PeerSettings
from kvdepot.server.io.pool import IoPool
from kvdepot.server.platform.addresses import url_address
from kvdepot.server.storage.base import Loan
from kvdepot.server.tiers.peer.figures import PeerFigures
from kvdepot.server.tiers.workers import PassedWorkers


class SourceWorkers(PassedWorkers):
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow.

    Counts `peer_loaded_bytes.` and the lane. The log says when another lane is used.
    """

    def __init__(
        self, pool: IoPool, peer: PeerSettings, *, place: str, log: logging.Logger,
        count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        super().__init__(pool)
        self.figures = PeerFigures()
        self._pool = pool
        self._peer = peer
        self._place = place
        self._log = log
        self._count = count
        self._lane = ""

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        def answered(answer: Answer) -> None:
            self.figures.answered(job, answer)
            if answer.lane:
                self._note(answer.lane)
                if isinstance(job, ReadFile):
                    self._count(f"peer_loaded_bytes.{answer.lane.partition(':')[0]}", answer.stored_bytes)
            done(answer)

        self.figures.asked(job)
        super().submit(job, priority=priority, done=answered, loan=loan)

    def reads_from(self, source_id: int) -> bool:
        """Return whether the daemon with this arena was the last one to answer."""
        return self.figures.source_id == source_id

    def status(self, *, itself: bool = False) -> PeerStatus:
        return self.figures.status(url_address(self._peer.host, self._peer.port), self, itself=itself)

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on. Workers of before finish their jobs."""
        self._peer = replace(self._peer, names=names)
        self._pool.renew("", self._peer.pack())

    def _note(self, lane: str) -> None:
        if lane != self._lane and (self._lane or lane != Lane.STREAM):
            self._lane = lane
            self._log.info("%s: objects come over %s", self._place, lane)
