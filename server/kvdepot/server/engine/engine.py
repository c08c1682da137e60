"""The heart of the daemon: index, leases and sessions over the arena's tables.

Plain synchronous code with one owner thread; no call blocks. This module decides who
may call what, deals with repeats and deadlines, and delegates the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.arena import ArenaTables
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitCall,
    CommitReply,
    DeclareCall,
    DeclareReply,
    EndRequestCall,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.control import Switch, VerifyCall
from kvdepot.core.elements import Elements, check_elements
from kvdepot.core.errors import InvalidArgument, NoRoom, NotFound, UnknownNamespace
from kvdepot.core.eviction import policy_by_name
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import check_limit
from kvdepot.core.report import TierStatus
from kvdepot.server.engine.acquires import Answer
from kvdepot.server.engine.adoption import Adoption
from kvdepot.server.engine.audits import Audits
from kvdepot.server.engine.counters import Counters
from kvdepot.server.engine.departures import Departures
from kvdepot.server.engine.leases import Lease, ReadLease, WriteLease
from kvdepot.server.engine.listing import Listing
from kvdepot.server.engine.load import Loads
from kvdepot.server.engine.locates import Locates
from kvdepot.server.engine.namespaces import Namespace, checked_id
from kvdepot.server.engine.pins import Pins
from kvdepot.server.engine.prefetch import Prefetch
from kvdepot.server.engine.records import Records
from kvdepot.server.engine.removal import Removal
from kvdepot.server.engine.requests import Requests
from kvdepot.server.engine.sessions import LENT_ELSEWHERE, Session, Sessions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.store import Stores
from kvdepot.server.engine.sums import Sums
from kvdepot.server.engine.switches import REFUSALS, Switches
from kvdepot.server.engine.tiering import Tiering
from kvdepot.server.engine.types import (
    AdoptionReport,
    Attached,
    AttachmentInfo,
    Drift,
    EngineConfig,
    EngineStatus,
    Liveness,
    ProcessIdentity,
    TierConfig,
    ToCompare,
    ToSum,
    Watch,
)
from kvdepot.server.engine.vacating import vacate
from kvdepot.server.engine.verification import Verification
from kvdepot.server.engine.voiding import Voiding
from kvdepot.server.engine.warming import Warming
from kvdepot.server.engine.workers import Workers
from kvdepot.server.guard import engine_guard
from kvdepot.server.tiers.base import Tier, WorkerRegistry

_NAMESPACE_EVICTIONS_MAX: Final = 4096
"""Nodes dropped in one call to make a namespace slot free: some 50 ms."""


def unknown_process(pid: int) -> ProcessIdentity:
    """For an engine without tiers, hence without worker processes."""
    raise AssertionError(f"process {pid}: no tier has workers")


class Engine:
    """Answers every call of `kvdepot.core.calls`. Errors are classes of `kvdepot.core.errors`.

    `run` counts daemon runs on this arena (superblock), `arena_id` names the arena in
    grants. `clock` is CLOCK_MONOTONIC seconds. `tiers` makes those below RAM;
    `identify` names their worker processes by pid. Nothing is allocated before `ready`, nothing of a tier known before
    `start_tiers`.
    """

    def __init__(
        self,
        tables: ArenaTables,
        *,
        arena_id: int,
        run: int,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        config: EngineConfig,
        counters: Counters | None = None,
        tiers: Callable[[WorkerRegistry], Sequence[tuple[Tier, TierConfig]]] = lambda _: (),
        identify: Callable[[int], ProcessIdentity] = unknown_process,
    ) -> None:
        self._tables = tables
        self._config = config
        self._clock = clock
        self.counters = Counters() if counters is None else counters
        self._guard = engine_guard(self.counters.add)
        self._sessions = Sessions(tables, clock=clock, random_bytes=random_bytes, grace=config.grace_seconds)
        workers = Workers(self._sessions, identify)
        self._space = Space(
            tables, run=run, clock=clock, random_bytes=random_bytes,
            policy=policy_by_name(config.eviction, tables.layout.rows), counters=self.counters,
            quotas=config.quotas,
            tiers=[
                (tier, settings, policy_by_name(config.eviction, tier.handles_max)) for tier, settings in tiers(workers)
            ],
        )  # fmt: skip
        workers.lend_from(self._space)
        self._requests = Requests(self._space, config.provisional_seconds)
        self._sums = Sums(self._space, self._sessions.hold_extents)
        self._tiering = Tiering(self._space, workers)
        self._sums.verified = self._tiering.committed
        self.switches = Switches()
        self._audits = Audits(self._space, config, random_bytes)
        self._stores = Stores(
            self._space, self._requests, config, arena_id, self._tiering, self.switches, self._audits
        )  # fmt: skip
        self.listing = Listing(self._space, self._sessions)
        self._prefetch = Prefetch(
            self._space, self._tiering.promotions, share=config.prefetch_share, seconds=config.lease_deadline_seconds
        )  # fmt: skip
        self.records = Records(self._space.namespaces, clock)
        self._locates = Locates(
            self._space, self._tiering, self._prefetch, self.records, self.switches, self._sums.want
        )
        self._loads = Loads(self._space, config, arena_id, self._tiering, self.records.unused)
        self._departures = Departures(
            self._sessions, self._stores, self._loads, self._requests, self._prefetch, clock, self._guard
        )  # fmt: skip
        self.pins = Pins(self._space, config.pin_share)
        self.voiding = Voiding(
            self._space, self._sessions, self._stores, self._loads, self._prefetch, self.switches
        )  # fmt: skip

    # Life of the arena

    def adopt(self, alive: Callable[[ProcessIdentity], Liveness]) -> AdoptionReport:
        """Take over what an earlier run left in the tables. Call once, before anything else; an empty arena is fine.

        `ready` is still to be told of the rest of the arena.
        """
        report = Adoption(self._space, self._sessions, self._stores, self._loads, self._tables.layout).run(alive)
        self.counters.add("adopted_objects.kept", report.kept)
        for reason, count in report.dropped.items():
            self.counters.add(f"adopted_objects.{reason}", count)
        return report

    def ready(self, upto_bytes: int) -> None:
        """The arena file is populated up to this offset (bytes from its start; never shrinks)."""
        self._space.allocator.grow(upto_bytes)

    def start_tiers(self) -> None:
        """Have the tiers below RAM open. After `adopt`, so that they find a tree to hang on."""
        self._tiering.start()

    async def close_tiers(self) -> None:
        """Let them finish what is in flight and end their workers; who waits for a look-up is answered."""
        self._locates.close()
        await self._tiering.close()

    def tick(self) -> bool:
        """Deadlines, grace and provisional paths, in bounded slices, and `trim`. Call about every 100 ms."""
        self._guard.each(
            "tick", self._departures.tick, self._requests.expire, self._prefetch.tick, self.pins.tick,
            self.voiding.tick, self._space.reclaim, self._space.settle_some, self._space.unpark, self._tiering.tick,
            self._locates.tick,
        )  # fmt: skip
        return self.trim()

    def trim(self) -> bool:
        """A slice of what ends with sessions, and of watermark eviction in every tier; whether to go on soon."""
        config = self._config
        leaving = self._guard.value("tick", False, self._departures.go_on)
        evicting = self._guard.value(
            "tick", False, self._tiering.trim, config.high_watermark, config.low_watermark, config.evictions_at_once
        )
        return leaving or evicting

    def status(self) -> EngineStatus:
        space = self._space
        tier = TierStatus(
            name="ram",
            kind="ram",
            capacity_bytes=self._tables.layout.data_bytes,
            ready_bytes=space.allocator.ready_bytes,
            used_bytes=space.allocator.used_bytes,
            lent_bytes=space.lent_bytes(),
            objects=space.objects,
            unverified_objects=space.unverified,
            unsummed_objects=space.unsummed,
            prefetched_objects=self._prefetch.held_objects,
            prefetched_bytes=self._prefetch.held_bytes,
            prefetching_requests=len(self._prefetch),
            pinned_objects=self.pins.objects,
            pinned_bytes=self.pins.bytes,
        )
        return EngineStatus(
            tier=tier,
            lower_tiers=self._tiering.statuses(),
            sessions=tuple(
                s.status(self._config.credit_bytes) for s in self._sessions.by_slot.values() if not s.worker
            ),
            namespaces=tuple(namespace.status() for namespace in space.namespaces.by_slot.values()),
            quotas=tuple(status for account in space.accounts for status in account.statuses()),
            counters=self.counters.snapshot(),
        )

    # Sessions

    def attach(
        self,
        process: ProcessIdentity,
        engine_id: str,
        *,
        scheduler: bool,
        rank: int,
        world_size: int,
        client: ProcessIdentity | None = None,
    ) -> Attached:
        """One connection of one process. Joins the attachment the process already has.

        `client`: the process that `process`, a proxy, stands for. Where it has been attached itself, it stays in the
        table beside its proxy: it may have the arena mapped.

        Raises the errors of core.errors: another live process is this engine's scheduler
        or rank, world_size is out of range or differs, tables are full.
        """
        self._departures.make_room(engine_id, process)
        return self._sessions.attach(
            process, engine_id, scheduler=scheduler, rank=rank, world_size=world_size, client=client
        )

    def disconnected(self, attachment: int) -> None:
        """One connection of the attachment ended while its process lives, or its death cannot be proven."""
        self._sessions.disconnected(attachment)

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """Its process is proven dead.

        Returns attachments of the same session whose connections are to be closed, because
        the session ended with its scheduler (clients attach anew).
        """
        return self._departures.process_dead(attachment)

    def watch(self, attachment: int, watch: Watch) -> None:
        """Take over what tells of the death of its process: closed when the attachment goes, or if it has one."""
        self._sessions.watch(attachment, watch)

    def watch_of(self, attachment: int) -> Watch | None:
        found = self._sessions.attachments.get(attachment)
        return None if found is None else found.watch

    def unwatch(self) -> None:
        """The daemon stops: be told of no death any more. Nothing is freed."""
        self._sessions.unwatch()

    def attachments(self) -> tuple[AttachmentInfo, ...]:
        """All attachments in the table, also those adopted from an earlier run: watch these processes."""
        return self._sessions.infos()

    def register_namespace(
        self, session: bytes, spec: NamespaceSpec, elements: Elements = MappingProxyType({})
    ) -> tuple[bytes, int]:
        """(namespace id, ranks attached).

        Raises when the spec lies about sizes, the table is full, or an operator has made the namespace void.
        `elements`: what the objects are made of, where the engine says so.
        """
        owner = self._sessions.of(session)
        namespace_id = checked_id(spec)
        self.voiding.check(spec)
        check_elements(elements, spec.object_bytes)
        if namespace_id not in owner.namespaces:
            namespace = self._space.namespaces.by_id.get(namespace_id) or self._new_namespace(namespace_id, spec)
            if namespace.spec is None:
                self._space.namespaces.define(namespace, spec)
            namespace.void = False
            namespace.describe(elements)
            namespace.sessions += 1
            namespace.used_at = self._clock()
            owner.namespaces[namespace_id] = namespace
            if len(owner.namespaces) > limits.NAMESPACES_PER_SESSION_MAX:
                oldest = next(iter(owner.namespaces))  # of an epoch long gone
                owner.namespaces.pop(oldest).sessions -= 1
        return namespace_id, owner.ranks_attached

    # Calls; all raise the "attach first" error on an unknown session token

    def locate(self, call: LocateCall, answer: Callable[[LocateReply], None]) -> float:
        """`answer` is called once: before this returns, or when shared tiers have been asked for what is not known.

        Returns after how many seconds `answer_locates` has to be called, so that it is called in time; 0: it was.
        """
        session = self._sessions.of(call.session)
        return self._locates.locate(session, _namespace(session, call.namespace), call, answer)

    def answer_locates(self) -> None:
        """Answer those that have waited for long enough; `tick` does too."""
        self._locates.tick()

    def acquire(self, call: AcquireCall, answer: Answer) -> None:
        """`answer` is called once: before this returns, or when a lower tier has been read, or the lease has ended.

        A repeat of a call that is not answered yet waits with it. `place_some` is to be called afterwards.
        """
        session = self._sessions.of(call.session)
        namespace = _namespace(session, call.namespace)

        def ended(reply: AcquireReply) -> None:
            self.counters.add(f"acquires.{reply.outcome.name.lower()}")
            answer(reply)

        lease = session.leases.get(call.lease_id)
        if isinstance(lease, ReadLease) and lease.pending is not None and lease.fingerprint == hash(call):
            lease.pending.answers.append(answer)
        elif lease is not None:
            reply = lease.reply if lease.repeats(ReadLease, call) else None
            assert reply is None or isinstance(reply, AcquireReply)
            answer(reply or AcquireReply(AcquireOutcome.REFUSED))
        elif call.lease_id in session.ended_leases or not session.complete:
            ended(AcquireReply(AcquireOutcome.REFUSED))
        else:
            recorded = self.records.loading(session.engine_id, namespace, call, ended)
            if (refusal := self.switches.refusal(Switch.LOADS, namespace.id)) is not None:
                self.counters.add(f"refused_loads.{refusal}")
                recorded(AcquireReply(AcquireOutcome.REFUSED, reason=REFUSALS[refusal]))
                return
            if not self._sessions.may_borrow(session):
                recorded(AcquireReply(AcquireOutcome.REFUSED, reason=LENT_ELSEWHERE))
                return
            self._loads.acquire(session, namespace, call, recorded)
            lease = session.leases.get(call.lease_id)
            entries = lease.entries if isinstance(lease, ReadLease) else np.empty(0, np.uint32)
            request, rows = (session.slot, call.request_id), self._space.lent.rows[entries]
            self._guard.call("prefetch", self._prefetch.acquired, request, rows)

    def place_some(self) -> bool:
        """A slice of making room for what acquires wait for; whether there is more to do, soon."""
        return self._loads.place_some()

    def release(self, call: ReleaseCall) -> None:
        session = self._sessions.of(call.session)
        check_limit("leases of one call", len(call.lease_ids), limits.LEASES_PER_CALL_MAX)
        unused = frozenset(call.unused)
        for lease_id in call.lease_ids:
            lease = session.leases.get(lease_id)
            if isinstance(lease, ReadLease):
                self._loads.release(lease, used=lease_id not in unused)
            elif lease is None and lease_id not in session.ended_leases:
                session.ended_leases.add(lease_id)

    def reserve(self, call: ReserveCall) -> ReserveReply:
        session = self._sessions.of(call.session)
        namespace = _namespace(session, call.namespace)
        check_limit("bytes of a request id", len(call.request_id.encode()), limits.REQUEST_ID_BYTES_MAX)
        lease = session.leases.get(call.lease_id)
        if lease is not None:
            reply = lease.reply if lease.repeats(WriteLease, call) else None
            assert reply is None or isinstance(reply, ReserveReply)
            return reply or _all_refused(call, "the lease id is in use, expired, or from an earlier daemon run")
        if call.lease_id in session.ended_leases:
            return _all_refused(call, "the lease was given back already")
        if not session.complete:
            return _all_refused(call, f"{session.ranks_attached} of {session.world_size} ranks are attached")
        if not self._sessions.may_borrow(session):
            return _all_refused(call, LENT_ELSEWHERE)
        self._prefetch.over((session.slot, call.request_id), "computed")
        refusal = self.switches.refusal(Switch.STORES, namespace.id)
        if refusal is not None:
            self._stores.refuse(namespace, call, refusal)
            reply = _all_refused(call, REFUSALS[refusal])
        else:
            reply = self._stores.reserve(session, namespace, call)
        self.records.reserved(session.engine_id, call.request_id, namespace, reply.outcomes)
        namespace.used_at = self._clock()
        return reply

    def commit(self, call: CommitCall) -> CommitReply:
        session = self._sessions.of(call.session)
        check_limit("items of one call", len(call.items), limits.LEASES_PER_CALL_MAX)
        _check_indices(call)
        reply = CommitReply(tuple(self._stores.commit(session, item) for item in call.items))
        self._tiering.pump()
        return reply

    def abandon(self, call: AbandonCall) -> None:
        session = self._sessions.of(call.session)
        check_limit("items of one call", len(call.items), limits.LEASES_PER_CALL_MAX)
        _check_indices(call)
        for item in call.items:
            self._stores.abandon(session, item)

    def end_request(self, call: EndRequestCall) -> None:
        session = self._sessions.of(call.session)
        self._requests.end(session.slot, call.request_id)
        self._prefetch.ended((session.slot, call.request_id))
        self.records.ended(session.engine_id, call.request_id, call.end, next(reversed(session.namespaces), None))

    def drop_undeclared(self, call: DeclareCall) -> Iterator[None]:
        """End the leases that the engine does not hold any more, one a step."""
        session = self._sessions.of(call.session)
        check_limit("leases of one declaration", len(call.lease_ids), limits.LEASES_PER_SESSION_MAX)
        held = set(call.lease_ids)
        for lease in [one for one in session.leases.values() if one.id not in held]:
            if session.leases.get(lease.id) is lease:  # else it has ended between two steps
                self._departures.drop(lease)
                yield

    def declare(self, call: DeclareCall) -> DeclareReply:
        for _ in self.drop_undeclared(call):
            pass
        return self.declared(call)

    def declared(self, call: DeclareCall) -> DeclareReply:
        """The answer, behind the last step: what was granted between two steps stays."""
        session = self._sessions.of(call.session)
        lost = tuple(lease_id for lease_id in call.lease_ids if lease_id not in session.leases)
        return DeclareReply(lost, session.ranks_attached)

    # What operators change

    def switch(self, switch: Switch, namespace_id: bytes, *, on: bool) -> int:
        """Takes effect before it returns. An empty id: for all.

        Returns how many leases were granted before and have not ended: what they lend is loaded on, and what they
        reserved is written, but not committed. Raises NotFound when there is nothing of that id to switch off.
        """
        if namespace_id and not on and namespace_id not in self._space.namespaces.by_id:
            raise NotFound(f"there is no namespace {namespace_id.hex()}")
        self.switches.set(switch, namespace_id, on=on)
        if switch is Switch.LOADS:
            self._refuse_what_waits()
        return self._leases(ReadLease if switch is Switch.LOADS else WriteLease)

    def drain(self, *, draining: bool) -> int:
        """Grant nothing to anybody until it is resumed; what was granted ends as ever. How many leases that are."""
        self.switches.draining = draining
        if draining:
            self._refuse_what_waits()
        return self._leases(ReadLease) + self._leases(WriteLease)

    def _refuse_what_waits(self) -> None:
        refusal = partial(self.switches.refusal, Switch.LOADS)
        self._prefetch.end_namespaces(refusal)
        for session in list(self._sessions.by_slot.values()):
            self._loads.switched_off(session, refusal)

    def _leases(self, kind: type[Lease]) -> int:
        sessions = self._sessions.by_slot.values()
        return sum(isinstance(lease, kind) for session in sessions for lease in session.leases.values())

    def removal(self, namespace_id: bytes, key: bytes) -> Removal:
        """To drop a chunk with all below it or, without a key, all of a namespace. Raises NotFound."""
        return Removal(self._space, namespace_id, key)

    def verification(self, call: VerifyCall) -> Verification:
        """To read again what is there. Raises NotFound. The former one has to be over, or cancelled."""
        return Verification(self._space, self._sums, call)

    def warming(self, namespace_id: bytes, key: bytes) -> Warming:
        """To read the path to a chunk into RAM, or all of a namespace. Raises NotFound or LoadsOff. Likewise."""
        refusal = partial(self.switches.refusal, Switch.LOADS)
        return Warming(self._space, self._prefetch, self._tiering.promotions, refusal, namespace_id, key)

    def configure(self, config: EngineConfig, tiers: Mapping[str, TierConfig]) -> None:
        """Other limits and policies from now on; `tiers` by name. The eviction policy stays the one of the start.

        No lease ends for it. What is above a smaller limit goes by use, by time or tick by tick.
        """
        self._config = config
        self._stores.configure(config)
        self._audits.configure(config)
        self._loads.configure(config)
        self._sessions.configure(grace=config.grace_seconds, lease_deadline=config.lease_deadline_seconds)
        self.pins.configure(config.pin_share)
        self._prefetch.configure(share=config.prefetch_share, seconds=config.lease_deadline_seconds)
        for account in self._space.accounts:
            account.configure(config.quotas)
        for namespace in self._space.namespaces.by_slot.values():
            self._space.namespaces.named(namespace)  # as when it came: to its owners, of which there may be others
        self._tiering.configure(tiers)

    # Checksums

    def next_to_sum(self) -> ToSum | None:
        """The next object for the checksum worker, now lent to it; None when there is none."""
        return self._sums.next()

    def summed(self, row: int, generation: int, sum_lo: int, sum_hi: int) -> None:
        """The worker's answer. A verified object becomes visible, a mismatch drops its subtree."""
        self._sums.summed(row, generation, sum_lo, sum_hi)

    def next_to_compare(self) -> ToCompare | None:
        """Two objects for the checksum worker, both lent to it now; None when there is none."""
        return self._audits.next()

    def compared(self, row: int, *, drifted: bool) -> Drift | None:
        """The worker's answer, and what was dropped for it."""
        return self._audits.compared(row, drifted=drifted)

    @property
    def unsummed(self) -> int:
        """Committed objects without a sum: the next daemon would drop them."""
        return self._space.unsummed

    def finish_sums(self) -> None:
        """The daemon stops: `next_to_sum` verifies nothing more, so that what has no sum gets one."""
        self._sums.finish()

    def sum_worker_died(self) -> None:
        """Its death is proven: what it was lent returns and is handed out again."""
        self._sums.worker_died()
        self._audits.worker_died()

    # Within

    def _new_namespace(self, namespace_id: bytes, spec: NamespaceSpec) -> Namespace:
        """Takes the slot of the least recently used idle namespace when the table is full."""
        namespaces = self._space.namespaces
        namespace = namespaces.add(namespace_id, spec.label, self._clock())
        if namespace is not None:
            return namespace
        idle = (one for one in namespaces.idle() if not self.pins.pins(one))
        vacate(self._space, idle, _NAMESPACE_EVICTIONS_MAX)
        namespace = namespaces.add(namespace_id, spec.label, self._clock())
        if namespace is None:
            raise NoRoom("the namespace table is full, and none could be dropped at once")
        return namespace


def _namespace(session: Session, namespace_id: bytes) -> Namespace:
    namespace = session.namespaces.get(namespace_id)
    if namespace is None:
        raise UnknownNamespace(f"this session has not registered namespace {namespace_id.hex()}")
    return namespace


def _all_refused(call: ReserveCall, reason: str) -> ReserveReply:
    return ReserveReply(bytes([ReserveOutcome.REFUSED]) * len(call.kinds), reason=reason)


def _check_indices(call: CommitCall | AbandonCall) -> None:
    for item in call.items:
        if len(item.indices) % 4:
            raise InvalidArgument(f"indices has {len(item.indices)} bytes, no multiple of 4")
        check_limit("indices of one item", len(item.indices) // 4, limits.OBJECTS_PER_LEASE_MAX)
