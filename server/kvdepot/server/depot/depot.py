"""The core of the daemon: index, leases and sessions over the arena's tables.

This is synchronous code with one owner thread, and no call blocks. This module decides
who may call what, deals with repeats and deadlines, and delegates the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from kvdepot.core import limits
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
    FindTiersCall,
    FindTiersReply,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.control import Switch, VerifyCall
from kvdepot.core.elements import Elements, check_elements
from kvdepot.core.errors import InvalidArgument, NoRoom, NotFound, PermissionDenied, UnknownNamespace
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import check_limit
from kvdepot.server.depot.assembly import Assembly
from kvdepot.server.depot.loads.acquires import Answer
from kvdepot.server.depot.operators.deletion import Deletion
from kvdepot.server.depot.operators.operator_prefetch import OperatorPrefetch
from kvdepot.server.depot.operators.verification import Verification
from kvdepot.server.depot.sessions.session import Lease, ReadLease, Session, WriteLease, engine_digest
from kvdepot.server.depot.sessions.sessions import LENT_ELSEWHERE
from kvdepot.server.depot.sessions.shares import share_of
from kvdepot.server.depot.tree.free_slots import free_slot
from kvdepot.server.depot.tree.namespaces import Namespace, checked_id
from kvdepot.server.depot.tree.switches import REFUSALS
from kvdepot.server.depot.types import (
    Attached,
    AttachmentInfo,
    Drift,
    Membership,
    Owner,
    ProcessIdentity,
    ToCompare,
    ToSum,
    Watch,
)

_NAMESPACE_EVICTIONS_MAX: Final = 4096
"""Nodes dropped in one call to make a namespace slot free: some 50 ms."""


class Depot(Assembly):
    """The answers to every call of `kvdepot.core.calls`. Errors are classes of `kvdepot.core.errors`."""

    # Sessions

    def attach(self, process: ProcessIdentity, member: Membership, client: ProcessIdentity | None = None) -> Attached:
        """Attach one connection of one process. It joins the attachment that the process already has.

        The same engine id of another owner is another engine.
        `client`: the process that `process`, a proxy, stands for. If the client has been attached itself, it stays in
        the table in addition to its proxy, because it may have the arena mapped.

        Raise the errors of core.errors: another live process is this engine's scheduler
        or rank, world_size is out of range or differs, tables are full.
        """
        self._departures.make_room(engine_digest(member.engine_id, member.owner), process, member.owner)
        return self._sessions.attach(process, member, client)

    def check_attachment(self, client: ProcessIdentity, member: Membership) -> None:
        """Raise what `attach` would raise for a process that needs a proxy, before the proxy is started."""
        self._departures.make_room(engine_digest(member.engine_id, member.owner), client, member.owner)
        self._sessions.check(client, member)

    def disconnected(self, attachment: int) -> None:
        """Note that one connection of the attachment ended. Its process lives, or its death cannot be proven."""
        self._sessions.disconnected(attachment)

    def process_dead(self, attachment: int) -> tuple[int, ...]:
        """Note that the process of the attachment is proven dead.

        Return attachments of the same session whose connections are to be closed, because
        the session ended with its scheduler (clients attach again).
        """
        return self._departures.process_dead(attachment)

    def watch(self, attachment: int, watch: Watch) -> None:
        """Take over what reports the death of the attachment's process.

        It is closed when the attachment goes, or at once if the attachment already has one.
        """
        self._sessions.watch(attachment, watch)

    def watch_of(self, attachment: int) -> Watch | None:
        found = self._sessions.attachments.get(attachment)
        return None if found is None else found.watch

    def unwatch(self) -> None:
        """Stop watching processes, because the daemon stops. Deaths are not reported any more. Nothing is freed."""
        self._sessions.unwatch()

    def attachments(self) -> tuple[AttachmentInfo, ...]:
        """Return all attachments in the table, also those adopted from an earlier run: watch these processes."""
        return self._sessions.infos()

    def register_namespace(
        self, session: bytes, spec: NamespaceSpec, elements: Elements = MappingProxyType({})
    ) -> tuple[bytes, int]:
        """Register a namespace for a session. Return (namespace id, ranks attached).

        Raise when the spec is another tenant's or lies about sizes, the table is full, or an operator has invalidated
        the namespace.
        `elements`: the element layout of the objects, where the engine reports it.
        """
        engine = self._sessions.of(session)
        owner = engine.owner
        assert owner is not None, "who has a token has attached"
        _check_tenant(owner, spec)
        namespace_id = checked_id(spec)
        self.invalidation.check(spec)
        check_elements(elements, spec.object_bytes)
        self.invalidation.inherit(spec)
        if namespace_id not in engine.namespaces:
            namespace = self._tree.namespaces.by_id.get(namespace_id) or self._new_namespace(namespace_id, spec, owner)
            if namespace.spec is None:
                self._tree.namespaces.define(namespace, spec, owner, share_of(owner, self._config.tenants).spec_bytes)
            namespace.invalid = False
            namespace.describe(elements)
            namespace.sessions += 1
            namespace.used_at = self._clock()
            sizes = map(self._ram.rounded, namespace.object_bytes.values())
            engine.object_bytes_max = max(engine.object_bytes_max, *sizes)
            engine.namespaces[namespace_id] = namespace
            if len(engine.namespaces) > limits.NAMESPACES_PER_SESSION_MAX:
                oldest = next(iter(engine.namespaces))  # of an epoch long gone
                engine.namespaces.pop(oldest).sessions -= 1
        return namespace_id, engine.ranks_attached

    # Calls, of the scheduler alone: all raise UnknownSession for an unknown token, NotScheduler for a rank's

    def locate(self, call: LocateCall, answer: Callable[[LocateReply], None]) -> float:
        """Call `answer` once: before this returns, or when shared tiers have been asked for what is not known.

        Return after how many seconds `answer_locates` has to be called, so that `answer` is called in time.
        0 means that `answer` was called.
        """
        session = self._sessions.of(call.session)
        return self._locates.locate(session, _namespace(session, call.namespace_id), call, answer)

    def answer_locates(self) -> None:
        """Answer the Locates that have waited for long enough. `tick` does so too."""
        self._locates.tick()

    def find_tiers(self, call: FindTiersCall) -> FindTiersReply:
        namespace = _namespace(self._sessions.of(call.session), call.namespace_id)
        return FindTiersReply(self._locates.nearest(namespace, call.keys).tobytes())

    def acquire(self, call: AcquireCall, answer: Answer) -> None:
        """Call `answer` once: before this returns, or when a lower tier has been read, or the lease has ended.

        A repeat of a call that is not answered yet waits with it. The caller calls `place_some` afterwards.
        """
        session = self._sessions.of(call.session)
        namespace = _namespace(session, call.namespace_id)

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
            request, rows = (session.slot, call.request_id), self._ram.lent.rows[entries]
            self._guard.call("prefetch", self._prefetch.acquired, request, rows)

    def place_some(self) -> bool:
        """Make room, in one slice, for what acquires wait for. Return whether there is more to do, soon."""
        return self._loads.place_some()

    def release(self, call: ReleaseCall) -> None:
        session = self._sessions.of(call.session)
        check_limit("leases of one call", len(call.lease_ids), limits.LEASES_PER_CALL_MAX)
        unused, doubted = frozenset(call.unused), frozenset(call.doubted)
        for lease_id in call.lease_ids:
            lease = session.leases.get(lease_id)
            if isinstance(lease, ReadLease):
                if lease_id in doubted:
                    self._checksums.doubt(self._ram.lent.rows[lease.entries].tolist())
                self._loads.release(lease, used=lease_id not in unused)
            elif lease is None and lease_id not in session.ended_leases:
                session.ended_leases.add(lease_id)

    def reserve(self, call: ReserveCall) -> ReserveReply:
        session = self._sessions.of(call.session)
        namespace = _namespace(session, call.namespace_id)
        check_limit("bytes of a request id", len(call.request_id.encode()), limits.REQUEST_ID_BYTES_MAX)
        lease = session.leases.get(call.lease_id)
        if lease is not None:
            reply = lease.reply if lease.repeats(WriteLease, call) else None
            assert reply is None or isinstance(reply, ReserveReply)
            return reply or _all_refused(call, "the lease id is in use, expired, or from an earlier daemon run")
        if call.lease_id in session.ended_leases:
            return _all_refused(call, "the lease was released already")
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
            self._what_ifs.reserved(session.engine_id, namespace, call)
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
        self._what_ifs.ended(session.engine_id, call.request_id)
        self._token_reports.count(session, call.tokens, call.end)

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
        """Answer after the last step. What was granted between two steps stays."""
        session = self._sessions.of(call.session)
        lost = tuple(lease_id for lease_id in call.lease_ids if lease_id not in session.leases)
        return DeclareReply(lost, session.ranks_attached)

    # What operators change

    def switch(self, switch: Switch, namespace_id: bytes, *, on: bool) -> int:
        """Switch loads or stores on or off. This takes effect before it returns. An empty id means all namespaces.

        Return how many leases were granted before and have not ended. Engines finish loading what these leases lend.
        Engines finish writing what these leases reserved, but it is not committed.
        Raise NotFound when there is no namespace of that id to switch off.
        """
        if namespace_id and not on and namespace_id not in self._tree.namespaces.by_id:
            raise NotFound(f"there is no namespace {namespace_id.hex()}")
        self.switches.set(switch, namespace_id, on=on)
        if switch is Switch.LOADS:
            self._refuse_what_waits()
        return self._leases(ReadLease if switch is Switch.LOADS else WriteLease)

    def drain(self, *, draining: bool) -> int:
        """Start or stop draining: grant no lease until it stops. Granted leases end as usual. Return their number."""
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

    def tell_undropped(self, told: Callable[[bytes], None]) -> None:
        """Have `told` called with the namespace of an object in doubt that a tier cannot drop permanently."""
        for tier in self._tree.tiers:
            tier.undropped = told

    def deletion(self, namespace_id: bytes, key: bytes) -> Deletion:
        """Make a deletion of a chunk with everything after it or, without a key, of a namespace. Raise NotFound."""
        return Deletion(self._tree, namespace_id, key)

    def verification(self, call: VerifyCall) -> Verification:
        """Make a verification of what is stored. Raise NotFound. One may run at a time."""
        return Verification(self._tree, self._ram, self._checksums, call)

    def operator_prefetch(self, namespace_id: bytes, key: bytes) -> OperatorPrefetch:
        """Start an operator prefetch of a chunk's prefix or a namespace; one at a time. Raise NotFound or LoadsOff."""
        refusal = partial(self.switches.refusal, Switch.LOADS)
        return OperatorPrefetch(
            self._tree, self._ram, self._prefetch, self._tiering.promotions, refusal, namespace_id, key
        )

    # Checksums

    def next_to_sum(self) -> ToSum | None:
        """Return the next object for the checksum worker, now lent to the worker. Return None when there is none."""
        return self._checksums.next()

    def summed(self, row: int, generation: int, sum_lo: int, sum_hi: int) -> None:
        """Apply the answer of the checksum worker. A verified object becomes visible. A mismatch drops its subtree."""
        self._checksums.summed(row, generation, sum_lo, sum_hi)

    def next_to_compare(self) -> ToCompare | None:
        """Return two objects for the checksum worker, both lent to it now. Return None when there is no pair."""
        return self._audits.next()

    def compared(self, row: int, *, drifted: bool) -> Drift | None:
        """Apply the answer of the worker to a comparison. Return what was dropped because of it."""
        return self._audits.compared(row, drifted=drifted)

    @property
    def unsummed(self) -> int:
        """The number of committed objects without a checksum. The next daemon would drop them."""
        return self._ram.pending_checksums

    def finish_sums(self) -> None:
        """Let `next_to_sum` verify nothing more, because the daemon stops. Objects without a checksum get one."""
        self._checksums.finish()

    def sum_worker_died(self) -> None:
        """Note that the checksum worker is proven dead. What was lent to it returns and is handed out again."""
        self._checksums.worker_died()
        self._audits.worker_died()

    # Within

    def _new_namespace(self, namespace_id: bytes, spec: NamespaceSpec, owner: Owner) -> Namespace:
        """Add a namespace. When the table is full, it takes the slot of the least recently used idle namespace.

        A user or tenant with its share of the table takes an idle one of its own first. Raise NoRoom when no slot can
        be made free at once, or the share is in use.
        """
        namespaces, share = self._tree.namespaces, share_of(owner, self._config.tenants).namespaces
        own = namespaces.of_party(owner.party)
        if sum(one.sessions > 0 for one in own) >= share:
            raise NoRoom(f"{owner.party_name} has {share} namespaces in use, which is its share")
        namespace = namespaces.add(namespace_id, spec.label, self._clock())
        if namespace is not None:
            return namespace
        idle = [one for one in namespaces.idle() if not self.pins.pins(one)]
        if len(own) >= share:
            idle.sort(key=lambda one: one.party != owner.party)
        free_slot(self._tree, idle, _NAMESPACE_EVICTIONS_MAX)
        namespace = namespaces.add(namespace_id, spec.label, self._clock())
        if namespace is None:
            raise NoRoom("the namespace table is full, and none could be dropped at once")
        return namespace


def _check_tenant(owner: Owner, spec: NamespaceSpec) -> None:
    """Raise PermissionDenied for a spec of another tenant. The answer depends on nothing that the daemon has.

    The daemon does not put the right name in its place: an engine computes the namespace's id itself.
    """
    if owner.tenant is not None and spec.tenant != owner.tenant:
        raise PermissionDenied(
            f"uid {owner.uid} is in tenant {owner.tenant!r}, and the namespace says {spec.tenant!r}",
            advice=f'set "tenant": "{owner.tenant}" in kv_connector_extra_config',
        )


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
