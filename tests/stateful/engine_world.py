"""Several engines' clients, real bytes in the arena, and a dict that knows what may be true.

Every writer fills its extents with bytes of its own for as long as it holds them, also
beyond deadlines and daemon crashes; every reader compares. `killed` aborts the daemon
at a line of its code: what it had stored in the tables by then is all that is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import FrameType
from typing import Any

import xxhash
from kvdepot.core.calls import (
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    DeclareCall,
    EndRequestCall,
    Kind,
    ReserveOutcome,
)
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.server.engine.types import TierConfig
from kvdepot.server.tiers.base import IoOutcome

from tests.fakes.engine_rig import CHUNK, DENSE, Client, Rig, audit, key, spec_of, unpack

WRITERS = tuple(
    f"/server/engine/{name}.py" for name in ("rows", "lent", "sessions", "namespaces", "adoption", "workers")
)
"""The modules that store into the tables: between two lines of any other nothing changes that outlives a kill."""
Name = tuple[bytes, bytes, int]
"""(namespace, key, kind) of an object."""
DEPTH = 4
ODD = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(6144,)),  # three pages, beside the two of DENSE: room gets cut up
    GroupSpec(Kind.STATE, 32, rank_block_bytes=(4000,)),
    name="odd",
)
SPECS = {"a": DENSE, "b": DENSE, "c": ODD}


class Killed(BaseException):
    """The daemon is gone."""


@dataclass
class Held:
    """What a rank may touch of one object: its fragments (row, offset, length, generation)."""

    name: Name
    fragments: list[tuple[int, int, int, int]]


@dataclass
class Waiting:
    """An acquire, the objects it names, and its answer once there is one."""

    names: list[Name]
    answers: list[AcquireReply]
    late: bool


@dataclass
class Ghost:
    """An I/O worker of an earlier run that lives on, and what it may still write to."""

    pid: int
    extents: list[tuple[int, int]]


@dataclass
class Engine:
    """One engine: its process, its client, and the leases whose extents its ranks may touch."""

    spec: NamespaceSpec
    pid: int
    client: Client | None = None
    writes: dict[int, dict[int, Held]] = field(default_factory=dict)
    reads: dict[int, dict[int, Held]] = field(default_factory=dict)
    unsettled: dict[int, set[int]] = field(default_factory=dict)  # commits asked whose answer got lost
    waiting: dict[int, Waiting] = field(default_factory=dict)  # acquires that are not answered yet


def keys_of(path: int, depth: int) -> list[bytes]:
    """Three paths, two of which share their first two chunks."""
    return [key("shared" if path < 2 and at < 2 else path, at) for at in range(depth)]


class World:
    """All that happens between engines and one daemon, and what must hold whatever happens."""

    def __init__(self, data_pages: int = 24, tier: TierConfig | None = None) -> None:
        self.rig = Rig(
            data_pages, 40, 48, tier=tier, tier_bytes=14 * 12288,
            credit_bytes=14 * 4096, lease_deadline_seconds=10.0, grace_seconds=30.0,
            provisional_seconds=20.0, high_watermark=0.9, low_watermark=0.7, loads_in_flight=3, evictions_per_tick=2,
        )  # fmt: skip
        self.writers: dict[Name, set[int]] = {}  # leases whose bytes an object may have
        self.pids = 10
        self.engines = {name: self._born(spec) for name, spec in SPECS.items()}
        self.split_objects = 0
        self.ghosts: list[Ghost] = []
        self.promoted = 0  # acquires that waited for the lower tier and were granted

    def _born(self, spec: NamespaceSpec) -> Engine:
        self.pids += 1
        return Engine(spec, self.pids)

    # What engines do

    def attach(self, who: str) -> Client:
        engine = self.engines[who]
        if engine.client is None:
            engine.client = self.rig.attach(who, engine.pid, engine.spec)
            held = (*engine.writes, *engine.reads, *engine.waiting)
            lost = self.rig.engine.declare(DeclareCall(engine.client.session, held)).lost
            assert engine.waiting.keys() >= set(lost), "a lease that ranks still hold was freed"
            self.give_up(who)  # the calls failed with the connection
            for lease, indices in list(engine.unsettled.items()):
                engine.client.commit(lease, *sorted(indices))
                del engine.unsettled[lease]
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
        held = _held(names, reply.extents)
        granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
        assert sorted(held) == granted
        if held:
            engine.writes[lease] = held
            self.split_objects += sum(len(one.fragments) > 1 for one in held.values())
            self.scribble(who, lease)

    def scribble(self, who: str, lease: int) -> None:
        """Its ranks write, whatever the daemon thinks of the lease."""
        for held in self.engines[who].writes[lease].values():
            for part, (_, offset, length, _) in zip(_parts(held, lease), held.fragments, strict=True):
                self.rig.buffer[offset : offset + length] = part

    def commit(self, who: str, lease: int, indices: list[int]) -> None:
        engine, client = self.engines[who], self.attach(who)
        held = engine.writes[lease]
        indices = [index for index in indices if index in held]
        self.scribble(who, lease)
        for index in indices:
            self.writers.setdefault(held.pop(index).name, set()).add(lease)
        if not held:
            del engine.writes[lease]
        engine.unsettled.setdefault(lease, set()).update(indices)
        outcomes = client.commit(lease, *indices)
        del engine.unsettled[lease]
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

    def acquire(self, who: str, path: int, depth: int) -> None:
        engine, client = self.engines[who], self.attach(who)
        keys = keys_of(path, depth)
        boundary = client.locate(keys).boundary_tokens
        assert boundary <= depth * CHUNK
        keys = keys[: boundary // CHUNK]
        if not keys:
            return
        kinds = [Kind.ATTENTION] * len(keys)
        if Kind.STATE in engine.spec.object_bytes:
            keys, kinds = [*keys, keys[-1]], [*kinds, Kind.STATE]
        names = [(client.namespace, k, int(kind)) for k, kind in zip(keys, kinds, strict=True)]
        lease = client.lease()
        answers = client.acquire_later(keys, bytes(kinds), lease)
        assert not answers or answers[0].outcome in (AcquireOutcome.GRANTED, AcquireOutcome.LATER), "located, and gone"
        engine.waiting[lease] = Waiting(names, answers, late=not answers)
        self.hear()

    def hear(self) -> None:
        """Take what was answered."""
        for engine in self.engines.values():
            for lease, waiting in list(engine.waiting.items()):
                if not waiting.answers:
                    continue
                (reply,) = waiting.answers
                del engine.waiting[lease]
                if reply.outcome is AcquireOutcome.GRANTED:
                    self.promoted += waiting.late
                    engine.reads[lease] = _held(waiting.names, reply.extents)
                    assert self.check_bytes(engine.reads[lease]) == len(set(waiting.names))

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
        generation = self.rig.engine._space.rows.generation
        for held in lease.values():
            if all(generation[row] == granted for row, _, _, granted in held.fragments):
                seen = [bytes(self.rig.buffer[o : o + n]) for _, o, n, _ in held.fragments]
                assert any(_parts(held, writer) == seen for writer in self.writers.get(held.name, ())), "wrong bytes"
                checked += 1
        return checked

    def end_request(self, who: str, path: int) -> None:
        self.rig.engine.end_request(EndRequestCall(self.attach(who).session, f"r{path}"))

    def die(self, who: str) -> None:
        engine = self.engines[who]
        self.rig.dead.add(engine.pid)
        if engine.client is not None:
            self.rig.engine.process_dead(engine.client.attachment)
        else:
            for info in self.rig.engine.attachments():
                if info.process.pid == engine.pid:
                    self.rig.engine.process_dead(info.attachment)
        self.engines[who] = self._born(engine.spec)

    def disconnect(self, who: str) -> None:
        engine = self.engines[who]
        if engine.client is not None:
            self.rig.engine.disconnected(engine.client.attachment)
            engine.client = None

    # What the lower tier does

    def tier_step(self, pick: int, outcome: IoOutcome | None, *, begin_only: bool = False) -> None:
        """One of its jobs is begun, or ends."""
        jobs = self.rig.tier.jobs
        if jobs:
            job = jobs[pick % len(jobs)]
            if outcome is IoOutcome.CORRUPT and not job.reads:
                outcome = IoOutcome.IO_ERROR  # a write's would say that RAM is bad
            if begin_only:
                self.rig.tier.begin(job)
            else:
                self.rig.tier.finish(job, outcome)
        self.hear()

    def damage(self, pick: int) -> None:
        """A bit of an object flips on the medium; header or payload."""
        stored = self.rig.medium.stored
        if stored:
            handle = sorted(stored)[pick % len(stored)]
            data = bytearray(stored[handle])
            data[pick % len(data)] ^= 1 << pick % 8
            stored[handle] = bytes(data)

    def lose(self, pick: int) -> None:
        stored = self.rig.medium.stored
        if stored and self.rig.tier.readable:
            self.rig.tier.lose(sorted(stored)[pick % len(stored)])

    def scribble_late(self) -> None:
        """Workers that hang, of this run and of earlier ones, write garbage to whatever they were told to fill."""
        late = [extent for job in self.rig.tier.late if job.reads for extent in job.extents]
        for offset, length in late + [extent for ghost in self.ghosts for extent in ghost.extents]:
            self.rig.buffer[offset : offset + length] = b"\xee" * length

    def late_end(self) -> None:
        """They die."""
        self.rig.tier.worker_dies()
        ghosts, self.ghosts = self.ghosts, []
        for ghost in ghosts:
            self.rig.dead.add(ghost.pid)
            for info in self.rig.engine.attachments():
                if info.process.pid == ghost.pid:
                    self.rig.engine.process_dead(info.attachment)

    def leave_ghost(self, *, alive: bool) -> None:
        """The daemon is about to go; its worker process with it, or not."""
        if self.rig.tier_config is None:
            return
        if not alive:
            self.rig.dead.add(self.rig.worker_pids)
            return
        held = [job for job in self.rig.tier.jobs if job.begun] + self.rig.tier.late
        extents = [extent for job in held if job.reads for extent in job.extents]
        self.ghosts.append(Ghost(self.rig.worker_pids, extents))

    # What the daemon does

    def sum(self, count: int) -> None:
        for _ in range(count):
            job = self.rig.engine.next_to_sum()
            if job is None:
                return
            payload = b"".join(bytes(self.rig.buffer[o : o + n]) for o, n in job.extents)
            digest = xxhash.xxh3_128_intdigest(payload)
            self.rig.engine.summed(job.row, job.generation, digest & (1 << 64) - 1, digest >> 64)

    def tick(self, seconds: float) -> None:
        self.rig.now += seconds
        for who, engine in self.engines.items():
            if engine.client is not None and self.rig.engine._sessions.by_token.get(engine.client.session) is None:
                self.disconnect(who)
        self.rig.engine.tick()

    def crash(self, *, worker_lives: bool = True) -> None:
        self.leave_ghost(alive=worker_lives)
        for engine in self.engines.values():
            engine.client = None
        self.rig.crash()
        audit(self.rig.engine)
        assert self.rig.counter("corrupt_objects") == 0
        assert not [reason for reason in self.rig.report.dropped if reason in NEVER], self.rig.report

    def reboot(self) -> None:
        """The host starts anew: engines, workers and the arena are gone, the medium is not."""
        self.ghosts.clear()
        for who in list(self.engines):
            self.rig.dead.add(self.engines[who].pid)
            self.engines[who] = self._born(self.engines[who].spec)
        self.rig.buffer[:] = bytes(len(self.rig.buffer))
        self.rig.run = 0
        self.rig.crash()
        audit(self.rig.engine)

    def killed(self, lines: int, action: Callable[[], None]) -> bool:
        """Run `action` until so many lines of WRITERS have run; whether the daemon was killed then."""
        try:
            with _killed_after(lines):
                action()
        except Killed:
            self.crash()
            return True
        return False

    # What must hold at any time

    def check(self) -> None:
        self.hear()
        audit(self.rig.engine)
        assert self.rig.counter("corrupt_objects") == 0
        for engine in self.engines.values():
            for lease, objects in engine.writes.items():
                for held in objects.values():
                    seen = [bytes(self.rig.buffer[o : o + n]) for _, o, n, _ in held.fragments]
                    assert _parts(held, lease) == seen, "a writer's extents were given to somebody else"

    def finish(self) -> None:
        """When every engine has died nothing is lent, reserved or owed."""
        if self.rig.tier_config is not None:
            self.late_end()
            self.rig.tier.run()
            self.hear()
        for who in list(self.engines):
            self.die(who)
        self.rig.engine.sum_worker_died()
        status = self.rig.engine.status()
        assert (status.tier.lent_bytes, status.sessions, len(self.rig.engine._requests)) == (0, (), 0)
        assert self.rig.engine._stores._attention_reserved_bytes == 0
        audit(self.rig.engine)


NEVER = ("overlap", "repeated", "unknown_namespace", "torn_fields", "torn_extent", "torn_links", "namespace_repeated")
"""No kill makes such rows: they would mean that the order of stores is wrong."""


def _held(names: list[Name], extents: bytes) -> dict[int, Held]:
    held: dict[int, Held] = {}
    for index, row, offset, length, generation in unpack(extents):
        held.setdefault(index, Held(names[index], [])).fragments.append((row, offset, length, generation))
    return held


def _parts(held: Held, lease: int) -> list[bytes]:
    """The writer's bytes, cut as the fragments are."""
    token = blake2b(repr((held.name, lease)).encode()).digest()
    total = sum(length for _, _, length, _ in held.fragments)
    payload = (token * (total // len(token) + 1))[:total]
    at, parts = 0, []
    for _, _, length, _ in held.fragments:
        parts.append(payload[at : at + length])
        at += length
    return parts


@contextmanager
def _killed_after(lines: int) -> Iterator[None]:
    left = lines

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(WRITERS):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
