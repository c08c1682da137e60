"""Evict and drain, beside leases, promotions, writes and disks: never a wrong byte, nothing left behind."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.control import EvictReply
from kvdepot.core.errors import NotFound
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.operators import deletion

from tests.rigs.engine_rig import CHUNK, HYBRID, Rig, audit, path
from tests.rigs.tier_rig import BOTH, COMMIT, in_ram, in_tier, on_tier_only, read, reboot, settle, store

KEYS = path("p", 4)


def evict(rig: Rig, namespace: bytes, key: bytes = b"") -> EvictReply:
    found = rig.depot.deletion(namespace, key)
    while found.run_once():
        audit(rig.depot)
    audit(rig.depot)
    return found.reply()


def test_a_chunk_goes_with_what_follows_it_and_nothing_else() -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    client.store(KEYS)
    other.store(KEYS, BOTH)
    assert evict(rig, client.namespace, KEYS[2]) == EvictReply(2)
    located = client.locate(KEYS)
    assert (located.boundary_tokens, located.miss) == (2 * CHUNK, MissReason.DELETED)
    assert other.locate(KEYS).boundary_tokens == 4 * CHUNK
    client.store(KEYS)
    assert client.locate(KEYS).boundary_tokens == 4 * CHUNK


def test_all_of_a_namespace_goes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "_NODES_MAX", 1)
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    for name in range(6):
        client.store(path(name, 3))
    other.store(KEYS, BOTH)
    assert evict(rig, client.namespace).chunks == 18
    assert rig.depot.status().tier.objects == 8
    located = client.locate(path(0, 3))
    assert (located.boundary_tokens, located.miss) == (0, MissReason.DELETED)
    client.store(KEYS)


def test_it_leaves_disks_too_and_does_not_come_back_with_them() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    store(client, path("q", 2))
    rig.tier.run()
    assert in_tier(rig) == 6
    assert evict(rig, client.namespace).unchanged_tiers == ()
    settle(rig)
    assert (in_ram(rig), in_tier(rig), rig.medium.stored) == (0, 0, {})
    reboot(rig)
    assert rig.attach().locate(KEYS).boundary_tokens == 0


@pytest.mark.requirement("I6")
def test_what_is_lent_stays_until_it_is_given_back() -> None:
    rig = Rig()
    client = rig.attach()
    store(client, KEYS, 5)
    lease, reply = client.acquire(KEYS)
    evict(rig, client.namespace)
    assert client.acquire(KEYS)[1].outcome is AcquireOutcome.MISSING
    for name in range(12):
        store(client, path(name, 3), 9)
    assert read(rig, reply) == {5}
    assert rig.depot.status().tier.lent_bytes == 4 * 8192
    client.release(lease)
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("I1")
def test_a_write_in_progress_finds_no_place_at_its_commit() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS[:1])
    lease, _ = client.reserve(KEYS)
    evict(rig, client.namespace, KEYS[0])
    assert set(client.commit(lease, 1, 2, 3)) == {CommitOutcome.NO_PARENT}
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("I1")
def test_a_load_that_waits_for_a_disk_misses() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    answers = client.acquire_later(KEYS, bytes([Kind.ATTENTION]) * 4, client.lease())
    evict(rig, client.namespace, KEYS[1])
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    settle(rig)
    assert (in_tier(rig), rig.depot.status().tier.lent_bytes) == (1, 0)


def test_a_large_subtree_is_out_of_reach_at_once() -> None:
    rig = Rig(drop_nodes_max=2)
    client = rig.attach()
    client.store(path("p", 20))
    assert evict(rig, client.namespace, path("p", 20)[0]).chunks == 20
    assert client.locate(path("p", 20)).boundary_tokens == 0
    for _ in range(20):
        rig.depot.tick()
    assert rig.depot.status().tier.used_bytes == 0


def test_what_is_not_there_is_not_found() -> None:
    rig = Rig()
    client = rig.attach()
    with pytest.raises(NotFound, match="no chunk"):
        rig.depot.deletion(client.namespace, KEYS[0])
    with pytest.raises(NotFound, match="no namespace"):
        rig.depot.deletion(bytes(16), b"")


def test_a_disk_that_cannot_be_written_is_named_because_a_restart_brings_its_objects_back() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    rig.tier.writable = False
    assert evict(rig, client.namespace).unchanged_tiers == ("memory",)
    assert client.locate(KEYS).boundary_tokens == 0, "in this run nobody finds them"


def test_a_shared_tier_keeps_its_files_and_is_named() -> None:
    rig = Rig(shared=COMMIT)
    client = rig.attach()
    store(client, KEYS)
    rig.shared.run()
    files = dict(rig.shared_medium.files)
    assert len(files) == 4
    assert evict(rig, client.namespace).unchanged_tiers == ("nfs",)
    assert rig.shared_medium.files == files


def test_a_drained_daemon_grants_nothing_and_ends_what_it_granted() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    store(client, path("warm", 1), 3)
    loading, reply = client.acquire(path("warm", 1))
    writing, _ = client.reserve(path("new", 2))
    waiting = client.acquire_later(KEYS, bytes([Kind.ATTENTION]) * 4, client.lease())
    assert rig.depot.drain(draining=True) == 2
    assert [(one.outcome, one.reason) for one in waiting] == [
        (AcquireOutcome.REFUSED, "the operator drains the daemon")
    ]
    located = client.locate(KEYS)
    assert (located.boundary_tokens, located.miss) == (0, MissReason.DRAINING)
    assert client.acquire(path("warm", 1))[1].outcome is AcquireOutcome.REFUSED
    assert set(client.reserve(path("more", 2))[1].outcomes) == {ReserveOutcome.REFUSED}
    assert set(client.commit(writing, 0, 1)) == {CommitOutcome.COMMITTED}
    assert read(rig, reply) == {3}
    client.release(loading)
    rig.tier.run()
    assert (rig.depot.status().sessions[0].leases, rig.depot.status().tier.lent_bytes) == (0, 0)
    assert (rig.counter("misses.draining"), rig.counter("refused_stores.draining")) == (1, 2)
    assert rig.counter("refused_loads.draining") == 2
    assert rig.depot.drain(draining=False) == 0
    assert client.locate(path("more", 2)).miss == MissReason.STORES_OFF
    assert client.locate(KEYS).boundary_tokens == 4 * CHUNK
    audit(rig.depot)
