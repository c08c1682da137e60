"""The assembly of the daemon's core: which part is given which others.

Two circles close here. RAM asks prefetch for room, and prefetch reads into RAM. Promotions report the end of a read to
prefetch, and prefetch reads by promotions. Prefetch is made last, so both reach it through a method of `Assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kvdepot.core.arena import ArenaTables
from kvdepot.core.eviction import policy_by_name
from kvdepot.core.records import RequestRecord
from kvdepot.core.report import TierStatus
from kvdepot.server.depot.adoption import Adoption
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.departures import Departures
from kvdepot.server.depot.loads.load import Loads
from kvdepot.server.depot.loads.locates import Locates
from kvdepot.server.depot.loads.peer_leases import PeerLeases
from kvdepot.server.depot.loads.records import Records
from kvdepot.server.depot.loads.token_reports import TokenReports
from kvdepot.server.depot.loads.what_ifs import WhatIfs
from kvdepot.server.depot.operators.invalidation import Invalidation
from kvdepot.server.depot.operators.listing import Listing
from kvdepot.server.depot.operators.pins import Pins
from kvdepot.server.depot.sessions.budgets import Budgets
from kvdepot.server.depot.sessions.requests import Requests
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.sessions.workers import WorkerLoans, Workers
from kvdepot.server.depot.stores.audits import Audits
from kvdepot.server.depot.stores.checksums import Checksums
from kvdepot.server.depot.stores.store import Stores
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.attaching import Attaching
from kvdepot.server.depot.tree.switches import Switches
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import (
    AdoptionReport,
    DepotConfig,
    EngineStatus,
    Liveness,
    ProcessIdentity,
    TierConfig,
)
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.storage.base import Tier, WorkerRegistry


def unknown_process(pid: int) -> ProcessIdentity:
    """Raise AssertionError: a depot without tiers has no worker processes."""
    raise AssertionError(f"process {pid}: no tier has workers")


class Assembly:
    """The parts of the daemon's core, made and connected in one place, and their life from `adopt` to `close_tiers`.

    `run` counts daemon runs on this arena (superblock), `arena_id` names the arena in grants. `clock` is
    CLOCK_MONOTONIC seconds. `tiers` makes those below RAM, and `identify` names their worker processes by pid.
    `request_over` is told of each request that has ended. Nothing is allocated before `ready`, nothing of a tier known
    before `start_tiers`.
    """

    def __init__(
        self,
        tables: ArenaTables,
        *,
        arena_id: int,
        run: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        config: DepotConfig,
        counters: Counters | None = None,
        tiers: Callable[[WorkerRegistry], Sequence[tuple[Tier, TierConfig]]] = lambda _: (),
        identify: Callable[[int], ProcessIdentity] = unknown_process,
        request_over: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._tables = tables
        self._config = config
        self._clock = clock
        self.counters = Counters() if counters is None else counters
        self._guard = engine_guard(self.counters.add)
        self._sessions = Sessions(
            tables, clock=clock, random_bytes=random_bytes, grace=config.grace_seconds, tenants=config.tenants
        )
        workers = Workers(self._sessions, identify)
        self._tree = tree = Tree(
            tables, run=run, clock=clock, random_bytes=random_bytes,
            policy=policy_by_name(config.eviction, tables.layout.rows), counters=self.counters,
            give_way=self._give_way,
            quotas=config.quotas,
            tenants=tuple(config.tenants),
            tiers=[
                (tier, settings, policy_by_name(config.eviction, tier.handles_max)) for tier, settings in tiers(workers)
            ],
        )  # fmt: skip
        self._ram = ram = tree.ram
        self._requests = Requests(tree, ram, config.provisional_seconds)
        self._attaching = Attaching(tree)
        loans = WorkerLoans(ram, workers)
        self._tiering = Tiering(tree, ram, loans, self._read_ended)
        self._checksums = Checksums(tree, ram, self._sessions.hold_extents, self._tiering.verified)
        self.switches = Switches(clock)
        self._audits = Audits(tree, ram, config, random_bytes)
        self._budgets = Budgets(self._sessions, ram, config, self.counters)
        self._stores = Stores(
            tree, ram, self._requests, config, arena_id, self._tiering, self.switches, self._audits, self._budgets
        )  # fmt: skip
        self.listing = Listing(tree, ram, self._sessions)
        self._prefetch = Prefetch(
            tree, ram, self._tiering.promotions, share=config.prefetch_share, seconds=config.lease_deadline_seconds
        )  # fmt: skip
        self._what_ifs = WhatIfs(
            ram, ram.data_bytes, tree.disks, config, tables.layout.rows, clock, self._guard
        )  # fmt: skip
        self.records = Records(tree.namespaces, clock, request_over, self._what_ifs.asked)
        sources = {"ram", *(holding.tier.name for holding in tree.tiers)}
        self._token_reports = TokenReports(self.counters, sources)
        self._locates = Locates(
            tree, ram, self._tiering, self._prefetch, self.records, self.switches, self._checksums.want
        )  # fmt: skip
        self._loads = Loads(tree, ram, config, arena_id, self._tiering, self.records.unused, self._budgets)
        self._departures = Departures(
            self._sessions, self._stores, self._loads, self._requests, self._prefetch, self.records, clock, self._guard
        )  # fmt: skip
        self.pins = Pins(tree, ram, config.pin_share)
        self.invalidation = Invalidation(
            tree, ram, self._sessions, self._stores, self._loads, self._prefetch, self.switches
        )  # fmt: skip
        self.peer_leases = PeerLeases(
            tree, ram, loans, workers, self.switches, self._checksums.want, self._tiering.promotions,
            valid=self.invalidation.is_valid, from_disks=config.lend_disks,
        )  # fmt: skip

    # Life of the arena

    def adopt(self, alive: Callable[[ProcessIdentity], Liveness]) -> AdoptionReport:
        """Take over what an earlier run left in the tables. Call once, before anything else; an empty arena is fine.

        `ready` is still to be told of the rest of the arena.
        """
        report = Adoption(self._tree, self._ram, self._sessions, self._stores, self._loads, self._tables.layout).run(
            alive
        )
        self._departures.end_orphaned()
        self.invalidation.adopted()
        self.counters.add("adopted_objects.adopted", report.kept)
        for reason, count in report.dropped.items():
            self.counters.add(f"adopted_objects.{reason}", count)
        return report

    def ready(self, upto_bytes: int, part: int = 0) -> None:
        """Let a room of RAM use its part of the data up to this offset, in bytes from the part's start.

        The part is populated up to there. The offset never shrinks.
        """
        room = self._ram.rooms[part]
        room.allocator.grow(room.start + upto_bytes)

    def start_tiers(self) -> None:
        """Open the tiers below RAM. Call this after `adopt`, so that they find the tree for their objects."""
        self._tiering.start()
        self._attaching.begin()

    async def close_tiers(self) -> None:
        """Let tiers finish what is in flight, and end their workers. Locates that wait for a lookup are answered."""
        self._locates.close()
        await self._tiering.close()

    def tick(self) -> bool:
        """Apply deadlines, grace and provisional paths, in bounded slices, and `trim`. Call this about every 100 ms."""
        self._guard.each(
            "tick", self._departures.tick, self._requests.expire, self._prefetch.tick, self.pins.tick,
            self.invalidation.tick, self._tree.drop_torn, self._tree.reclaim, self._tree.refresh_some,
            self._ram.evictor.offer_deferred, self._tiering.tick, self._locates.tick, self._what_ifs.work,
            self.peer_leases.reads.tick,
        )  # fmt: skip
        return self.trim()

    def trim(self) -> bool:
        """Run a slice of what ends with sessions, of attaching, and of watermark eviction in every tier.

        Return whether to call this again soon.
        """
        config = self._config
        leaving = self._guard.value("tick", False, self._departures.go_on)
        attaching = self._guard.value("tick", False, self._attaching.run_once)
        evicting = self._guard.value(
            "tick", False, self._tiering.trim, config.high_watermark, config.low_watermark, config.evictions_at_once
        )
        return leaving or attaching or evicting

    def status(self) -> EngineStatus:
        ram = self._ram
        tier = TierStatus(
            name="ram",
            kind="ram",
            capacity_bytes=ram.data_bytes,
            ready_bytes=ram.rooms.ready_bytes,
            used_bytes=ram.rooms.used_bytes,
            lent_bytes=ram.lent_bytes(),
            objects=ram.objects,
            unverified_objects=ram.unverified,
            pending_checksums=ram.pending_checksums,
            prefetched_objects=self._prefetch.pinned_objects,
            prefetched_bytes=self._prefetch.pinned_bytes,
            prefetching_requests=len(self._prefetch),
            pinned_objects=ram.pins.user.objects,
            pinned_bytes=ram.pins.user.bytes,
            what_if=self._what_ifs.status("ram"),
        )
        return EngineStatus(
            tier=tier,
            lower_tiers=tuple(
                replace(one, what_if=self._what_ifs.status(one.name)) for one in self._tiering.statuses()
            ),
            sessions=tuple(
                s.status(self._config.credit_bytes) for s in self._sessions.by_slot.values() if not s.worker
            ),
            namespaces=tuple(namespace.status() for namespace in self._tree.namespaces.by_slot.values()),
            quotas=tuple(status for holding in self._tree.holdings for status in holding.account.statuses()),
            tenants=self._budgets.tenants(self._tree.namespaces.by_slot.values()),
            counters=self.counters.snapshot(),
        )

    def tier_bytes(self) -> dict[str, int]:
        """Return the capacity of each tier by its name, RAM first."""
        lower = {tier.name: tier.capacity_bytes for tier in self._tiering.statuses()}
        return {"ram": self._ram.data_bytes} | lower

    def configure(self, config: DepotConfig, tiers: Mapping[str, TierConfig]) -> None:
        """Use other limits and policies from now on; `tiers` by name. The eviction policy stays the one of the start.

        No lease ends because of this. What is above a smaller limit goes by use, by time or tick by tick.
        """
        self._config = config
        self._budgets.configure(config)
        self._stores.configure(config)
        self._audits.configure(config)
        self._loads.configure(config)
        self._sessions.configure(
            grace=config.grace_seconds, lease_deadline=config.lease_deadline_seconds, tenants=config.tenants
        )
        self.pins.configure(config.pin_share)
        self.peer_leases.reads.on = config.lend_disks
        self._prefetch.configure(share=config.prefetch_share, seconds=config.lease_deadline_seconds)
        for holding in self._tree.holdings:
            holding.account.configure(config.quotas)
        for namespace in self._tree.namespaces.by_slot.values():
            self._tree.named(namespace)  # as when it came: to its owners, of which there may be others
        self._tiering.configure(tiers)
        self._what_ifs.configure(config)

    # Within

    def _give_way(self, slots: Collection[int] | None) -> bool:
        """Let prefetch unpin something, because RAM finds no room. Return whether it did.

        Prefetch is made after RAM, because it reads into RAM. It does not give way to peers.
        """
        return not self.peer_leases.reads.placing and self._prefetch.give_way(slots)

    def _read_ended(self) -> None:
        """Begin prefetch reads that are due: a tier may be free for them."""
        self._prefetch.pump()
