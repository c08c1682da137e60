"""Who a peer is, by the id of its arena (ADR 80), and what its objects come over (ADR 82). Its answers say both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, Probe, ReadFile
from kvdepot.server.io.peer_wire import Lane, PeerSettings
from kvdepot.server.io.pool import IoPool
from kvdepot.server.platform.addresses import TCP, url_address
from kvdepot.server.platform.backoff import Backoff
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.peer.figures import PeerFigures
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.workers import PassedWorkers


def path_of(place: Place) -> Path:
    """Return a place as the path of a tier."""
    return Path(f"{TCP}{url_address(*place)}")


SETTLE_SECONDS: Final = 60.0
"""After a start, a source has its objects only once it has verified them."""
NIXL_SECONDS_MIN: Final = 60.0
NIXL_SECONDS_MAX: Final = 3600.0
"""After a read over NIXL without an answer, objects come over the stream for so long: twice as long each time."""
LATE: Final = "the last read over NIXL had no answer in time"


class SourceWorkers(PassedWorkers):
    """`Workers` that remember which daemon answered last. An address may be another daemon tomorrow.

    `returned` is called when the peer is back after a failure, or another daemon. For a while, nothing is known to be
    absent there.

    Counts `peer_loaded_bytes.` and the lane. The log says when another lane is used.

    A read over NIXL that hangs costs its request the deadline. The cause may stay: a process that lends and hangs, or a
    firewall that drops what UCX sends. So the stream serves for a while.
    """

    def __init__(
        self, pool: IoPool, peer: PeerSettings, *, log: logging.Logger, count: Callable[[str, float], None],
        clock: Callable[[], float], returned: Callable[[], None],
    ) -> None:  # fmt: skip
        """`peer` may have no place yet: then these are spare workers, which get jobs after `serve`."""
        super().__init__(pool)
        self.figures = PeerFigures()
        self._pool = pool
        self._peer = peer
        self._log = log
        self._count = count
        self._clock = clock
        self._returned = returned
        self._settles_until = -inf
        self._probed = False  # a probe has no answer yet
        self._lane = ""
        self._nixl_at = inf  # it is tried again
        self._nixl_backoff = Backoff(NIXL_SECONDS_MIN, NIXL_SECONDS_MAX)

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        names = self._peer.names

        def answered(answer: Answer) -> None:
            if self.figures.answered(job, answer):
                self._is_back()
            if answer.lane:
                self._note(answer.lane)
            if isinstance(job, ReadFile):
                if answer.lane:
                    self._count(f"peer_loaded_bytes.{answer.lane.partition(':')[0]}", answer.stored_bytes)
                self._choose_lane(answer)
                if not set(names) <= set(self._peer.names):
                    answer = Answer(IoOutcome.CANCELLED, "a name of peers was taken away while it was read")
            done(self._settled(answer))

        if self._clock() >= self._nixl_at:
            self._use_nixl()
        self.figures.asked(job)
        super().submit(job, priority=priority, done=answered, loan=loan)

    def probe(self, works: Callable[[Answer], object] = lambda _: None) -> bool:
        """Ask a peer that has not answered yet, or whose last answer was a failure. Return whether it is asked now.

        `works` is called if it answers. Without probes nobody would notice that it is back: names that are remembered
        as absent are not asked for, and a lookup of several peers does not wait for it.
        """
        doubtful = self.figures.fails or not self.figures.source_id
        if not doubtful or not self.usable or self._probed:
            return False
        self._probed = True

        def answered(answer: Answer) -> None:
            self._probed = False
            if answer.outcome is IoOutcome.OK:
                works(answer)

        self.submit(Probe(PROBE), priority=Priority.TEND, done=answered)
        return True

    def changed(self) -> None:
        """Take note that the pool takes jobs, or none any more."""
        if self.usable and self.figures.fails:
            self._is_back()

    def _is_back(self) -> None:
        self._settles_until = self._clock() + SETTLE_SECONDS
        self._returned()

    def _settled(self, answer: Answer) -> Answer:
        if ABSENT not in answer.lengths or self._clock() >= self._settles_until:
            return answer
        return replace(answer, lengths=tuple(UNKNOWN if one == ABSENT else one for one in answer.lengths))

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

    async def leave(self) -> None:
        """End the workers of a peer that is none any more. Return when the death of each is proven."""
        await self._pool.leave()

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on. Workers of before finish their jobs.

        If a name is gone, nobody gets what they read: it may have come from who had it.
        """
        self._renew(replace(self._peer, names=names))

    def _renew(self, peer: PeerSettings) -> None:
        self._peer = peer
        self._pool.renew("", peer.pack())

    # Lanes

    def _choose_lane(self, answer: Answer) -> None:
        """Read over the stream after a read over NIXL without an answer."""
        if answer.lane == Lane.NIXL:
            self._nixl_backoff.ran(inf)
        over_nixl = self._peer.lane is Lane.NIXL and not self._peer.no_nixl and not self._lane.startswith(Lane.STREAM)
        if answer.outcome is IoOutcome.TIMEOUT and over_nixl:
            self._nixl_at = self._clock() + self._nixl_backoff.next_seconds()
            self._renew(replace(self._peer, no_nixl=LATE))

    def _use_nixl(self) -> None:
        self._nixl_at = inf
        self._lane = ""
        self._renew(replace(self._peer, no_nixl=""))

    def _note(self, lane: str) -> None:
        if lane != self._lane and (self._lane or lane != Lane.STREAM):
            self._lane = lane
            self._log.info("%s: objects come over %s", self.path, lane)
