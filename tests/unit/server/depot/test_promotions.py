"""Acquires that wait for a lower tier. The tier is in memory and obeys the test."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, DeclareCall, Kind, ReserveOutcome
from kvdepot.server.storage.base import DAMAGED, IoOutcome

from tests.rigs.engine_rig import CHUNK, Rig, audit, key, path, unpack
from tests.rigs.tier_rig import (
    ATTENTION,
    COMMIT,
    in_ram,
    in_tier,
    on_tier_only,
    read,
    store,
)


def test_an_acquire_reads_what_ram_lacks_and_is_answered_when_all_is_verified() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    assert (in_ram(rig), in_tier(rig)) == (0, 3)
    reply = client.locate(keys)
    assert (reply.boundary_tokens, reply.tier) == (3 * CHUNK, "memory")
    answers = client.acquire_later(keys, ATTENTION * 3, 99)
    assert answers == [] and len(rig.tier.jobs) == 3
    audit(rig.depot)
    rig.tier.finish(rig.tier.jobs[2])
    rig.tier.finish(rig.tier.jobs[0])
    assert answers == []
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.GRANTED]
    assert read(rig, answers[0]) == {7}
    audit(rig.depot)
    assert in_ram(rig) == 3
    assert client.locate(keys).tier == "ram"
    assert rig.depot.next_to_sum() is None, "it was verified, hence has its sum"
    client.release(99)
    audit(rig.depot)


def test_what_is_in_ram_is_pinned_and_not_read() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys[:1], ATTENTION, 1)
    rig.tier.run()
    client.release(1)
    answers = client.acquire_later(keys, ATTENTION * 3, 2)
    assert len(rig.tier.jobs) == 2
    rig.tier.run()
    assert [index for index, *_ in unpack(answers[0].extents)] == [0, 1, 2]


def test_concurrent_acquires_share_one_read() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    other = rig.attach("other", 11)
    one = client.acquire_later(keys, ATTENTION * 2, 1)
    two = other.acquire_later(keys, ATTENTION * 2, 2)
    twice = other.acquire_later([keys[0], keys[0]], ATTENTION * 2, 3)
    assert len(rig.tier.jobs) == 2
    rig.tier.run()
    assert [one[0].outcome, two[0].outcome, twice[0].outcome] == [AcquireOutcome.GRANTED] * 3
    audit(rig.depot)


def test_a_repeat_waits_for_the_same_answer_and_another_call_with_its_id_is_refused() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    first = client.acquire_later(keys, ATTENTION * 2, 1)
    again = client.acquire_later(keys, ATTENTION * 2, 1)
    other = client.acquire_later(keys[:1], ATTENTION, 1)
    assert [one.outcome for one in other] == [AcquireOutcome.REFUSED]
    assert len(rig.tier.jobs) == 2
    rig.tier.run()
    assert first == again and first[0].outcome is AcquireOutcome.GRANTED
    assert client.acquire_later(keys, ATTENTION * 2, 1) == first
    assert rig.counter("acquires.granted") == 1


@pytest.mark.requirement("I7")
def test_all_or_nothing_when_one_object_is_nowhere() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later([*keys, key("absent")], ATTENTION * 3, 1)
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    assert rig.tier.jobs == [] and rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


def test_without_room_for_all_nothing_is_read_and_the_answer_is_later() -> None:
    rig = Rig(data_pages=8, tier=COMMIT)
    keys = path("p", 4)
    client = on_tier_only(rig, keys)
    rig.attach("other", 11).reserve(path("q", 2))  # half of the arena cannot be evicted
    answers = client.acquire_later(keys, ATTENTION * 4, 1)
    assert [one.outcome for one in answers] == [AcquireOutcome.LATER]
    assert rig.tier.jobs == []
    audit(rig.depot)
    answers = client.acquire_later(keys[:2], ATTENTION * 2, 2)
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED


@pytest.mark.requirement("I6")
def test_a_release_while_reading_leaves_the_extents_to_the_worker() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    rig.tier.begin(rig.tier.jobs[0])
    client.release(1)
    assert [one.outcome for one in answers] == [AcquireOutcome.REFUSED]
    audit(rig.depot)
    assert rig.depot.status().tier.used_bytes == 2 * 4096, "what no worker has begun is given back"
    assert rig.depot.status().tier.lent_bytes == 2 * 4096
    rig.tier.run()
    audit(rig.depot)
    assert in_ram(rig) == 1, "what was read anyway is kept"
    assert client.acquire_later(keys, ATTENTION * 2, 1)[0].outcome is AcquireOutcome.REFUSED


@pytest.mark.requirement("I1")
def test_a_read_that_nobody_waited_for_any_more_is_joined_and_not_begun_again() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys, ATTENTION, 1)
    rig.tier.begin(rig.tier.jobs[0])
    client.release(1)
    answers = client.acquire_later(keys, ATTENTION, 2)
    assert len(rig.tier.jobs) == 1, "a second worker would write to the extents after they are published"
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert read(rig, answers[0]) == {7}
    audit(rig.depot)


@pytest.mark.requirement("I1")
def test_what_was_proved_bad_while_an_acquire_waited_is_not_granted() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys[:2], ATTENTION * 2, 1)
    rig.tier.run()
    client.release(1)
    answers = client.acquire_later(keys, ATTENTION * 3, 2)
    tree = rig.depot._tree
    bad = tree.index.find(next(iter(tree.namespaces.by_slot)), keys[1])
    tree.drop_corrupt(tree.index.row(bad, Kind.ATTENTION))
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)
    assert client.acquire_later(keys, ATTENTION * 3, 2) == [], "nothing is remembered: it may be asked anew"


@pytest.mark.requirement("T7")
def test_a_session_that_dies_while_reading_leaves_nothing() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys, ATTENTION * 2, 1)
    rig.depot.process_dead(client.attachment)
    assert rig.depot.status().sessions == ()
    rig.tier.run()
    audit(rig.depot)
    status = rig.depot.status().tier
    assert (status.lent_bytes, status.used_bytes) == (0, 0)


def test_a_lease_granted_late_holds_up_no_earlier_deadline() -> None:
    """Its time begins with the grant, so it is behind the leases that were granted while it waited."""
    rig = Rig(tier=COMMIT, lease_deadline_seconds=10.0)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    waits = client.acquire_later(keys, ATTENTION, 1)
    rig.now += 1
    written, reply = client.reserve(path("other", 2))
    assert set(reply.outcomes) == {ReserveOutcome.GRANTED}
    rig.now += 4
    rig.tier.run()
    assert [answer.outcome for answer in waits] == [AcquireOutcome.GRANTED]
    rig.now += 6  # 10 s after the reservation, 6 s after the grant
    rig.depot.tick()
    assert (rig.counter("expired_leases.write"), rig.counter("expired_leases.read")) == (1, 0)
    assert set(client.commit(written, 0, 1)) == {CommitOutcome.EXPIRED}
    rig.now += 4
    rig.depot.tick()
    assert rig.counter("expired_leases.read") == 1
    audit(rig.depot)


@pytest.mark.requirement("I5")
def test_a_waiting_acquire_ends_at_its_deadline() -> None:
    rig = Rig(tier=COMMIT, lease_deadline_seconds=10.0)
    client = on_tier_only(rig, path("p", 1))
    answers = client.acquire_later(path("p", 1), ATTENTION, 1)
    rig.tier.begin(rig.tier.jobs[0])
    rig.now += 11
    rig.depot.tick()
    assert [one.outcome for one in answers] == [AcquireOutcome.REFUSED]
    assert rig.depot.status().sessions[0].leases == 0
    audit(rig.depot)


def test_a_granted_lease_has_its_whole_time() -> None:
    rig = Rig(tier=COMMIT, lease_deadline_seconds=10.0)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys, ATTENTION, 1)
    rig.now += 8
    rig.tier.run()
    rig.now += 8
    rig.depot.tick()
    assert rig.counter("expired_leases.read") == 0
    rig.now += 3
    rig.depot.tick()
    assert rig.counter("expired_leases.read") == 1


@pytest.mark.requirement("P5", "I6")
def test_a_timeout_fails_the_load_and_its_extents_return_when_the_worker_is_dead() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    stuck = rig.tier.jobs[0]
    rig.tier.finish(stuck, IoOutcome.TIMEOUT)
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    audit(rig.depot)
    lent = [offset for offset, _ in stuck.extents]
    store(rig.attach("other", 11), path("q", 31), 1)  # everything else is filled
    assert rig.depot.status().tier.lent_bytes == 2 * 4096
    rows = rig.depot._ram.rows
    assert [rows.state[row] for row in range(rows.count) if rows.offset[row] in lent and rows.state[row]] == [4]
    rig.tier.run()
    rig.tier.worker_dies()
    audit(rig.depot)
    assert rig.depot.status().tier.lent_bytes == 0
    assert in_tier(rig) >= 2, "a timeout says nothing about the object"


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("outcome", sorted(DAMAGED))
def test_damage_is_a_miss_with_its_own_reason_and_ends_the_path(outcome: IoOutcome) -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 3, 1)
    rig.tier.finish(rig.tier.jobs[1], outcome)
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    rig.tier.run()
    audit(rig.depot)
    assert rig.counter(f"tier_damaged_objects.memory/{outcome}") == 1
    assert client.locate(keys).boundary_tokens == CHUNK, "what lies behind it cannot be reached"
    assert (in_tier(rig), len(rig.tier.medium.quarantined)) == (1, 1)


@pytest.mark.requirement("P6")
def test_damage_that_another_reader_has_found_meanwhile_is_not_counted_again() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 3, 1)
    rig.tier.lose(1)  # as the scrubber ends it, who has counted it
    rig.tier.finish(next(job for job in rig.tier.jobs if job.handle == 1), IoOutcome.CORRUPT)
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    rig.tier.run()
    audit(rig.depot)
    assert rig.counter("tier_damaged_objects.memory/corrupt") == 0
    assert rig.counter("tier_reads.memory/corrupt") == 1
    assert client.locate(keys).boundary_tokens == CHUNK


@pytest.mark.requirement("P6")
def test_damage_costs_only_the_copy_where_ram_has_another() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = rig.attach()
    store(client, keys)
    rig.tier.run()
    rig.tier.lose(1)
    audit(rig.depot)
    assert client.locate(keys).boundary_tokens == 3 * CHUNK
    assert in_tier(rig) == 2


def test_what_is_lost_without_another_copy_takes_what_lay_behind_it() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    client = on_tier_only(rig, keys)
    rig.tier.lose(1)
    audit(rig.depot)
    assert client.locate(keys).boundary_tokens == CHUNK


def test_an_object_lost_while_it_is_read_is_served_if_the_read_held() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    rig.tier.lose(0)
    audit(rig.depot)
    rig.tier.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.GRANTED]
    assert read(rig, answers[0]) == {7}
    audit(rig.depot)


def test_an_object_lost_while_it_is_read_takes_the_path_when_the_read_fails() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    rig.tier.lose(0)
    rig.tier.finish(rig.tier.jobs[0], IoOutcome.IO_ERROR)
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    audit(rig.depot)
    rig.tier.run()
    audit(rig.depot)
    assert rig.depot.status().tier.used_bytes == in_tier(rig) == 0


def test_a_closed_tier_offers_nothing_and_says_why() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    rig.tier.readable = False
    assert client.locate(keys).miss == "tier_unavailable"
    assert client.acquire_later(keys, ATTENTION, 1)[0].outcome is AcquireOutcome.MISSING
    assert rig.counter("misses.tier_unavailable") == 1
    # Without it the object may be stored anew; it is then in both.
    lease, reply = client.reserve(keys)
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED]
    client.commit(lease, 0)
    audit(rig.depot)


def test_a_reservation_of_what_the_tier_has_is_answered_present() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    _, reply = client.reserve([*keys, key("p", 2)])
    present = ReserveOutcome.PRESENT
    assert list(reply.outcomes) == [present, present, ReserveOutcome.GRANTED]
    audit(rig.depot)


@pytest.mark.requirement("I1c")
def test_what_was_adopted_and_is_not_verified_yet_is_read_from_the_tier() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    keys = path("p", 3)
    store(client, keys, fill=7)
    rig.tier.run()
    rig.sum_all()
    rig.crash()
    client = rig.attach()
    for row in range(3):  # RAM was damaged meanwhile, and nobody has looked
        for offset, length in rig.depot._ram.rows.extents(row):
            rig.buffer[offset : offset + length] = b"\xbb" * length
    assert client.locate(keys).boundary_tokens == 3 * CHUNK
    answers = client.acquire_later([*keys, keys[0]], ATTENTION * 4, 1)
    assert not answers
    audit(rig.depot)
    rig.tier.run()
    (reply,) = answers
    assert reply.outcome is AcquireOutcome.GRANTED
    assert read(rig, reply) == {7}
    assert rig.counter("corrupt_objects") == 0
    client.release(1)
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_an_unverified_object_that_somebody_still_reads_keeps_its_bytes_when_a_tier_gives_it_anew() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    keys = path("p", 1)
    store(client, keys)
    rig.tier.run()
    rig.sum_all()
    lease, _ = client.acquire(keys)
    used_bytes = rig.depot.status().tier.used_bytes
    rig.crash()
    client = rig.attach()
    assert rig.depot.declare(DeclareCall(client.session, (lease,))).lost == ()
    assert not client.acquire_later(keys, ATTENTION, 1)
    rig.tier.run()
    assert rig.depot.status().tier.used_bytes == 2 * used_bytes
    client.release(lease)
    assert rig.depot.status().tier.used_bytes == used_bytes
    audit(rig.depot)
