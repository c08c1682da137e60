"""Several engines' clients, real bytes in the arena, and a dict that knows what may be true.

Every writer fills its extents with bytes of its own for as long as it holds them, also
beyond deadlines and daemon crashes; every reader compares. `killed` aborts the daemon
at a line of its code: what it had stored in the tables by then is all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash
from kvdepot.core.calls import (
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    DeclareCall,
    EndRequestCall,
    Kind,
    LocateReply,
    ReserveOutcome,
)
from kvdepot.core.control import Switch
from kvdepot.core.errors import NotFound
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.types import OWN, Owner, Quota, TierConfig
from kvdepot.server.storage.base import IoOutcome

from tests.fakes.memory_tier import Job, MemoryTier
from tests.fakes.shared_memory_tier import File
from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, audit, key, spec_of
from tests.stateful.auditing import compare, elements_of, flip
from tests.stateful.held_extents import Held, Name, held_by, parts_of
from tests.stateful.killing import Killed, killed_after
from tests.stateful.outliving import check_restart, outliving
from tests.stateful.reloads import DEPOT, TIER, Reloads

DEPTH = 4
ROOM_TICKS = 60
"""An orphan waits for 10 s, and one goes at a time."""
ODD = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(6144,)),  # three pages, beside the two of DENSE: room gets cut up
    GroupSpec(Kind.STATE, 32, rank_block_bytes=(4000,)),
    name="odd",
)
WINDOWED = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(2048,)),
    GroupSpec(Kind.WINDOW, 16, window_tokens=65, rank_block_bytes=(1024,)),  # the chunk's end and the one before
    name="windowed",
)
SPECS = {"a": DENSE, "b": DENSE, "c": ODD, "d": WINDOWED}


@dataclass
class Waiting:
    """An acquire, the objects it names, and its answer once there is one."""

    names: list[Name]
    answers: list[AcquireReply]
    late: bool


@dataclass
class Locating:
    """A Locate of an engine, for these chunks, and its answer once there is one."""

    who: str
    client: Client
    keys: list[bytes]
    answers: list[LocateReply]
    request: str  # that waits in the engine's queue; empty: none does


@dataclass
class Ghost:
    """An I/O worker of an earlier run that lives on, and what it may still write to."""

    pid: int
    extents: list[tuple[int, int]]


@dataclass
class Depot:
    """One engine: its process, its client, and the leases whose extents its ranks may touch."""

    spec: NamespaceSpec
    pid: int
    client: Client | None = None
    writes: dict[int, dict[int, Held]] = field(default_factory=dict)
    reads: dict[int, dict[int, Held]] = field(default_factory=dict)
    outdated: dict[int, set[int]] = field(default_factory=dict)  # commits asked whose answer got lost
    waiting: dict[int, Waiting] = field(default_factory=dict)  # acquires that are not answered yet
    queued: dict[int, str] = field(default_factory=dict)  # by path: the request that waits in the engine's queue


def keys_of(path: int, depth: int) -> list[bytes]:
    """Three paths, two of which share their first two chunks."""
    return [key("shared" if path < 2 and at < 2 else path, at) for at in range(depth)]


class World:
    """All that happens between engines and one daemon, and what must hold whatever happens."""

    rig: Rig
    settings = DEPOT, TIER
    """What a reload may change: of the depot, and of each lower tier."""

    def __init__(
        self,
        data_pages: int = 24,
        tier: TierConfig | None = None,
        quotas: tuple[Quota, ...] = (),
        shared: TierConfig | None = None,
        neighbour: World | None = None,
        specs: Mapping[str, NamespaceSpec] = SPECS,
        **others: Any,
    ) -> None:
        """`neighbour`: another node, over the same shared medium. `others`: what the rig has otherwise."""
        medium = neighbour.rig.shared_medium if neighbour else None
        self.rig = Rig(**{
            "data_pages": data_pages, "rows": 40, "lent_rows": 48, "tier": tier, "tier_bytes": 14 * 12288,
            "drop_nodes_max": 1, "shared": shared, "shared_handles": 20, "shared_medium": medium,
            "credit_bytes": 14 * 4096, "lease_deadline_seconds": 10.0, "grace_seconds": 30.0,
            "provisional_seconds": 20.0, "high_watermark": 0.9, "low_watermark": 0.7, "loads_in_flight": 3,
            "evictions_at_once": 2, "quotas": quotas, "audit_sample": 0.5, "audit_share": 0.25, **others,
        })  # fmt: skip
        self.reloads = Reloads(self.rig)
        # Leases whose bytes an object may have.
        self.writers: dict[Name, set[int]] = neighbour.writers if neighbour else {}
        if neighbour is not None:
            self.rig.leases = neighbour.rig.leases << 1
        self.pids = 10
        self.engines = {name: self._born(spec) for name, spec in specs.items()}
        self.split_objects = 0
        self.ghosts: list[Ghost] = []
        self.promoted = 0  # acquires that waited for a lower tier and were granted
        self.received = 0  # of them, those that got something of which only the neighbour can have written the bytes
        self.requests = 0
        self.token_seconds = 0.0  # in which engines compute one; 0: nobody knows
        self.read_ahead = 0.0  # objects whose reading began when a request came, or was asked about again
        self._first_lease = self.rig.leases
        self.locating: list[Locating] = []
        self.vanished: dict[File, bytes] = {}  # from the shared medium
        self.contradicted = 0  # objects of this run of which two checksums differed

    @property
    def tiers(self) -> list[MemoryTier]:
        return self.rig.lower_tiers

    @property
    def jobs(self) -> list[tuple[MemoryTier, Job]]:
        return [(tier, job) for tier in self.tiers for job in tier.jobs]

    def _born(self, spec: NamespaceSpec) -> Depot:
        self.pids += 1
        return Depot(spec, self.pids)

    def owner(self, who: str) -> Owner:
        """Return the owner of an engine's processes."""
        tenant = self.engines[who].spec.tenant
        return Owner(1 + sorted(self.engines).index(who), tenant=tenant) if tenant else OWN

    # What engines do

    def attach(self, who: str) -> Client:
        engine = self.engines[who]
        if engine.client is None:
            engine.client = self.rig.attach(
                who, engine.pid, engine.spec, elements_of(engine.spec), owner=self.owner(who)
            )
            held = (*engine.writes, *engine.reads, *engine.waiting)
            lost = self.rig.depot.declare(DeclareCall(engine.client.session, held)).lost
            assert engine.waiting.keys() >= set(lost), "a lease that ranks still hold was freed"
            self.give_up(who)  # the calls failed with the connection
            for lease, indices in list(engine.outdated.items()):
                engine.client.commit(lease, *sorted(indices))
                del engine.outdated[lease]
        return engine.client

    def reserve(self, who: str, path: int, first: int, depth: int, kinds: tuple[Kind, ...]) -> None:
        engine, client = self.engines[who], self.attach(who)
        kinds = tuple(kind for kind in kinds if kind in engine.spec.object_bytes) or (Kind.ATTENTION,)
        keys = keys_of(path, depth)[first:]
        if not keys:
            return
        parent = keys_of(path, depth)[first - 1] if first else bytes(16)
        lease, reply = client.reserve(keys, kinds, start=first, parent=parent, request=f"r{path}")
        names = [(client.namespace, key, int(kind)) for key in keys for kind in kinds]
        held = held_by(names, reply.extents, self.rig.part_of(engine.spec))
        if self.rig.depot.switches.refusal(Switch.STORES, client.namespace):
            assert set(reply.outcomes) == {ReserveOutcome.REFUSED}, "reserved while stores are off"
        granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
        assert sorted(held) == granted
        for one in held.values():
            one.scratch = self.rig.depot._audits.writing(one.fragments[0][0])
        if held:
            engine.writes[lease] = held
            self.split_objects += sum(len(one.fragments) > 1 for one in held.values())
            self.scribble(who, lease)

    def scribble(self, who: str, lease: int) -> None:
        """Its ranks write, whatever the daemon thinks of the lease."""
        for held in self.engines[who].writes[lease].values():
            for part, (_, offset, length, _) in zip(parts_of(held, lease), held.fragments, strict=True):
                self.rig.buffer[offset : offset + length] = part

    def commit(self, who: str, lease: int, indices: list[int]) -> None:
        engine, client = self.engines[who], self.attach(who)
        held = engine.writes[lease]
        indices = [index for index in indices if index in held]
        self.scribble(who, lease)
        for index in indices:
            written = held.pop(index)
            if not written.scratch:
                self.writers.setdefault(written.name, set()).add(lease)
        if not held:
            del engine.writes[lease]
        engine.outdated.setdefault(lease, set()).update(indices)
        outcomes = client.commit(lease, *indices)
        del engine.outdated[lease]
        if self.rig.depot.switches.off(Switch.STORES, client.namespace):
            assert CommitOutcome.COMMITTED not in outcomes, "committed while stores are off"
        assert CommitOutcome.LOST not in outcomes, "a lease in good order was lost"
        assert client.commit(lease, *indices) == outcomes

    def abandon(self, who: str, lease: int, indices: list[int]) -> None:
        engine, client = self.engines[who], self.attach(who)
        held = engine.writes[lease]
        for index in indices or list(held):
            held.pop(index, None)
        if not held:
            del engine.writes[lease]
        client.abandon(lease, *indices)

    def switch(self, switch: Switch, who: str, *, on: bool) -> None:
        """The operator does, for an engine's namespace, or for all (an empty name)."""
        namespace_id = self.attach(who).namespace if who else b""
        self.rig.depot.switch(switch, namespace_id, on=on)
        self.hear()
        if switch is Switch.LOADS and not on:
            off = [one.spec for one in self.engines.values() if not who or one.spec == self.engines[who].spec]
            assert not any(one.waiting for one in self.engines.values() if one.spec in off), "waits yet"
            assert not any(wish.namespace.spec in off for wish in self.rig.depot._prefetch._requests.values())

    def evict(self, who: str, path: int, depth: int) -> None:
        """The operator drops a chunk with all below it, or all of an engine's namespace (no depth)."""
        namespace_id, keys = self.attach(who).namespace, keys_of(path, depth)
        try:
            removal = self.rig.depot.deletion(namespace_id, keys[-1] if keys else b"")
        except NotFound:
            return
        for _ in iter(removal.run_once, False):
            audit(self.rig.depot, self.reloads.prefetch_bytes)
        self.hear()
        slot = self.rig.depot._tree.namespaces.by_id[namespace_id].slot
        for key_ in keys[-1:] or (keys_of(at, 1)[0] for at in range(3)):
            assert self.rig.depot._tree.index.find(slot, key_) == NONE, "evicted, and found"

    def drain(self, *, draining: bool) -> None:
        self.rig.depot.drain(draining=draining)
        self.hear()
        # Who has not come back since the daemon's end waits for an answer that ended with it.
        assert not draining or not any(engine.waiting for engine in self.engines.values() if engine.client is not None)

    def queue(self, who: str, path: int, depth: int, budget_seconds: float) -> None:
        """A request comes, or is asked about again: what it needs is read ahead, or later where it declines that."""
        engine, client = self.engines[who], self.attach(who)
        if path not in engine.queued:
            self.requests += 1
            engine.queued[path] = f"q{self.requests}"
        keys = keys_of(path, depth)
        before = self.rig.counter("prefetched_objects")
        answers = client.locate_later(
            keys, request=engine.queued[path], budget_seconds=budget_seconds, token_seconds=self.token_seconds
        )
        self.read_ahead += self.rig.counter("prefetched_objects") - before
        for reply in answers:  # none yet where a shared tier is asked
            assert reply.boundary_tokens <= depth * CHUNK
            assert reply.estimate_seconds <= (budget_seconds or reply.estimate_seconds)

    def leave_queue(self, who: str, path: int) -> None:
        """It is aborted."""
        client, request = self.attach(who), self.engines[who].queued.pop(path, None)
        if request is not None:
            client.end_request(request)
            waiting = {name for _, name in self.rig.depot._prefetch._requests}
            assert request not in waiting, "read for nobody"

    def acquire(self, who: str, path: int, depth: int) -> None:
        client, keys = self.attach(who), keys_of(path, depth)
        request = self.engines[who].queued.pop(path, "")
        locating = Locating(who, client, keys, client.locate_later(keys), request)
        if locating.answers:
            self._load(locating, at_once=True)
        else:
            assert self.rig.shared_config is not None, "there is nobody to ask"
            self.locating.append(locating)
        self.hear()

    def _load(self, located: Locating, *, at_once: bool) -> None:
        engine, client = self.engines[located.who], located.client
        boundary = located.answers[0].boundary_tokens
        assert boundary <= len(located.keys) * CHUNK
        needed = engine.spec.planner().objects(boundary)
        if engine.client is not client or not needed:
            return
        keys, kinds = [located.keys[chunk] for chunk, _ in needed], bytes(kind for _, kind in needed)
        names = [(client.namespace, k, kind) for k, kind in zip(keys, kinds, strict=True)]
        lease = client.lease()
        raised = self.rig.counter("internal_errors.tier")
        answers = client.acquire_later(keys, kinds, lease, located.request)
        if self.rig.depot.switches.refusal(Switch.LOADS, client.namespace):
            assert answers and answers[0].outcome is AcquireOutcome.REFUSED, "acquired while loads are off"
        elif answers and answers[0].outcome is AcquireOutcome.REFUSED:
            assert answers[0].reason.startswith("quota")
        elif at_once:
            missing = bool(answers) and answers[0].outcome is AcquireOutcome.MISSING
            assert not missing or self.rig.counter("internal_errors.tier") > raised, "located, and gone"
        engine.waiting[lease] = Waiting(names, answers, late=not answers)

    def hear(self) -> None:
        """Take what was answered."""
        for located in [one for one in self.locating if one.answers]:
            self.locating.remove(located)
            self._load(located, at_once=False)
        for engine in self.engines.values():
            for lease, waiting in list(engine.waiting.items()):
                if not waiting.answers:
                    continue
                (reply,) = waiting.answers
                del engine.waiting[lease]
                if reply.outcome is AcquireOutcome.GRANTED:
                    self.promoted += waiting.late
                    self.received += any(not self._is_ours(name) for name in waiting.names)
                    engine.reads[lease] = held_by(waiting.names, reply.extents, self.rig.part_of(engine.spec))
                    assert self.check_bytes(engine.reads[lease]) == len(set(waiting.names))

    def _is_ours(self, name: Name) -> bool:
        return any(self._first_lease < lease < self._first_lease << 1 for lease in self.writers[name])

    def give_up(self, who: str) -> None:
        """Its calls' deadlines have passed: release what may have been granted."""
        engine = self.engines[who]
        assert engine.client is not None
        for lease in list(engine.waiting):
            del engine.waiting[lease]
            engine.client.release(lease)

    def release(self, who: str, lease: int) -> None:
        client = self.attach(who)
        self.check_bytes(self.engines[who].reads.pop(lease))
        client.release(lease)

    def check_bytes(self, lease: dict[int, Held]) -> int:
        """I1: wherever the generations still hold, the bytes are a writer's of exactly this object."""
        checked = 0
        generation = self.rig.depot._ram.rows.generation
        for held in lease.values():
            if all(generation[row] == granted for row, _, _, granted in held.fragments):
                seen = [bytes(self.rig.buffer[o : o + n]) for _, o, n, _ in held.fragments]
                assert any(parts_of(held, writer) == seen for writer in self.writers.get(held.name, ())), "wrong bytes"
                checked += 1
        return checked

    def end_request(self, who: str, path: int) -> None:
        self.rig.depot.end_request(EndRequestCall(self.attach(who).session, f"r{path}"))

    def die(self, who: str) -> None:
        engine = self.engines[who]
        self.rig.dead.add(engine.pid)
        if engine.client is not None:
            self.rig.depot.process_dead(engine.client.attachment)
        else:
            for info in self.rig.depot.attachments():
                if info.process.pid == engine.pid:
                    self.rig.depot.process_dead(info.attachment)
        self.engines[who] = self._born(engine.spec)

    def disconnect(self, who: str) -> None:
        engine = self.engines[who]
        if engine.client is not None:
            self.rig.depot.disconnected(engine.client.attachment)
            engine.client = None

    # What the lower tier does

    def tier_step(self, pick: int, outcome: IoOutcome | None, *, begin_only: bool = False) -> None:
        """One of its jobs is begun, or ends."""
        jobs = self.jobs
        if jobs:
            tier, job = jobs[pick % len(jobs)]
            if outcome is IoOutcome.CORRUPT and not job.reads:
                outcome = IoOutcome.IO_ERROR  # a write's would say that RAM is bad
            if begin_only:
                tier.begin(job)
            else:
                tier.finish(job, outcome)
        self.hear()

    def raise_next(self, pick: int) -> None:
        """The next such call of one of them raises: a defect of it."""
        tier = self.tiers[pick % len(self.tiers)]
        calls = ("write", "read", "look_up", "used", "tick")
        tier.raise_next(calls[pick // 8 % len(calls)], after=bool(pick & 4))

    def run(self) -> None:
        """Everything that lower tiers have to do is done."""
        while self.rig.depot.place_some():
            pass
        for tier in self.tiers:
            tier.run()
        self.hear()

    def place(self) -> None:
        """A slice of the room that acquires wait for."""
        self.rig.depot.place_some()
        self.hear()

    def search_step(self, pick: int, *, answered: bool) -> None:
        """A look-up ends: the medium is asked now, or does not answer."""
        searches = self.rig.shared.searches
        if searches:
            self.rig.shared.search(searches[pick % len(searches)], answered=answered)
        self.hear()

    def vanish(self, pick: int) -> None:
        """Somebody takes a file away from the shared medium."""
        files = self.rig.shared_medium.files
        if files:
            file = sorted(files)[pick % len(files)]
            self.vanished[file] = files.pop(file)

    def appear(self, pick: int) -> None:
        """Somebody puts it there again."""
        if self.vanished:
            file = sorted(self.vanished)[pick % len(self.vanished)]
            self.rig.shared_medium.files.setdefault(file, self.vanished.pop(file))

    def damage(self, pick: int) -> None:
        """A bit of an object flips on a medium; header or payload."""
        before = dict(self.rig.medium.stored)
        flip(self.rig.medium.stored, pick)
        for _, job in self.jobs:
            if job.snapshot and job.snapshot is before.get(job.handle):
                job.snapshot = self.rig.medium.stored[job.handle]  # the object is the same yet
        flip(self.rig.shared_medium.files, pick)

    def lose(self, pick: int) -> None:
        stored = self.rig.medium.stored
        if stored and self.rig.tier_config and self.rig.tier.readable:
            self.rig.tier.lose(sorted(stored)[pick % len(stored)])

    def scribble_late(self) -> None:
        """Workers that hang, of this run and of earlier ones, write garbage to whatever they were told to fill."""
        late = [extent for tier in self.tiers for job in tier.late if job.reads for extent in job.extents]
        for offset, length in late + [extent for ghost in self.ghosts for extent in ghost.extents]:
            self.rig.buffer[offset : offset + length] = b"\xee" * length

    def late_end(self) -> None:
        """They die."""
        for tier in self.tiers:
            tier.worker_dies()
        ghosts, self.ghosts = self.ghosts, []
        for ghost in ghosts:
            self.rig.dead.add(ghost.pid)
            for info in self.rig.depot.attachments():
                if info.process.pid == ghost.pid:
                    self.rig.depot.process_dead(info.attachment)

    def leave_ghost(self, *, alive: bool) -> None:
        """The daemon is about to go; its worker process with it, or not."""
        for tier in self.tiers:
            if not alive:
                self.rig.dead.add(tier.pid)
                continue
            held = [job for job in tier.jobs if job.begun] + tier.late
            extents = [extent for job in held if job.reads for extent in job.extents]
            self.ghosts.append(Ghost(tier.pid, extents))

    # What the daemon does

    def sum(self, count: int) -> None:
        for _ in range(count):
            compare(self.rig)
            job = self.rig.depot.next_to_sum()
            if job is None:
                return
            payload = b"".join(bytes(self.rig.buffer[o : o + n]) for o, n in job.extents)
            digest = xxhash.xxh3_128_intdigest(payload)
            self.rig.depot.summed(job.row, job.generation, digest & (1 << 64) - 1, digest >> 64)

    def tick(self, seconds: float) -> None:
        self.rig.now += seconds
        for who, engine in self.engines.items():
            if engine.client is not None and self.rig.depot._sessions.by_token.get(engine.client.session) is None:
                self.disconnect(who)
        self.rig.depot.tick()

    def open(self) -> None:
        """All tiers are of use, also those that had not opened or were disabled."""
        for tier in self.tiers:
            if not tier.opened:
                tier.open()
            tier.readable = tier.writable = True
        self.reloads.look()

    def crash(self, *, worker_lives: bool = True, opens: bool = True) -> None:
        """The next run begins. With `opens`, its disk opens at once; else `open` is still due."""
        self.leave_ghost(alive=worker_lives)
        for engine in self.engines.values():
            engine.client = None
        self.locating.clear()
        outlives = outliving(self.rig)
        self.rig.tier_opens_at_start = opens
        self.rig.crash()
        self.contradicted = 0
        self.rig.tier_opens_at_start = True
        check_restart(self.rig, outlives if opens else set())
        self.come_back()
        self.reloads.look()
        assert self.rig.counter("corrupt_objects") == 0

    def reboot(self) -> None:
        """The host starts anew: engines, workers and the arena are gone, the medium is not."""
        self.ghosts.clear()
        self.locating.clear()
        for who in list(self.engines):
            self.rig.dead.add(self.engines[who].pid)
            self.engines[who] = self._born(self.engines[who].spec)
        self.rig.wipe()
        self.rig.run = 0
        self.rig.crash()
        self.contradicted = 0
        audit(self.rig.depot)
        self.come_back()
        self.reloads.look()

    def come_back(self) -> None:
        """Where a tenant has a quota, the daemon has to learn whose the namespaces are before more is stored."""
        for who in self.engines if self.rig.config.quotas else ():
            self.attach(who)

    def killed(self, lines: int, action: Callable[[], None]) -> bool:
        """Run `action` until so many lines of WRITERS have run; whether the daemon was killed then."""
        try:
            with killed_after(lines):
                action()
        except Killed:
            self.crash()
            return True
        return False

    # What must hold at any time

    def check(self) -> None:
        self.hear()
        audit(self.rig.depot, self.reloads.prefetch_bytes)
        self.reloads.check()
        assert self.rig.counter("corrupt_objects") == self.contradicted
        for engine in self.engines.values():
            for lease, objects in engine.writes.items():
                for held in objects.values():
                    seen = [bytes(self.rig.buffer[o : o + n]) for _, o, n, _ in held.fragments]
                    assert parts_of(held, lease) == seen, "a writer's extents were given to somebody else"

    def finish(self) -> None:
        """When every engine has died nothing is lent, reserved or owed."""
        if self.tiers:
            self.late_end()
            self.run()
            assert not self.locating and not len(self.rig.depot._locates._look_ups)
        for who in list(self.engines):
            self.die(who)
        self.rig.depot.sum_worker_died()
        status = self.rig.depot.status()
        assert (status.tier.lent_bytes, status.sessions, len(self.rig.depot._requests)) == (0, (), 0)
        self.run()  # the death of one may have begun a read for another, which died before it was answered
        status = self.rig.depot.status()
        assert (status.tier.prefetched_bytes, status.tier.prefetching_requests) == (0, 0)
        self.rig.depot.tick()
        pins = self.rig.depot._ram.pins
        assert not any(pins.prefetch.pinned) and not any(pins.user.pinned), "kept for nobody"
        assert not any(room.attention_bytes for room in self.rig.depot._ram.rooms)
        audit(self.rig.depot)
        self._make_room()

    def _make_room(self) -> None:
        """Nobody needs anything any more: every tier comes below its limits in bounded time."""
        self.open()
        for ticks in (ROOM_TICKS, 5):
            evicted = self.reloads.evicted_of_disks
            for _ in range(ticks):
                self.tick(1.0)
                self.run()
        self.reloads.check_reached(evicted)
        audit(self.rig.depot)
