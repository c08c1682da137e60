"""Peers that lease what engines have stored, and bumps of the epoch, in the engines' world.

A peer's lease holds whatever happens: its bytes are the object's until the process that sends has said so, or is dead,
also beyond the end of the daemon. Of a namespace that a bump has invalidated nobody gets anything any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import xxhash
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.depot.loads.peer_leases import PeerLease
from kvdepot.server.io.jobs import ABSENT
from kvdepot.server.io.peer_wire import Refusal
from kvdepot.server.storage.base import ObjectName

from tests.rigs.engine_rig import CHUNK, Client
from tests.stateful.engine_world import DEPTH, SPECS, World, keys_of
from tests.stateful.held_extents import Held, parts_of


@dataclass
class Sending:
    """What a process that sends may read: the extents, and the bytes that were there when they were lent."""

    pid: int
    extents: tuple[tuple[int, int], ...]
    data: bytes


class PeerWorld(World):
    """The process that sends is a worker of the daemon's. It may outlive the daemon."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: dict[int, Sending] = {}  # by lease, of this run
        self.left: list[Sending] = []  # of processes of earlier runs
        self.asked = 0  # of peers, reads that are not answered
        self.leased = 0  # over all runs
        self.read = 0  # of them, those for which a disk was read
        self.bumps = 0  # that have invalidated something
        self.ended_ids: set[bytes] = set()
        self._start_sender()

    def _start_sender(self) -> None:
        self.asked = 0
        self.pids += 1
        self.sender = self.pids + 90_000
        self.worker = self.rig.depot.peer_leases.workers.started(self.sender)

    # Peers

    def name(self, who: str, path: int, at: int, kind: Kind) -> ObjectName:
        engine, keys = self.engines[who], keys_of(path, at + 1)
        parent = keys[at - 1] if at else ROOT_KEY
        spec = engine.spec
        return ObjectName(spec.namespace_id(), keys[at], parent, kind, (at + 1) * CHUNK, spec.object_bytes[kind])

    def pull(self, who: str, path: int, at: int, pick: int) -> None:
        """A peer asks for an object. If it has to be read first, it is leased once it is there."""
        kinds = sorted(self.engines[who].spec.object_bytes)
        name = self.name(who, path, at, kinds[pick % len(kinds)])
        leases, sender = self.rig.depot.peer_leases, self.sender
        leases.locate(None, [(name.namespace, name.key, name.kind)])

        def done(why_not: Refusal | None) -> None:
            if sender == self.sender:  # else the process that asked has ended
                self.asked -= 1
                if why_not is None:
                    self._lease(name, read=True)

        self.asked += 1
        if not leases.read(None, name, done):
            self.asked -= 1
            self._lease(name, read=False)

    def _lease(self, name: ObjectName, *, read: bool) -> None:
        lease = self.rig.depot.peer_leases.lease(None, name, self.worker)
        if not isinstance(lease, PeerLease):
            return
        assert name.namespace not in self.ended_ids, "leased, although a bump has invalidated it"
        data = self._bytes_at(lease.extents)
        assert xxhash.xxh3_128_intdigest(data) == lease.raw_sum, "lent with another checksum"
        held = Held((name.namespace, name.key, int(name.kind)), [(0, *extent, 0) for extent in lease.extents])
        writers = self.writers.get(held.name, ())
        assert any(b"".join(parts_of(held, writer)) == data for writer in writers), "wrong bytes for a peer"
        self.sent[lease.number] = Sending(self.sender, lease.extents, data)
        self.leased += 1
        self.read += read

    def _bytes_at(self, extents: tuple[tuple[int, int], ...]) -> bytes:
        return b"".join(bytes(self.rig.buffer[offset : offset + length]) for offset, length in extents)

    def end_lease(self, pick: int) -> None:
        if self.sent:
            number = sorted(self.sent)[pick % len(self.sent)]
            del self.sent[number]
            assert self.rig.depot.peer_leases.end(number)

    def sender_dies(self) -> None:
        leases = self.rig.depot.peer_leases
        self.rig.dead.add(self.sender)
        self.sent.clear()
        leases.end_all()
        leases.workers.dead(self.worker)
        self._start_sender()

    def left_die(self) -> None:
        left, self.left = self.left, []
        for pid in {one.pid for one in left}:
            self.rig.dead.add(pid)
            for info in self.rig.depot.attachments():
                if info.process.pid == pid:
                    self.rig.depot.process_dead(info.attachment)

    def crash(self, **options: Any) -> None:
        self.left += self.sent.values()
        self.sent.clear()
        self.sender, former = 0, self.sender
        if not any(one.pid == former for one in self.left):
            self.rig.dead.add(former)
        super().crash(**options)
        self._start_sender()

    def reboot(self) -> None:
        self.rig.dead.add(self.sender)
        self.sent.clear()
        self.left.clear()
        self.sender = 0
        super().reboot()
        self._start_sender()

    # Bumps

    def bump(self, who: str) -> None:
        """The operator bumps the epoch of an engine's namespace, or of all (an empty name). Engines register again."""
        depot, specs = self.rig.depot, [engine.spec for engine in self.engines.values()]
        before = depot.invalidation.epochs
        after = before.with_invalidated(self.engines[who].spec.namespace_id()) if who else before.with_all_invalidated()
        self.rig.epochs = after
        done = depot.invalidation.begin(after)
        self.bumps += done.namespaces > 0
        self.ended_ids |= {spec.namespace_id() for spec in specs if after.counter(spec.base_id()) != spec.bumps}
        self._nothing_holds()
        for engine in self.engines.values():
            bumps = after.counter(engine.spec.base_id())
            if bumps != engine.spec.bumps:
                engine.spec = replace(engine.spec, bumps=bumps)
                engine.outdated.clear()
                if engine.client is not None:
                    self._register(engine.client, engine.spec)
        self.hear()

    def _register(self, client: Client, spec: NamespaceSpec) -> None:
        client.spec = spec
        client.namespace, _ = self.rig.depot.register_namespace(client.session, spec)

    def _nothing_holds(self) -> None:
        generation = self.rig.depot._ram.rows.generation
        for engine in self.engines.values():
            for lease in engine.reads.values():
                for held in lease.values():
                    if held.name[0] in self.ended_ids:
                        assert any(generation[row] != granted for row, _, _, granted in held.fragments), "a load holds"
        wanted = [(one, key, kind) for one in self.ended_ids for key in keys_of(0, 1) for kind in (1, 2, 3)]
        assert set(self.rig.depot.peer_leases.locate(None, wanted)) <= {ABSENT}

    # What must hold

    def check(self) -> None:
        super().check()
        for one in (*self.sent.values(), *self.left):
            assert self._bytes_at(one.extents) == one.data, "what is being sent was given to somebody else"
        assert self.asked >= 0

    def finish(self) -> None:
        self.left_die()
        self.run()
        for _ in range(3):
            self.tick(2.0)
        assert not self.asked, "a peer waits for ever"
        self.rig.depot.peer_leases.end_all()
        self.sent.clear()
        assert self.rig.depot.peer_leases.lent_bytes == 0
        reads = self.rig.depot.peer_leases.reads
        assert not reads._reading and not reads._waiting
        assert not any(tier.reads_for_peers for tier in self.rig.depot._tree.tiers)
        super().finish()


def act_of_peers(world: PeerWorld, random: Random) -> None:
    who, pick = random.choice(sorted(SPECS)), random.randrange(1 << 16)
    match random.randrange(24):
        case 0:
            world.sender_dies()
        case 1:
            world.left_die()
        case 2:
            world.rig.depot.peer_leases.reads.on = random.random() < 0.8
        case 3 if random.random() < 0.2:
            world.bump(random.choice(["", who, who, who]))
        case number if number < 10:
            world.end_lease(pick)
        case _:
            world.pull(who, random.randrange(3), random.randrange(DEPTH), pick)
