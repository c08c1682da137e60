"""Who a peer is, by the id of its arena (ADR 80), and what its objects come over (ADR 82). Its answers say both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.jobs import Answer, Job, Priority, ReadFile
from kvdepot.server.io.peer_wire import Lane, PeerSettings
from kvdepot.server.io.pool import IoPool
from kvdepot.server.platform.addresses import TCP, url_address
from kvdepot.server.storage.base import Loan
from kvdepot.server.tiers.peer.figures import PeerFigures
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.workers import PassedWorkers


def path_of(place: Place) -> Path:
    """Return a place as the path of a tier."""
    return Path(f"{TCP}{url_address(*place)}")


class SourceWorkers(PassedWorkers):
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow.

    Counts `peer_loaded_bytes.` and the lane. The log says when another lane is used.
    """

    def __init__(
        self, pool: IoPool, peer: PeerSettings, *, log: logging.Logger, count: Callable[[str, float], None]
    ) -> None:
        """`peer` may have no place yet: then these are spare workers, which get jobs after `serve`."""
        super().__init__(pool)
        self.figures = PeerFigures()
        self._pool = pool
        self._peer = peer
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

    @property
    def path(self) -> Path:
        """Return where the peer is, as the path of a tier."""
        return path_of((self._peer.host, self._peer.port))

    def serve(self, place: Place) -> None:
        """Have the peer at this place. There was none before."""
        self._peer = replace(self._peer, host=place[0], port=place[1])
        self._pool.serve_peer(self.path, self._peer.pack())

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on. Workers of before finish their jobs."""
        self._peer = replace(self._peer, names=names)
        self._pool.renew("", self._peer.pack())

    def _note(self, lane: str) -> None:
        if lane != self._lane and (self._lane or lane != Lane.STREAM):
            self._lane = lane
            self._log.info("%s: objects come over %s", self.path, lane)
