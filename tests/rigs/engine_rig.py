"""An engine over a small arena in memory, with a clock to turn, and an audit of everything it believes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from random import Random
from types import MappingProxyType

import numpy as np
from kvdepot.core.arena import NO_ROW, ArenaLayout, ArenaTables, LentMode, RowState
from kvdepot.core.calls import (
    ROOT_KEY,
    AbandonCall,
    AcquireCall,
    AcquireReply,
    CommitCall,
    CommitItem,
    EndRequestCall,
    Kind,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.elements import Elements
from kvdepot.core.epochs import Epochs
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.planner import GroupSpec, Planner
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.sessions.session import ReadLease, Session
from kvdepot.server.depot.stores.audits import RAM_SHARE_MAX
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import (
    OWN,
    AdoptionReport,
    Attached,
    DepotConfig,
    Liveness,
    Membership,
    Owner,
    ProcessIdentity,
    TierConfig,
)
from kvdepot.server.storage.base import Tier, WorkerRegistry

from tests.fakes.memory_tier import Medium, MemoryTier
from tests.fakes.shared_memory_tier import SharedMedium, SharedMemoryTier
from tests.rigs.pin_audit import audit_pins
from tests.rigs.prefetch_audit import audit_prefetch
from tests.rigs.quota_audit import audit_quotas
from tests.rigs.tree_audit import audit_tree

CHUNK = 32
BOOT = b"boot-id-16-bytes"
ARENA_ID = 7

Extents = list[list[int]]
"""Rows of (object index, row, offset, length, generation)."""


def spec_of(*groups: GroupSpec, name: str = "a", chunk_tokens: int = CHUNK, tenant: str = "") -> NamespaceSpec:
    planner = Planner(groups, chunk_tokens)
    sizes = {kind: planner.object_bytes(kind) for kind in planner.kinds}
    return NamespaceSpec({"model": f'"{name}"'}, chunk_tokens, groups, sizes, label=name, tenant=tenant)


DENSE = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)))  # 8 KiB an object
HYBRID = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
    GroupSpec(Kind.STATE, 32, rank_block_bytes=(5000,)),  # two pages an object
    name="hybrid",
)


def process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, 1000 + pid, BOOT)


def key(*path: object) -> bytes:
    """A chunk key that depends on the whole path, as real ones do."""
    return blake2b(repr(path).encode(), digest_size=16).digest()


def path(name: object, chunks: int) -> list[bytes]:
    return [key(name, chunk) for chunk in range(chunks)]


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def unpack(extents: bytes) -> Extents:
    unpacked: Extents = np.frombuffer(extents, "<u8").reshape(-1, 5).tolist()
    return unpacked


class Rig:
    """One arena and, at a time, one engine over it. `crash` starts the next daemon run on the same bytes."""

    def __init__(
        self,
        data_pages: int = 64,
        rows: int = 128,
        lent_rows: int = 128,
        *,
        seed: int = 0,
        tier: TierConfig | None = None,
        tier_bytes: int = 1 << 20,
        tier_handles: int = 256,
        drop_nodes_max: int = 256,
        shared: TierConfig | None = None,
        shared_medium: SharedMedium | None = None,
        shared_handles: int = 256,
        audit_share: float = RAM_SHARE_MAX,
        parts: Sequence[int] = (),
        **config: object,
    ) -> None:
        overhead_bytes = ArenaLayout.plan(64 << 20, rows, lent_rows).overhead_bytes
        data_bytes = sum(parts) or data_pages * 4096
        self.layout = replace(
            ArenaLayout.plan(overhead_bytes + data_bytes, rows, lent_rows), divided=tuple(parts)
        )  # fmt: skip
        self.buffer = memoryview(bytearray(self.layout.data_bytes))
        self.tables = memoryview(bytearray(self.layout.tables_bytes))
        self.generations = memoryview(bytearray(self.layout.generations_bytes))
        self.now = 100.0
        self.room_bytes: tuple[int, ...] = ()  # of the next run; empty: all
        self.run = 0
        self.dead: set[int] = set()
        self.leases = 1 << 40
        self.random = Random(seed)
        self.config = DepotConfig(**({"credit_bytes": 1 << 30, "high_watermark": 1.0} | config))  # type: ignore[arg-type]
        self.report = AdoptionReport()
        self.epochs = Epochs()  # that the state file has
        self.tier_config = tier
        self.tier_bytes = tier_bytes
        self.tier_handles = tier_handles
        self.drop_nodes_max = drop_nodes_max
        self.medium = Medium()
        self.shared_config = shared
        self.shared_medium = shared_medium or SharedMedium()
        self.shared_handles = shared_handles
        self.audit_share = audit_share
        self.worker_pids = 5000  # each run's tier has a worker process of its own
        self.populated_at_start = True
        self.tier_opens_at_start = True
        self.places_at_once = True  # what acquires wait for; else `engine.place_some` has to be called
        self.start()

    def start(self) -> None:
        self.run += 1
        tables = ArenaTables(self.tables, self.layout, self.generations)
        tables.room_bytes = self.room_bytes or self.layout.parts
        self.depot = Depot(
            tables,
            arena_id=ARENA_ID,
            run=self.run,
            clock=lambda: self.now,
            random_bytes=self.random.randbytes,
            config=self.config,
            tiers=self._tiers,
            identify=self.identify,
        )
        self.depot._tree.drop_nodes_max = self.drop_nodes_max
        self.depot._audits.ram_share_max = self.audit_share
        self.depot.invalidation.epochs = self.epochs
        self.report = self.depot.adopt(self.liveness)
        self.ready_bytes_after_adoption = self.depot.status().tier.ready_bytes
        if self.populated_at_start:
            for part, size_bytes in enumerate(self.layout.parts):
                self.depot.ready(size_bytes, part)
        self.depot.start_tiers()

    def wipe(self) -> None:
        """Forget the arena, as a reboot does."""
        self.buffer[:] = bytes(len(self.buffer))
        self.tables[:] = bytes(len(self.tables))
        self.generations[:] = bytes(len(self.generations))

    def _tiers(self, registry: WorkerRegistry) -> list[tuple[Tier, TierConfig]]:
        tiers: list[tuple[Tier, TierConfig]] = []
        self.lower_tiers: list[MemoryTier] = []
        if self.tier_config is not None:
            self.worker_pids += 1
            self.tier = MemoryTier(
                self.buffer, registry, medium=self.medium, capacity_bytes=self.tier_bytes,
                handles_max=self.tier_handles, pid=self.worker_pids,
            )  # fmt: skip
            self.tier.opens_at_start = self.tier_opens_at_start
            tiers.append((self.tier, self.tier_config))
            self.lower_tiers.append(self.tier)
        if self.shared_config is not None:
            self.worker_pids += 1
            self.shared = SharedMemoryTier(
                self.buffer, registry, shared=self.shared_medium, name="nfs", handles_max=self.shared_handles,
                pid=self.worker_pids,
            )  # fmt: skip
            tiers.append((self.shared, self.shared_config))
            self.lower_tiers.append(self.shared)
        return tiers

    def identify(self, pid: int) -> ProcessIdentity:
        return process(pid)

    def liveness(self, identity: ProcessIdentity) -> Liveness:
        if identity.pid == 0:
            return Liveness.UNKNOWN
        return Liveness.DEAD if identity.pid in self.dead else Liveness.ALIVE

    crash = start

    def part_of(self, spec: NamespaceSpec) -> range:
        """Return the bytes, counted over all data, that an engine of this namespace's tenant is given."""
        part = sorted(self.config.tenants).index(spec.tenant) if self.layout.divided else 0
        start = self.layout.part_starts[part]
        return range(start, start + self.layout.parts[part])

    def attach(
        self, engine_id: str = "engine", pid: int = 10, spec: NamespaceSpec = DENSE,
        elements: Elements = MappingProxyType({}), *, owner: Owner = OWN,
    ) -> Client:  # fmt: skip
        attached = self.depot.attach(
            process(pid), Membership(engine_id, scheduler=True, rank=0, world_size=1, owner=owner)
        )
        return Client(self, attached, spec, elements)

    def sum_all(self, sum_of: Callable[[int], int] = lambda row: row) -> int:
        """The checksum worker's part for everything there is to sum."""
        count = 0
        while (job := self.depot.next_to_sum()) is not None:
            self.depot.summed(job.row, job.generation, sum_of(job.extents[0][0]), 1)
            count += 1
        return count

    def counter(self, name: str) -> float:
        return self.depot.counters.get(name)


class Client:
    """The scheduler side of one engine, for one namespace."""

    def __init__(
        self, rig: Rig, attached: Attached, spec: NamespaceSpec, elements: Elements = MappingProxyType({})
    ) -> None:
        self.rig = rig
        self.session = attached.session
        self.attachment = attached.attachment
        self.spec = spec
        self.namespace, _ = rig.depot.register_namespace(self.session, spec, elements)

    @property
    def data(self) -> memoryview:
        """All data that the engine is given: that of its tenant, if each has its own."""
        part = self.rig.part_of(self.spec)
        return self.rig.buffer[part.start : part.stop]

    def lease(self) -> int:
        """Unique over the rig's life, as ids are within a session's."""
        self.rig.leases += 1
        return self.rig.leases

    def reserve(
        self,
        keys: Sequence[bytes],
        kinds: Sequence[Kind] = (Kind.ATTENTION,),
        *,
        lease: int | None = None,
        start: int = 0,
        parent: bytes = ROOT_KEY,
        request: str = "",
    ) -> tuple[int, ReserveReply]:
        """Objects of all `kinds` for consecutive chunks; `start` is the number of the first."""
        lease = self.lease() if lease is None else lease
        parents = [parent, *keys][: len(keys)]
        each = len(kinds)
        boundaries = [(start + at + 1) * CHUNK for at in range(len(keys)) for _ in kinds]
        call = ReserveCall(
            self.session,
            lease,
            self.namespace,
            b"".join(k * each for k in keys),
            b"".join(p * each for p in parents),
            bytes(kinds) * len(keys),
            u32(*boundaries),
            request,
        )
        return lease, self.rig.depot.reserve(call)

    def commit(self, lease: int, *indices: int) -> bytes:
        call = CommitCall(self.session, (CommitItem(lease, u32(*indices)),))
        return self.rig.depot.commit(call).outcomes[0]

    def abandon(self, lease: int, *indices: int) -> None:
        self.rig.depot.abandon(AbandonCall(self.session, (CommitItem(lease, u32(*indices)),)))

    def store(
        self, keys: Sequence[bytes], kinds: Sequence[Kind] = (Kind.ATTENTION,), *,
        start: int = 0, parent: bytes = ROOT_KEY, request: str = "",
    ) -> None:  # fmt: skip
        chunks = RESERVED_PER_CALL_MAX // len(kinds)
        for at in range(0, len(keys), chunks):
            above, part = keys[at - 1] if at else parent, keys[at : at + chunks]
            lease, reply = self.reserve(part, kinds, start=start + at, parent=above, request=request)
            granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
            assert set(reply.outcomes) <= {ReserveOutcome.GRANTED, ReserveOutcome.PRESENT}, reply
            assert set(self.commit(lease, *granted)) <= {1}

    def acquire(
        self, keys: Sequence[bytes], kinds: Sequence[Kind] | None = None, lease: int | None = None, request: str = ""
    ) -> tuple[int, AcquireReply]:
        lease = self.lease() if lease is None else lease
        packed = bytes(kinds or [Kind.ATTENTION] * len(keys))
        (reply,) = self.acquire_later(keys, packed, lease, request)
        return lease, reply

    def acquire_later(self, keys: Sequence[bytes], kinds: bytes, lease: int, request: str = "") -> list[AcquireReply]:
        """Gets the answer when there is one."""
        answers: list[AcquireReply] = []
        call = AcquireCall(self.session, lease, self.namespace, b"".join(keys), kinds, request)
        self.rig.depot.acquire(call, answers.append)
        while self.rig.places_at_once and self.rig.depot.place_some():
            pass
        return answers

    def release(self, *leases: int, unused: tuple[int, ...] = ()) -> None:
        self.rig.depot.release(ReleaseCall(self.session, leases, unused))

    def locate(
        self, keys: Sequence[bytes], high_tokens: int = 1 << 30, request: str = "", budget_seconds: float = 0.0,
        *, local_tokens: int = 0, token_seconds: float = 0.0,
    ) -> LocateReply:  # fmt: skip
        (reply,) = self.locate_later(
            keys, high_tokens, request, budget_seconds, local_tokens=local_tokens, token_seconds=token_seconds
        )
        return reply

    def locate_later(
        self, keys: Sequence[bytes], high_tokens: int = 1 << 30, request: str = "", budget_seconds: float = 0.0,
        wait_seconds: float = 0.0, local_tokens: int = 0, token_seconds: float = 0.0, source_id: int = 0,
    ) -> list[LocateReply]:  # fmt: skip
        """Gets the answer when there is one."""
        answers: list[LocateReply] = []
        call = LocateCall(
            self.session, self.namespace, b"".join(keys), high_tokens, request, budget_seconds, wait_seconds,
            local_tokens, token_seconds, source_id,
        )  # fmt: skip
        self.rig.depot.locate(call, answers.append)
        return answers

    def end_request(self, request: str) -> None:
        self.rig.depot.end_request(EndRequestCall(self.session, request))


def audit(engine: Depot, prefetch_bytes: Sequence[int] = ()) -> None:
    """Assert that tables, index, allocator, lent table and figures tell one story. White box on purpose.

    `prefetch_bytes`: by room, what prefetch may have pinned before its share became smaller.
    """
    tree, ram = engine._tree, engine._ram
    rows, lent = ram.rows, ram.lent
    heads = [
        int(row) for row in np.flatnonzero((rows.states != RowState.FREE) & (rows.states != RowState.CONTINUATION))
    ]
    chained = [row for head in heads for row in rows.chain(head)]
    assert len(chained) == len(set(chained)), "a row belongs to two objects"
    assert len(chained) == int((rows.states != RowState.FREE).sum()), "a continuation row without a head"
    assert rows.free_count == rows.count - len(chained)
    assert set(rows._free[: rows.free_count].tolist()).isdisjoint(chained)
    _audit_bytes(engine, chained)
    used = np.flatnonzero(lent.modes != LentMode.FREE)
    assert lent.free_count == lent.count - len(used)
    for mode, counts in ((LentMode.READ, lent.reads), (LentMode.WRITE, lent.writes)):
        loans = np.bincount(lent.sessions[lent.modes == mode], minlength=len(counts))
        assert (counts == loans).all(), "sessions are lent other numbers of objects"
    pins = np.bincount(lent.rows[used], minlength=rows.count)
    assert (pins == lent.pins).all(), "pins differ from the lent table"
    _audit_index(engine, heads)
    for head in heads:
        state, odd = rows.state[head], [rows.generation[row] & 1 for row in rows.chain(head)]
        assert set(odd) == {1 if state == RowState.RESERVED else 0}
        if state == RowState.RESERVED:
            writers = np.flatnonzero((lent.rows == head) & (lent.modes == LentMode.WRITE))
            assert len(writers) <= 1
            assert pins[head] == len(writers) == 1 or engine._tiering.promotions.reading(head)
        assert state != RowState.DYING or pins[head] > 0, "dying, and nobody is lent it"
    _audit_leases(engine)
    _audit_sessions(engine)
    audit_tree(tree)
    audit_quotas(engine)
    audit_prefetch(engine, prefetch_bytes)
    audit_pins(engine)


def _audit_bytes(engine: Depot, chained: list[int]) -> None:
    ram = engine._ram
    rounded = ram.rounded
    extents = sorted((ram.rows.offset[row], rounded(ram.rows.length[row])) for row in chained)
    for (one, length), (other, _) in pairwise(extents):
        assert one + length <= other, "extents overlap"
    for room in ram.rooms:
        end = room.used_end
        here = [min(length, end - offset) for offset, length in extents if room.start <= offset < end]
        assert (room.used_bytes, room.rows_used) == (sum(here), len(here)), "a room miscounts what lies there"
        room.allocator.check()
    for slot in ram._namespaces.by_slot if len(ram.rooms) > 1 else ():
        of = {ram.part_of(row) for row in chained if ram.rows.namespace[row] == slot}
        room_of = ram.rooms.of(slot)
        # After a restart, what is going already does not say where it belongs. It lies in one part all the same.
        states = {ram.rows.state[row] for row in chained if ram.rows.namespace[row] == slot}
        unknown = room_of is None and states.isdisjoint((RowState.RESERVED, RowState.COMMITTED)) and len(of) <= 1
        assert unknown or (room_of and of <= {room_of.number}), "an object lies in another tenant's part"


def _audit_index(engine: Depot, heads: list[int]) -> None:
    tree, ram = engine._tree, engine._ram
    rows, index = ram.rows, tree.index
    detached = set(np.flatnonzero(ram.detached.flags).tolist())
    assert len(detached) == len(ram.detached) == sum(map(ram.detached.count, tree.namespaces.by_slot))
    for head in detached:
        assert rows.state[head] == RowState.COMMITTED and rows.summed(head) and rows.run_of[head] != rows.run
        assert head in heads and ram.node_of(head) == NONE, "detached, and in the index"
        assert not ram.pins.user.pinned[head] and not ram.pins.prefetch.pinned[head]
    indexed = [
        head for head in heads if rows.state[head] in (RowState.RESERVED, RowState.COMMITTED) and head not in detached
    ]
    names = [(rows.namespace[head], rows.key(head), rows.kind[head]) for head in (*indexed, *detached)]
    assert len(names) == len(set(names)), "two objects of one name: the next run would keep neither"
    with_rows = {ram.node_of(head) for head in indexed}
    assert NONE not in with_rows, "an object that the index does not know"
    nodes = set(index.nodes().tolist())
    assert with_rows <= nodes
    _audit_tiers(engine, nodes)
    assert index.count == len(nodes) == sum(n.nodes for n in tree.namespaces.by_slot.values())
    for node in nodes:
        parent = index.parent(node)
        assert parent == NONE or (parent in nodes and node in index.children(parent))
        for row in index.rows_of(node):
            assert index.unlinked(node) or rows.parent(row) == (ROOT_KEY if parent == NONE else index.key(parent))
        assert bool(index.kinds_in_ram(node)) == (node in with_rows)
        assert index.children_in_ram(node) == sum(map(bool, map(index.kinds_in_ram, index.children(node))))
    committed = [head for head in indexed if rows.state[head] == RowState.COMMITTED]
    assert ram.objects == len(committed) == sum(sum(n.objects.values()) for n in tree.namespaces.by_slot.values())
    assert sum(n.bytes for n in tree.namespaces.by_slot.values()) == sum(map(ram.size_bytes, committed))
    assert ram.unverified == sum(rows.run_of[head] != rows.run for head in committed)
    assert ram.pending_checksums == sum(rows.run_of[head] == rows.run and not rows.summed(head) for head in committed)
    evictable = {node for node in nodes if ram.evictor.worth(node) is not None}
    offered = {node for node in nodes if node in ram.evictor.policy._candidates}  # type: ignore[attr-defined]
    assert offered | ram.evictor.deferred >= evictable, "a unit that may go and the policy will never name"
    assert offered <= evictable, "the policy would name what may not go"
    ends = {node for node in nodes if ram.evictor._orphan_kinds(node)}
    noted = {node for nodes_of_slot in ram.evictor._orphans.values() for node in nodes_of_slot}
    assert noted == ends, "an end that may go and is not known, or the other way round"
    assert all(row == NO_ROW or row in heads for node in nodes for row in index.rows_of(node))


def _audit_tiers(engine: Depot, nodes: set[int]) -> None:
    """Every node has an object somewhere, and every object of a tier has a node."""
    tree, index = engine._tree, engine._tree.index
    for node in nodes:
        assert index.has_objects(node) or index.unlinked(node), "a node without objects"
        for tier in tree.tiers:
            below = sum(bool(index.kinds_in_tier(tier.number, child)) for child in index.children(node))
            assert index.children_in_tier(tier.number, node) == below
    for tier in tree.tiers:
        held = {(node, kind): tier.handle(node, kind) for node in nodes for kind in Kind if tier.has(node, kind)}
        assert tier.objects == len(held) == len(set(held.values()))
        told = {(slot, kind): n for slot in tree.namespaces.by_slot for kind, n in tier.contents(slot).items()}
        assert told == Counter((index.namespace(node), int(kind)) for node, kind in held)
        assert all(tier.owner(handle) == owner for owner, handle in held.items())
        if isinstance(tier.tier, MemoryTier) and tier.tier.readable:
            assert set(held.values()) == tier.tier.handles, "the tier holds something else"


def _audit_leases(engine: Depot) -> None:
    """Every entry of the lent table belongs to one lease, and credit is what open reservations hold."""
    ram = engine._ram
    known: list[int] = list(engine._checksums._working.values())
    known += [entry for pair in engine._audits._pairs.values() for entry in (pair.scratch_entry, pair.stored_entry)]
    for session in engine._sessions.by_slot.values():
        credit = 0
        for lease in session.leases.values():
            entries = [int(entry) for entry in lease.entries if entry != -1]
            assert entries, "a lease that holds nothing"
            for entry in entries:
                assert int(ram.lent.sessions[entry]) == session.slot
                assert int(ram.lent.leases[entry]) == lease.id
                row = ram.lent.row_of(entry)
                charged = ram.lent.modes[entry] == LentMode.WRITE and not engine._audits.writing(row)
                credit += ram.rounded_bytes(row) * charged
            known += entries
        assert session.credit_used_bytes == credit * (not session.worker)
        assert 0 <= session.attention_used_bytes <= credit
        _audit_awaited(ram, session)
    used = np.flatnonzero(ram.lent.modes != LentMode.FREE)
    workers = [slot for slot, session in engine._sessions.by_slot.items() if session.worker and not session.leases]
    loans = used[np.isin(ram.lent.sessions[used], workers)].tolist()
    assert sorted(known + loans) == used.tolist()


def _audit_awaited(ram: RamTier, session: Session) -> None:
    """What its loads wait for, and have no room for yet, is what the session is said to wait for."""
    pending = [one.pending for one in session.leases.values() if isinstance(one, ReadLease) and one.pending]
    left = [(one.asked, at) for one in pending for at in one.wanted[one.placed :]]
    sizes = [ram.rounded(asked.namespace.object_bytes[asked.call.kinds[at]]) for asked, at in left]
    assert (session.awaited_objects, session.awaited_bytes) == (len(sizes), sum(sizes))


def _audit_sessions(engine: Depot) -> None:
    """The tables hold what is alive, as the next run will read it, and namespaces know who has registered them."""
    sessions = engine._sessions
    assert sessions._used_slots(sessions._session_used) == sessions.by_slot.keys()
    assert sessions._used_slots(sessions._used) == sessions.attachments.keys()
    for slot, attachment in sessions.attachments.items():
        known = ProcessIdentity(sessions._pid[slot], sessions._start[slot], sessions._boots[slot].tobytes())
        assert (known, sessions._rank[slot]) == (attachment.process, attachment.rank)
        assert sessions._session[slot] == attachment.session.slot
        assert attachment.session.attachments[slot] is attachment
    for slot, session in sessions.by_slot.items():
        assert sessions._engines[slot].tobytes() == session.engine
    assert {token: attachment.slot for token, attachment in sessions.by_token.items()} == {
        attachment.token: slot for slot, attachment in sessions.attachments.items() if attachment.token
    }
    assert not any(attachment.session.ended for attachment in sessions.by_token.values())
    for namespace in engine._tree.namespaces.by_slot.values():
        registered = [one for one in sessions.by_slot.values() if one.namespaces.get(namespace.id) is namespace]
        assert namespace.sessions == len(registered), "a namespace miscounts the sessions that have registered it"
