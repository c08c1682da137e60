"""What RAM has below a path that only lower tiers have outlives the daemon (design.md#restart)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvdepot.core.arena import NO_ROW, RowState
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.depot.tree import attaching
from kvdepot.server.depot.tree.free_slots import free_slot
from kvdepot.server.depot.types import Quota, TierConfig

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path, unpack
from tests.rigs.tier_rig import (
    ATTENTION,
    BOTH,
    COMMIT,
    EVICT,
    SECOND_USE,
    boundary,
    in_ram,
    on_tier_only,
    read,
    reboot,
    rig_over,
    store,
    verify,
    write,
)

KEYS = path("p", 6)


def located(client: Client, keys: list[bytes] = KEYS) -> int:
    return client.locate(keys).boundary_tokens // CHUNK


def extended(policy: TierConfig = SECOND_USE, **options: object) -> Rig:
    """The disk alone has the first four chunks, as after a reboot, and RAM alone the two that follow."""
    rig = Rig(tier=policy, **options)  # type: ignore[arg-type]
    rig.depot.configure(rig.config, {"memory": COMMIT})
    client = on_tier_only(rig, KEYS[:4])
    lease, reply = client.reserve(KEYS)
    assert list(reply.outcomes) == [ReserveOutcome.PRESENT] * 4 + [ReserveOutcome.GRANTED] * 2
    write(rig, reply.extents, 9)
    assert client.commit(lease, 4, 5) == b"\x01\x01"
    verify(rig)
    assert in_ram(rig) == 2
    return rig


def restart(rig: Rig, *, opens: bool = True) -> Client:
    rig.tier_opens_at_start = opens
    rig.dead.add(rig.tier.pid)
    rig.crash()
    audit(rig.depot)
    return rig.attach()


def tick(rig: Rig, seconds: float = 0.1) -> None:
    rig.now += seconds
    rig.depot.tick()
    audit(rig.depot)


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("policy", [SECOND_USE, COMMIT, EVICT], ids=["second_use", "commit", "evict"])
def test_what_follows_a_path_on_disk_alone_outlives_the_daemon(policy: TierConfig) -> None:
    rig = extended(policy)
    client = restart(rig)
    assert (rig.report.detached, rig.report.kept, rig.report.dropped) == (2, 0, {})
    tick(rig)
    assert rig.counter("adopted_objects.adopted") == 2
    assert located(client) == 4, "not verified yet"
    assert client.acquire(KEYS[4:5])[1].outcome is AcquireOutcome.MISSING
    verify(rig)
    assert located(client) == 6
    _, reply = client.acquire(KEYS[4:])
    assert read(rig, reply) == {9}
    audit(rig.depot)


@pytest.mark.requirement("I8")
def test_what_follows_an_object_without_a_checksum_that_is_on_disk_outlives_the_daemon() -> None:
    rig = Rig(tier=COMMIT)
    on_tier_only(rig, KEYS[:1])
    rig.tier_opens_at_start = False
    rig.crash()
    store(rig.attach(), KEYS[:2], fill=9)  # before the disk has said that it has the first one
    first, second = rig.depot.next_to_sum(), rig.depot.next_to_sum()
    assert first is not None and second is not None
    raw_sum = payload_sum([rig.buffer[offset : offset + length] for offset, length in second.extents])
    rig.depot.summed(second.row, second.generation, raw_sum & (1 << 64) - 1, raw_sum >> 64)
    client = restart(rig)
    assert (rig.report.dropped, rig.report.detached) == ({"no_checksum": 1}, 1)
    tick(rig)
    verify(rig)
    assert located(client, KEYS[:2]) == 2


@pytest.mark.requirement("I1c")
def test_a_damaged_object_is_not_served_although_its_path_was_found() -> None:
    rig = extended()
    client = restart(rig)
    tick(rig)
    job = rig.depot.next_to_sum()
    assert job is not None and job.verify
    rig.depot.summed(job.row, job.generation, 666, 666)
    verify(rig)
    assert rig.counter("corrupt_objects") == 1
    assert located(client) == 4


def test_nothing_waits_where_no_disk_could_have_the_path() -> None:
    rig = extended()
    rig.tier_config = None
    rig.crash()
    assert rig.report.dropped == {"no_parent": 2} and rig.report.detached == 0
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("I8")
def test_objects_wait_for_a_disk_that_opens_late_and_are_not_found_before() -> None:
    rig = extended()
    client = restart(rig, opens=False)
    for _ in range(3):
        tick(rig)
    verify(rig)
    assert rig.report.detached == 2 and in_ram(rig) == 0 and located(client) == 0
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    rig.tier.open()
    assert located(client) == 4
    tick(rig)
    verify(rig)
    assert located(client) == 6


@pytest.mark.requirement("I4")
def test_a_disk_that_never_opens_is_not_waited_for_without_end() -> None:
    rig = extended()
    restart(rig, opens=False)
    tick(rig, attaching.WAIT_SECONDS - 1)
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    tick(rig, 1)
    assert rig.depot.status().tier.used_bytes == 0
    assert rig.counter("adopted_objects.no_parent") == 2


def test_objects_of_which_the_disk_has_lost_the_path_are_dropped_when_it_has_opened() -> None:
    rig = extended()
    rig.medium.stored.clear()
    client = restart(rig)
    tick(rig)
    assert rig.counter("adopted_objects.no_parent") == 2
    assert rig.depot.status().tier.used_bytes == 0
    assert located(client) == 0


@pytest.mark.requirement("I8")
def test_a_second_crash_meanwhile_costs_nothing() -> None:
    rig = extended()
    restart(rig, opens=False)
    tick(rig)
    client = restart(rig)
    assert rig.report.detached == 2
    tick(rig)
    verify(rig)
    assert located(client) == 6


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("crashes", [False, True])
def test_objects_stored_again_meanwhile_replace_the_former(crashes: bool) -> None:
    rig = extended()
    client = restart(rig, opens=False)
    store(client, KEYS[:5], fill=3)
    audit(rig.depot)
    assert rig.counter("adopted_objects.stored_again") == 1
    if crashes:
        verify(rig)
        client = restart(rig, opens=False)
        assert (rig.report.kept, rig.report.detached, rig.report.dropped) == (6, 0, {}), "the path is in RAM now"
    rig.tier.open()
    tick(rig)
    assert rig.counter("adopted_objects.adopted") == (6 if crashes else 1), "the last chunk follows the new one"
    verify(rig)
    assert located(client) == 6
    assert read(rig, client.acquire(KEYS[4:5])[1]) == {3} and read(rig, client.acquire(KEYS[5:])[1]) == {9}


@pytest.mark.requirement("I1", "I8")
def test_a_crash_while_one_is_stored_again_costs_no_reservation() -> None:
    """Two rows of one name would contradict each other: the next run could keep neither."""
    rig = extended()
    client = restart(rig, opens=False)
    lease, reply = client.reserve(KEYS[:5])
    write(rig, reply.extents, 3)
    client = restart(rig, opens=False)
    assert (rig.report.kept, rig.report.reserved, rig.report.dropped) == (1, 5, {})
    assert client.commit(lease, *range(5)) == b"\x01" * 5
    verify(rig)
    rig.tier.open()
    tick(rig)
    verify(rig)
    assert located(client) == 6


def test_objects_that_are_stored_again_are_found_by_their_whole_name() -> None:
    """Keys may share either half, and the kinds of a chunk share the whole key."""
    rig = Rig(tier=SECOND_USE)
    client = rig.attach(spec=HYBRID)
    halves = [bytes([number]) * 8 for number in (1, 2, 255)]
    keys = [first + second for first in halves for second in halves]
    store(client, keys, kinds=BOTH)
    verify(rig)
    detached, rows = rig.depot._ram.detached, rig.depot._ram.rows
    heads = np.flatnonzero(rows.states == RowState.COMMITTED)
    kept = heads[rows.kinds[heads] != Kind.ATTENTION][1:]
    detached.set(kept)
    slot = rows.namespace[heads[0]]
    for head in heads.tolist():
        found = detached.find(slot, rows.key(head), rows.kind[head])
        assert found == (head if head in kept else NO_ROW)
    assert detached.find(slot + 1, rows.key(kept[0]), rows.kind[kept[0]]) == NO_ROW
    for head in kept.tolist():
        detached.remove(head)
        assert detached.find(slot, rows.key(head), rows.kind[head]) == NO_ROW


@pytest.mark.requirement("I4")
def test_detached_objects_are_the_first_to_go_where_room_is_needed() -> None:
    rig = extended(data_pages=16)
    client = restart(rig, opens=False)
    store(client, path("kept", 6))
    assert rig.depot.status().tier.used_bytes == 8 * 8192
    store(client, path("other", 1))
    audit(rig.depot)
    assert rig.counter("evicted_objects.room") == 1 and located(client, path("kept", 6)) == 6
    rig.tier.open()
    tick(rig)
    verify(rig)
    assert located(client) == 5, "the deeper one went"


@pytest.mark.requirement("I4")
def test_quotas_count_detached_objects_and_take_them_first() -> None:
    rig = extended()
    rig.config = replace(rig.config, quotas=(Quota(tier="ram", capacity_bytes=3 * 8192),))
    client = restart(rig, opens=False)
    store(client, path("other", 2))
    audit(rig.depot)
    assert rig.counter("evicted_objects.quota") == 1
    assert located(client, path("other", 2)) == 2


@pytest.mark.requirement("I6")
def test_lent_detached_objects_keep_their_bytes_until_their_loan_ends() -> None:
    rig = extended()
    client = rig.attach()
    lease, reply = client.acquire(KEYS[4:])
    client = restart(rig, opens=False)
    assert (rig.report.detached, rig.report.leases) == (2, 1)
    assert not rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0]), "to drop them would free nothing"
    tick(rig, attaching.WAIT_SECONDS)
    assert read(rig, reply) == {9} and rig.depot.status().tier.used_bytes == 2 * 8192
    client.release(lease)
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


def test_a_deleted_namespace_takes_its_detached_objects_along() -> None:
    rig = extended()
    client = restart(rig, opens=False)
    deletion = rig.depot.deletion(client.namespace, b"")
    for _ in iter(deletion.run_once, False):
        audit(rig.depot)
    assert rig.depot.status().tier.used_bytes == 0


@pytest.mark.requirement("P2")
def test_an_invalidated_namespace_takes_its_detached_objects_along_and_ranks_that_copy_them_notice() -> None:
    rig = extended()
    _, reply = rig.attach().acquire(KEYS[4:])
    restart(rig, opens=False)
    rig.depot.invalidation.begin(rig.depot.invalidation.epochs.with_all_invalidated())
    audit(rig.depot)
    rows = rig.depot._ram.rows
    assert all(rows.generation[row] != generation for _, row, _, _, generation in unpack(reply.extents))
    assert read(rig, reply) == {9}, "still lent"
    for _ in range(3):
        tick(rig)
    rig.tier.open()
    tick(rig)
    assert not len(rig.depot._ram.detached) and in_ram(rig) == 0


def test_a_namespace_keeps_its_slot_until_its_detached_objects_are_gone() -> None:
    rig = extended()
    lease, _ = rig.attach().acquire(KEYS[4:5])
    rig.tier_opens_at_start = False
    rig.crash()
    (namespace,) = rig.depot._tree.namespaces.by_slot.values()
    free_slot(rig.depot._tree, [namespace], 100)
    audit(rig.depot)
    assert not len(rig.depot._ram.detached) and rig.depot.status().tier.used_bytes == 8192
    assert rig.depot._tree.namespaces.by_slot, "what is lent still names the slot"
    rig.attach().release(lease)
    assert rig.depot.status().tier.used_bytes == 0


def test_checkpoints_find_their_attention_on_disk() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, KEYS[:3], kinds=BOTH)
    rig.tier.run()
    rig.wipe()
    rig.start()
    client = rig.attach(spec=HYBRID)
    lease, reply = client.reserve(KEYS[:4], BOTH)
    granted = [i for i, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
    client.commit(lease, *granted)
    verify(rig)
    rig.tier_opens_at_start = True
    rig.crash()
    client = rig.attach(spec=HYBRID)
    assert rig.report.detached == 2
    tick(rig)
    verify(rig)
    assert located(client, KEYS[:4]) == 4


@pytest.mark.requirement("I8")
def test_checkpoints_outlive_the_daemon_where_a_disk_alone_has_the_attention() -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(spec=HYBRID), KEYS[:2])
    rig.tier.run()
    reboot(rig)
    client = rig.attach(spec=HYBRID)
    lease, _ = client.reserve(KEYS[:2], (Kind.STATE,))
    assert client.commit(lease, 0, 1) == b"\x01\x01"
    verify(rig)
    restart(rig)
    assert (rig.report.kept, rig.report.detached) == (1, 1)
    tick(rig)
    verify(rig)
    assert located(rig.attach(spec=HYBRID), KEYS[:2]) == 2


@pytest.mark.parametrize("opens", [True, False])
def test_checkpoints_whose_attention_was_lost_are_not_taken_for_a_path(opens: bool) -> None:
    """What a disk says of other chunks shows that attention makes the paths of this namespace."""
    rig = Rig(tier=COMMIT)
    store(rig.attach(spec=HYBRID), path("other", 1), kinds=BOTH)
    rig.tier.run()
    reboot(rig)
    store(rig.attach(spec=HYBRID), KEYS[:2], kinds=BOTH)
    while (job := rig.depot.next_to_sum()) is not None:
        if rig.depot._ram.rows.kind[job.row] == Kind.STATE:
            raw_sum = payload_sum([rig.buffer[offset : offset + length] for offset, length in job.extents])
            rig.depot.summed(job.row, job.generation, raw_sum & (1 << 64) - 1, raw_sum >> 64)
    rig.tier_opens_at_start = opens
    rig.dead.add(rig.tier.pid)
    rig.crash()
    audit(rig.depot)
    assert rig.report.dropped == {"no_checksum": 2}
    if not opens:
        rig.tier.open()
        audit(rig.depot)
    tick(rig)
    assert rig.counter("adopted_objects.no_parent") == 1
    assert located(rig.attach(spec=HYBRID), KEYS[:2]) == 0
    tick(rig)


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("policy", [SECOND_USE, EVICT], ids=["second_use", "evict"])
def test_what_follows_a_path_in_a_shared_tier_alone_is_written_there_at_once(policy: TierConfig) -> None:
    rig, client = rig_over(KEYS[:4], shared=policy)
    assert boundary(client, KEYS) == 4
    lease, reply = client.reserve(KEYS)
    write(rig, reply.extents, 9)
    assert client.commit(lease, 4, 5) == b"\x01\x01"
    rig.shared.run()
    verify(rig)
    rig.crash()
    client = rig.attach()
    assert in_ram(rig) == 0 and boundary(client, KEYS) == 6


def test_what_follows_a_path_in_ram_is_not_written_to_a_shared_tier_at_once() -> None:
    rig, client = rig_over(KEYS[:4], shared=EVICT)
    assert boundary(client, KEYS) == 4
    answers = client.acquire_later(KEYS[:4], ATTENTION * 4, client.lease())
    rig.shared.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED and in_ram(rig) == 4
    store(client, KEYS)
    assert not rig.shared.jobs


def test_what_follows_a_path_on_disk_is_not_written_to_a_shared_tier_at_once() -> None:
    rig = extended(shared=EVICT)
    assert not rig.shared.jobs
