"""Reads for peers of what only a disk has: few, bounded, given up soon, and leased from RAM like all else (ADR 95)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome, Kind
from kvdepot.core.control import Switch
from kvdepot.core.errors import StaleEpoch
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.depot.loads.peer_leases import LEASES_MAX, PeerLease, PeerLeases
from kvdepot.server.depot.loads.peer_reads import READS_MAX, SECONDS, WAITING_MAX
from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.jobs import ABSENT, UNKNOWN
from kvdepot.server.io.peer_wire import Refusal
from kvdepot.server.storage.base import IoOutcome, ObjectName, Read

from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, audit, path
from tests.rigs.tier_rig import ATTENTION, COMMIT, in_ram, on_tier_only, reboot, rig_over, store, verify

OBJECT_BYTES = 8192
FILL = 7
SENDER = 7000
PENDING = object()


class Peer:
    """What a peer asks a daemon whose disk has all of these objects, and RAM none."""

    def __init__(self, chunks: int, pages: int = 256, **config: object) -> None:
        self.rig = rig = Rig(pages, tier=COMMIT, **config)  # type: ignore[arg-type]
        self.keys = path("p", chunks)
        self.client: Client = on_tier_only(rig, self.keys)
        self.leases: PeerLeases = rig.depot.peer_leases
        self.worker = self.leases.workers.started(SENDER)
        self.answers: list[object] = []

    def name(self, at: int) -> ObjectName:
        parent = self.keys[at - 1] if at else ROOT_KEY
        return ObjectName(self.client.namespace, self.keys[at], parent, Kind.ATTENTION, (at + 1) * CHUNK, OBJECT_BYTES)

    def located(self) -> list[int]:
        return list(self.leases.locate(None, ((self.client.namespace, one, Kind.ATTENTION) for one in self.keys)))

    def ask(self, at: int) -> int:
        """Ask for an object that has to be read. Return the number of the answer."""
        number = len(self.answers)
        self.answers.append(PENDING)

        def done(why_not: Refusal | None) -> None:
            assert self.answers[number] is PENDING, "it is answered once"
            self.answers[number] = why_not

        assert self.leases.read(None, self.name(at), done)
        return number

    def lease(self, at: int) -> PeerLease | Refusal:
        return self.leases.lease(None, self.name(at), self.worker)

    def waits(self, at: int) -> bool:
        return self.leases.read(None, self.name(at), lambda _: None)

    def counted(self, outcome: str) -> float:
        return self.rig.counter(f"peer_disk_reads.{outcome}")


@pytest.mark.requirement("T3")
def test_what_only_a_disk_has_is_offered_and_leased_once_it_was_read() -> None:
    peer = Peer(3)
    assert peer.located() == [OBJECT_BYTES] * 3
    assert peer.lease(1) is Refusal.BUSY, "it has to be read first"
    peer.ask(1)
    assert peer.answers == [PENDING] and len(peer.rig.tier.jobs) == 1
    assert peer.located() == [OBJECT_BYTES] * 3, "others can wait for it, too"
    peer.rig.tier.run()
    assert peer.answers == [None] and in_ram(peer.rig) == 1
    lease = peer.lease(1)
    assert isinstance(lease, PeerLease)
    data = b"".join(bytes(peer.rig.buffer[offset : offset + length]) for offset, length in lease.extents)
    assert data == bytes([FILL]) * OBJECT_BYTES and lease.raw_sum == payload_sum([memoryview(data)])
    assert not peer.waits(1), "RAM has it"
    assert peer.counted("read") == 1
    audit(peer.rig.depot)


def test_nothing_is_read_for_what_is_in_ram_or_nowhere() -> None:
    peer = Peer(1)
    peer.keys.append(path("q", 1)[0])
    assert peer.located() == [OBJECT_BYTES, ABSENT]
    assert not peer.waits(1)
    peer.ask(0)
    peer.rig.tier.run()
    assert not peer.waits(0) and not peer.rig.tier.jobs


def test_few_are_read_at_once_and_the_others_in_their_turn() -> None:
    peer = Peer(READS_MAX + 3)
    for at in range(READS_MAX + 3):
        peer.ask(at)
    assert len(peer.rig.tier.jobs) == READS_MAX
    peer.rig.tier.finish(peer.rig.tier.jobs[0])
    assert len(peer.rig.tier.jobs) == READS_MAX and peer.answers.count(None) == 1
    peer.rig.tier.run()
    assert peer.answers == [None] * (READS_MAX + 3)
    audit(peer.rig.depot)


def test_together_they_take_a_part_of_ram() -> None:
    peer = Peer(4, pages=48)  # an eighth of it is three objects
    for at in range(4):
        peer.ask(at)
    assert len(peer.rig.tier.jobs) == 3
    peer.rig.tier.finish(peer.rig.tier.jobs[0])
    assert len(peer.rig.tier.jobs) == 3
    peer.rig.tier.run()
    assert peer.answers == [None] * 4


def test_more_than_may_wait_are_refused_and_not_offered() -> None:
    peer = Peer(2)
    for _ in range(READS_MAX + WAITING_MAX):
        peer.ask(0)
    assert peer.located() == [UNKNOWN, UNKNOWN]
    assert peer.answers[peer.ask(1)] is Refusal.BUSY
    assert len(peer.rig.tier.jobs) == 1, "they share one read"
    peer.rig.tier.run()
    assert peer.answers == [None] * (READS_MAX + WAITING_MAX) + [Refusal.BUSY]
    assert peer.located() == [OBJECT_BYTES, OBJECT_BYTES]


@pytest.mark.requirement("N3")
def test_what_is_late_is_refused_in_time_and_answered_once() -> None:
    peer = Peer(READS_MAX + 1)
    for at in range(READS_MAX + 1):
        peer.ask(at)
    peer.rig.now += SECONDS
    peer.rig.depot.tick()
    assert peer.answers == [Refusal.BUSY] * (READS_MAX + 1)
    assert peer.counted("busy") == READS_MAX + 1
    peer.rig.tier.run()
    assert in_ram(peer.rig) == READS_MAX, "what was begun is content of RAM"
    assert peer.located() == [OBJECT_BYTES] * (READS_MAX + 1)
    peer.ask(READS_MAX)
    peer.rig.tier.run()
    assert peer.answers[-1] is None and peer.counted("read") == 1
    audit(peer.rig.depot)


@pytest.mark.requirement("N1", "N3")
def test_a_disk_that_hangs_has_few_jobs_for_peers_and_is_soon_silent() -> None:
    peer = Peer(40)
    peer.rig.depot._tree.disks[0].reads._bytes *= OBJECT_BYTES / (32 << 20)  # as slow as with large objects
    began, offered = peer.rig.now, 0.0
    while peer.rig.now < began + 30:
        for at in range(12):
            peer.ask(at)
        if OBJECT_BYTES in peer.located():
            offered = peer.rig.now - began
        peer.rig.now += 0.5
        peer.rig.depot.tick()
    assert len(peer.rig.tier.jobs) == READS_MAX
    assert offered < 15, "engines here are told in time, too"
    peer.rig.now += SECONDS
    peer.rig.depot.tick()
    assert set(peer.answers) == {Refusal.BUSY}
    assert peer.located() == [UNKNOWN] * 40, "it is there, and nobody can have it now"
    peer.rig.tier.run()
    assert peer.located() == [OBJECT_BYTES] * 40


@pytest.mark.requirement("N2")
@pytest.mark.parametrize(
    ("outcome", "why", "offered"),
    [(IoOutcome.IO_ERROR, Refusal.BUSY, OBJECT_BYTES), (IoOutcome.CORRUPT, Refusal.GONE, ABSENT)],
)
def test_a_read_that_fails_is_refused_and_gone_only_if_the_object_is(
    outcome: IoOutcome, why: Refusal, offered: int
) -> None:
    peer = Peer(1)
    peer.ask(0)
    peer.rig.tier.fail_next(outcome)
    peer.rig.tier.run()
    assert peer.answers == [why] and peer.located() == [offered]
    assert peer.lease(0) is why and in_ram(peer.rig) == 0
    audit(peer.rig.depot)


def test_without_room_in_ram_it_is_refused() -> None:
    peer = Peer(2, pages=4)  # two objects
    peer.client.reserve(path("q", 1))
    peer.ask(0)
    peer.rig.tier.run()
    lease = peer.lease(0)
    assert isinstance(lease, PeerLease)
    assert peer.answers[peer.ask(1)] is Refusal.BUSY, "what is lent is not evicted"
    peer.leases.end(lease.number)
    peer.ask(1)
    peer.rig.tier.run()
    assert peer.answers[-1] is None
    audit(peer.rig.depot)


def test_a_peer_waits_for_what_an_engine_here_has_read() -> None:
    peer = Peer(1)
    granted = peer.client.acquire_later(peer.keys, ATTENTION, 1)
    peer.ask(0)
    assert len(peer.rig.tier.jobs) == 1
    peer.rig.tier.run()
    assert peer.answers == [None] and [one.outcome for one in granted] == [AcquireOutcome.GRANTED]


def test_an_engine_waits_for_what_is_read_for_a_peer_that_is_late() -> None:
    peer = Peer(1)
    peer.ask(0)
    granted = peer.client.acquire_later(peer.keys, ATTENTION, 1)
    peer.rig.now += SECONDS
    peer.rig.depot.tick()
    assert peer.answers == [Refusal.BUSY] and not granted
    peer.rig.tier.run()
    assert [one.outcome for one in granted] == [AcquireOutcome.GRANTED]
    audit(peer.rig.depot)


@pytest.mark.parametrize("way", ["deleted", "loads_off", "tier_closed"])
def test_what_may_not_be_had_any_more_when_it_arrives_is_not_lent(way: str) -> None:
    peer = Peer(1)
    peer.ask(0)
    if way == "deleted":
        peer.rig.depot.deletion(peer.client.namespace, peer.keys[0]).run_once()
    elif way == "loads_off":
        peer.rig.depot.switch(Switch.LOADS, b"", on=False)
    else:
        peer.rig.tier.stop()
    peer.rig.tier.run()
    assert peer.answers != [PENDING]
    assert peer.lease(0) is Refusal.GONE and peer.located() == [ABSENT]
    assert peer.leases.lent_bytes == 0
    audit(peer.rig.depot)


def test_a_tier_that_has_fallen_silent_offers_nothing() -> None:
    peer = Peer(2)
    peer.ask(0)
    peer.rig.now += 60
    assert peer.located() == [UNKNOWN, UNKNOWN]
    assert peer.answers[peer.ask(1)] is Refusal.BUSY, "it is not gone"
    peer.rig.tier.run()
    assert peer.located() == [OBJECT_BYTES, OBJECT_BYTES]


def test_one_that_waits_is_busy_when_the_disk_falls_silent() -> None:
    peer = Peer(READS_MAX + 1)
    for at in range(READS_MAX + 1):
        peer.ask(at)
    peer.rig.tier.finish(peer.rig.tier.jobs[0], IoOutcome.TIMEOUT)
    assert peer.answers[READS_MAX] is Refusal.BUSY


def test_a_tier_that_raises_is_refused() -> None:
    peer = Peer(1)
    peer.rig.tier.raise_next("read", after=False)
    assert peer.answers[peer.ask(0)] is Refusal.BUSY
    audit(peer.rig.depot)


def test_only_disks_are_read_for_peers_and_no_tier_that_they_may_have_too() -> None:
    keys = path("p", 2)
    rig, client = rig_over(keys)
    client.locate_later(keys)
    rig.shared.run()
    leases = rig.depot.peer_leases
    assert list(leases.locate(None, ((client.namespace, one, Kind.ATTENTION) for one in keys))) == [ABSENT, ABSENT]


def test_what_is_switched_off_is_neither_offered_nor_in_a_summary() -> None:
    peer = Peer(3)
    words = words_of_names([(peer.client.namespace, key) for key in peer.keys]).tolist()

    def summarized() -> list[bool]:
        chunks = peer.leases.chunks(None)
        starts = range(0, chunks.places, 5)
        found = {word for start in starts for word in chunks.words(start, min(start + 5, chunks.places)).tolist()}
        return [word in found for word in words]

    assert summarized() == [True] * 3
    peer.ask(1)
    peer.rig.tier.run()
    peer.leases.reads.on = False
    assert peer.located() == [ABSENT, OBJECT_BYTES, ABSENT]
    assert not peer.waits(0)
    verify(peer.rig)
    assert summarized() == [False, True, False]
    assert Peer(1, lend_disks=False).located() == [ABSENT]


def test_nothing_is_read_for_which_there_would_be_no_lease() -> None:
    peer = Peer(3)
    peer.ask(0)
    peer.rig.tier.run()
    leases = [peer.lease(0) for _ in range(LEASES_MAX)]
    assert peer.answers[peer.ask(1)] is Refusal.BUSY and not peer.rig.tier.jobs
    assert isinstance(leases[0], PeerLease)
    peer.leases.end(leases[0].number)
    peer.ask(1)
    peer.rig.tier.run()
    assert peer.answers[-1] is None


def test_a_tier_that_answers_at_once_ends_all_that_wait() -> None:
    peer = Peer(READS_MAX + WAITING_MAX, pages=1024)
    for at in range(READS_MAX + WAITING_MAX):
        peer.ask(at)
    peer.rig.tier.read = lambda handle, name, extents, loan, done: done(Read(IoOutcome.CANCELLED))  # type: ignore[method-assign]
    for job in list(peer.rig.tier.jobs):
        peer.rig.tier.finish(job)
    assert peer.answers.count(Refusal.BUSY) == WAITING_MAX and peer.answers.count(None) == READS_MAX
    assert not [name for name in peer.rig.depot.counters.snapshot() if name.startswith("internal_errors")]
    audit(peer.rig.depot)


# Engines of this node


def _scanned(peer: Peer) -> None:
    """A peer reads all that the disk has, one after the other."""
    for at in range(len(peer.keys)):
        if peer.waits(at):
            peer.rig.tier.run()
            lease = peer.lease(at)
            assert isinstance(lease, PeerLease)
            peer.leases.end(lease.number)
    audit(peer.rig.depot)


@pytest.mark.requirement("N1")
def test_what_was_read_for_peers_makes_room_for_more_of_it_and_not_what_engines_use() -> None:
    """RAM has room for 80 objects, and an eighth of it is for peers."""
    peer = Peer(70, pages=160, rows=512, tier_handles=512, tier_bytes=4 << 20)
    hot = [path(("hot", number), 1) for number in range(60)]
    for keys in hot:
        store(peer.client, keys)
        peer.rig.tier.run()
    _scanned(peer)
    kept = [keys for keys in hot if peer.client.locate(keys).tier == "ram"]
    assert len(kept) == len(hot), "they lie on the disk, too"
    assert in_ram(peer.rig) <= len(hot) + 80 // 8
    assert peer.rig.counter("evicted_objects.room") >= 70 - 80 // 8


def test_prefetch_keeps_what_it_has_pinned() -> None:
    peer = Peer(4, pages=24, prefetch_share=1.0)  # RAM for 12 objects
    own = path("own", 12)
    for at in range(12):
        peer.client.store([own[at]], start=at, parent=own[at - 1] if at else ROOT_KEY)
        peer.rig.tier.run()
    reboot(peer.rig)
    client = peer.rig.attach()
    client.locate(own, request="r")
    peer.rig.tier.run()
    assert peer.rig.depot.status().tier.prefetched_objects == 12
    answers: list[object] = []
    assert peer.rig.depot.peer_leases.read(None, peer.name(0), answers.append)
    assert answers == [Refusal.BUSY]
    assert peer.rig.depot.status().tier.prefetched_objects == 12


def test_prefetch_does_not_wait_for_peers() -> None:
    peer = Peer(40)
    own = path("own", 2)
    store(peer.client, own)
    peer.rig.tier.run()
    reboot(peer.rig)
    client, leases = peer.rig.attach(), peer.rig.depot.peer_leases
    for at in range(4):
        assert leases.read(None, peer.name(at), lambda _: None)
    client.locate(own, request="r")
    assert {job.name.key for job in peer.rig.tier.jobs} & set(own)
    audit(peer.rig.depot)


# What a bump of the epoch has invalidated


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("same_run", [True, False])
def test_what_was_invalidated_while_a_disk_was_away_is_lent_to_nobody(everywhere: bool, same_run: bool) -> None:
    peer = Peer(2)
    rig, name, before = peer.rig, peer.name(0), peer.rig.depot.invalidation.epochs
    after = before.with_all_invalidated() if everywhere else before.with_invalidated(peer.client.namespace)
    rig.tier_opens_at_start = False
    reboot(rig)
    if same_run:
        rig.depot.invalidation.begin(after)
    else:
        rig.depot.invalidation.epochs = after  # as the state file has them
        rig.depot.invalidation.adopted()
    rig.tier.open()
    leases = rig.depot.peer_leases
    assert leases.locate(None, [(name.namespace, name.key, Kind.ATTENTION)]) == (ABSENT,)
    assert not leases.read(None, name, lambda _: None)
    chunks = leases.chunks(None)
    assert not len(chunks.words(0, chunks.places))
    with pytest.raises(StaleEpoch):
        rig.attach()


@pytest.mark.requirement("P2")
def test_adopted_ram_of_a_namespace_that_nobody_has_registered_is_not_lent_after_a_bump() -> None:
    peer = Peer(1)
    rig, name = peer.rig, peer.name(0)
    peer.ask(0)
    rig.tier.run()
    epochs = rig.depot.invalidation.epochs.with_all_invalidated()
    rig.crash()  # before anything was deleted
    rig.depot.invalidation.epochs = epochs
    rig.depot.invalidation.adopted()
    verify(rig)
    leases = rig.depot.peer_leases
    assert leases.locate(None, [(name.namespace, name.key, Kind.ATTENTION)]) == (ABSENT,)
    assert leases.lease(None, name, leases.workers.started(SENDER)) is Refusal.GONE


@pytest.mark.requirement("P2")
def test_a_namespace_that_engines_have_registered_after_a_bump_is_lent() -> None:
    peer = Peer(1)
    rig = peer.rig
    rig.depot.invalidation.begin(rig.depot.invalidation.epochs.with_all_invalidated())
    client = rig.attach("later", 11, replace(DENSE, bumps=1))
    keys = path("new", 1)
    store(client, keys)
    verify(rig)
    leases = rig.depot.peer_leases
    assert leases.locate(None, [(client.namespace, keys[0], Kind.ATTENTION)]) == (OBJECT_BYTES,)
