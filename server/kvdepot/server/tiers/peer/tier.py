"""A peer tier: a shared tier whose files are the objects in the RAM of another daemon (ADR 78). It is only read.

It may have several peers, which come and go (ADR 84), and are chosen by what they have (ADR 85).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kvdepot.core.report import TierStatus
from kvdepot.server.io.jobs import Probe
from kvdepot.server.io.scout_wire import Ranked
from kvdepot.server.platform.guard import Guard, tier_guard
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.storage.base import IoOutcome, ObjectName, Stored, TierListener, TierTraits
from kvdepot.server.storage.shared_layout import PROBE, object_file
from kvdepot.server.tiers.peer.choice import Choice
from kvdepot.server.tiers.peer.config import PeerConfig
from kvdepot.server.tiers.peer.group import PeerGroup
from kvdepot.server.tiers.peer.places import Finder, Place, order_of
from kvdepot.server.tiers.peer.scout import Scout, summaries_bytes
from kvdepot.server.tiers.peer.seats import Seats
from kvdepot.server.tiers.peer.source import SourceWorkers, path_of
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.prober import Prober
from kvdepot.server.tiers.shared.tier import SharedTier

_FAILING: Final = frozenset(
    {IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE, IoOutcome.CORRUPT, IoOutcome.LENGTH}
)
"""Outcomes that speak against the peer: also bytes that are not those of its own lease."""


class PeerTier(SharedTier):
    """Lookups, handles, breaker and reads are a shared tier's. Nothing is written, touched or quarantined."""

    def __init__(self, config: PeerConfig, context: TierContext) -> None:
        """Build the tier. No process is made before `start`."""
        self._peer_config = config
        self._context = context
        self._peer = config.peer
        self._finder: Finder | None = None
        self._seats: Seats | None = None
        self._troubled_finding = ""
        self._finding_log = LogThrottle(context.loop.time)
        self._workers: SourceWorkers | PeerGroup
        if config.places is None:
            self._workers = self._made((config.peer.host, config.peer.port))
        else:
            guard = tier_guard(config.name, context.count, context.log, context.loop.time)
            self._workers = PeerGroup(
                self._made, name=config.name, arena_id=context.arena_id, loop=context.loop, log=context.log,
                guard=guard, elsewhere=lambda: self._seats,
            )  # fmt: skip
            self._seats = self._made_seats(self._workers, guard)
        self._prober = Prober(
            self._workers, node=f"{context.arena_id:016x}-{config.name}", loop=context.loop,
            retry_seconds=config.probe_seconds,
        )  # fmt: skip
        super().__init__(config, data=self._workers, coordinator=self._prober, log=context.log, count=context.count)
        self.traits = TierTraits(shared=True, read_only=True)
        if config.places is not None:
            self._finder = Finder(
                config.places.find, context.loop, every_seconds=config.find_seconds,
                found=self._guard.safe("taking peers", self._found_places),
                failed=self._guard.safe("telling that none was found", self._found_no_places),
            )  # fmt: skip
        self._probe_at = 0.0
        self._start: Callable[[], None] | None = None  # once it is known where peers are

    def _made(self, place: Place | None) -> SourceWorkers:
        """Return workers of the peer at this place, or of none yet, without processes."""
        config, peer = self._peer_config, self._peer
        if place is not None:
            config, peer = replace(config, path=path_of(place)), replace(peer, host=place[0], port=place[1])
        context = self._context

        def changed() -> None:
            workers.changed()

        pool = context.data_pool(config, probe=Probe(PROBE), failing=_FAILING, peer=peer.pack(), changed=changed)
        workers = SourceWorkers(
            pool, peer, log=context.log, count=context.count, clock=context.loop.time, returned=self._peer_returned
        )
        return workers

    def _made_seats(self, group: PeerGroup, guard: Guard) -> Seats:
        config, context = self._peer_config, self._context
        choice = Choice(
            config.peers_max, order=lambda place: order_of(place, context.arena_id), busy=group.busy,
            clock=context.loop.time, exchange_seconds=config.exchange_seconds,
        )  # fmt: skip

        ram_bytes = sum(length for _, length in context.data)

        def made_scout(ranked: Callable[[Ranked], None]) -> Scout:
            return Scout(
                self._peer, name=config.name, arena_id=context.arena_id, seats=config.peers_max,
                every_seconds=config.summary_seconds, bytes_max=summaries_bytes(ram_bytes), loop=context.loop,
                log=context.log, count=context.count, ranked=ranked,
            )  # fmt: skip

        return Seats(
            choice, group, made_scout, most=config.peers_max, loop=context.loop, joined=self._peer_joined,
            count=context.count, guard=guard,
        )  # fmt: skip

    def _peer_returned(self) -> None:
        """Ask again for what nobody had: a peer that could not be asked may have it."""
        self._directory.absent.forget_absent()

    def _peer_joined(self) -> None:
        """Ask again for what nobody had: another peer may have it."""
        self._directory.absent.forget_absent()
        self._prober.hurry()

    def start(self, listener: TierListener) -> None:
        if self._finder is None:
            super().start(listener)
            return
        self._start = partial(super().start, listener)
        self._finder.start()

    async def close(self) -> None:
        if self._finder is not None:
            self._finder.close()
        if self._seats is not None:
            self._seats.close()
        await super().close()

    def tick(self) -> None:
        """Probe the only peer after a failure, as a group does whenever it is told who its members are."""
        super().tick()
        now, workers = self._context.loop.time(), self._workers
        if isinstance(workers, SourceWorkers) and now >= self._probe_at and workers.probe():
            self._probe_at = now + self._peer_config.find_seconds

    def reads_from(self, source_id: int) -> bool:
        if self._workers.reads_from(source_id):
            return True
        seats = self._seats
        return seats is not None and self._guard.value("inviting a peer", False, seats.named, source_id)

    def stored(self, handle: int) -> Stored:
        """Return also which of several peers have the object."""
        found = super().stored(handle)
        if isinstance(self._workers, PeerGroup):
            owners = self._workers.owners_of(object_file(self._directory.holdings.name(handle)))
            return replace(found, place=", ".join(map(str, owners)))
        return found

    def status(self) -> TierStatus:
        workers = self._workers
        peers = workers.statuses() if isinstance(workers, PeerGroup) else (workers.status(),)
        return replace(super().status(), peers=peers)

    def _reasons(self) -> tuple[str, ...]:
        """Return also which of several peers cannot be asked."""
        others = self._workers.trouble if isinstance(self._workers, PeerGroup) else ""
        return (*super()._reasons(), self._troubled_finding, others)

    def _found_places(self, places: Sequence[Place]) -> None:
        assert isinstance(self._workers, PeerGroup) and self._seats is not None
        self._troubled_finding = ""
        self._seats.list(places)
        self._start_once()
        self._workers.probe()

    def _found_no_places(self, why: str) -> None:
        """Stay with the peers of before, and probe them as ever."""
        if why != self._troubled_finding and self._finding_log.due(why):  # one that is slow to fail alternates
            self._log.warning("tier %s: %s: %s", self.name, self._config.path, why)
        self._troubled_finding = why
        self._start_once()
        self._workers.probe()

    def _start_once(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start()

    @property
    def writable(self) -> bool:
        return False

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """Do not look for it again for a while, and never take these bytes: the source may have had them from here."""
        self._reading.doubt(name, raw_sums)
        self._directory.absent.add(name, damaged=True)

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on. Workers of before finish their jobs."""
        if names == self._peer.names:
            return
        self._peer = replace(self._peer, names=names)
        self._directory.absent.clear()
        self._workers.use_names(names)
        if self._seats is not None:
            self._seats.scout.use_names(names)
