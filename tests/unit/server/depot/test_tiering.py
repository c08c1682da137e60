"""The engine over a lower tier: write policies, demotion, eviction, opening, workers."""

from __future__ import annotations

import pytest
from kvdepot.core.arena import LentMode
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome, DeclareCall, EndRequestCall, Kind, ReserveOutcome
from kvdepot.core.errors import InvalidArgument
from kvdepot.server.depot.tiering import write_queue
from kvdepot.server.depot.types import Membership, TierConfig, WritePolicy
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Rig, audit, path, process
from tests.rigs.tier_rig import (
    ATTENTION,
    BOTH,
    COMMIT,
    EVICT,
    SECOND_USE,
    in_tier,
    on_tier_only,
    read,
    reboot,
    settle,
    store,
)

# Writing


def test_at_commit_everything_is_written_parents_first() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    lease, _ = client.reserve(path("p", 3), BOTH)
    client.commit(lease, 2, 3, 4, 5)  # children before the first chunk
    assert rig.tier.jobs == []
    client.commit(lease, 0, 1)
    written: list[tuple[bytes, int]] = []
    while rig.tier.jobs:
        name = rig.tier.jobs[0].name
        if name.kind == Kind.STATE:
            assert (name.key, Kind.ATTENTION) in written
        assert name.parent == ROOT_KEY or (name.parent, Kind.ATTENTION) in written
        written.append((name.key, name.kind))
        rig.tier.finish(rig.tier.jobs[0])
    assert len(written) == in_tier(rig) == 6
    audit(rig.depot)


def test_at_second_use_a_path_is_written_with_all_that_it_needs() -> None:
    rig = Rig(tier=SECOND_USE)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 3)
    client.store(keys, BOTH)
    client.store(path("other", 2), BOTH)
    settle(rig)
    assert in_tier(rig) == 0
    lease, reply = client.acquire([keys[2], keys[2]], [Kind.ATTENTION, Kind.STATE])  # the rest is in the engine's cache
    assert reply.outcome is AcquireOutcome.GRANTED
    client.release(lease)
    settle(rig)
    assert in_tier(rig) == 4, "three of attention, and the state that was used"


def test_a_write_holds_its_extents_until_it_is_answered() -> None:
    rig = Rig(data_pages=4, tier=COMMIT)
    client = rig.attach()
    store(client, path("p", 1))
    rig.tier.begin(rig.tier.jobs[0])
    audit(rig.depot)
    assert rig.depot.status().tier.lent_bytes == 2 * 4096
    assert list(client.reserve(path("q", 2))[1].outcomes) == [ReserveOutcome.GRANTED, ReserveOutcome.NO_ROOM]
    rig.tier.finish(rig.tier.jobs[0], IoOutcome.TIMEOUT)
    assert rig.depot.status().tier.lent_bytes == 4 * 4096
    rig.tier.worker_dies()
    audit(rig.depot)


def test_what_waits_is_weak() -> None:
    rig = Rig(data_pages=4, tier=COMMIT)
    client = rig.attach()
    rig.tier.writable = False
    store(client, path("p", 2))
    assert rig.depot.status().lower_tiers[0].queued_objects == 2
    store(client, path("q", 2))  # evicts the first path
    rig.tier.writable = True
    settle(rig)
    assert set(rig.tier.medium.stored) == {0, 1}
    assert client.locate(path("p", 2)).boundary_tokens == 0


@pytest.mark.requirement("I4")
def test_what_need_not_be_written_any_more_leaves_the_queue_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_AT_ONCE", 3)
    rig = Rig(data_pages=32, tier=COMMIT)
    client, keys = rig.attach(), path("p", 8)
    rig.tier.writable = False
    store(client, keys)
    found = rig.depot.deletion(client.namespace, b"")
    while found.run_once():
        pass
    store(client, path("q", 1))
    rig.tier.writable = True
    left: list[int] = []
    while (queued := rig.depot.status().lower_tiers[0].queued_objects) and len(left) < 9:
        left.append(queued)
        rig.depot.tick()
    assert left == [8, 2], "two goes a tick; one row has been used again"
    settle(rig)
    assert in_tier(rig) == 1


@pytest.mark.requirement("I4")
def test_the_queue_is_bounded_in_bytes_and_what_it_drops_is_counted() -> None:
    rig = Rig(tier=TierConfig(WritePolicy.COMMIT, queue_bytes=3 * 8192))
    client = rig.attach()
    rig.tier.writable = False
    store(client, path("p", 6))
    status = rig.depot.status().lower_tiers[0]
    assert (status.queued_objects, status.queued_bytes) == (3, 3 * 8192)
    assert rig.counter("tier_writes_dropped.memory/queue_full") >= 1
    rig.tier.writable = True
    settle(rig)
    assert in_tier(rig) == 3


def test_a_full_queue_costs_a_long_path_no_walk_for_each_of_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 60
    rig = Rig(data_pages=2 * chunks, tier=TierConfig(WritePolicy.SECOND_USE, queue_bytes=2 * 8192))
    rig.tier.writable = False
    client = rig.attach()
    store(client, path("p", chunks))
    steps = 0
    parent = rig.depot._tree.index.parent

    def counted(node: int) -> int:
        nonlocal steps
        steps += 1
        return parent(node)

    monkeypatch.setattr(rig.depot._tree.index, "parent", counted)
    client.acquire(path("p", chunks))
    assert steps < 2 * chunks
    assert rig.counter("tier_writes_dropped.memory/queue_full") == chunks - 2


def test_a_spent_budget_drops_and_counts() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    rig.tier.budget_spent = True
    store(client, path("p", 2))
    settle(rig)
    assert in_tier(rig) == 0
    assert rig.counter("tier_writes_dropped.memory/budget") == 2
    rig.tier.budget_spent = False
    store(client, path("p", 3))
    settle(rig)
    assert in_tier(rig) == 3, "the path is made up for"


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("outcome", [IoOutcome.IO_ERROR, IoOutcome.READ_ONLY, IoOutcome.CANCELLED])
def test_a_failed_write_is_counted_and_ram_serves_on(outcome: IoOutcome) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    rig.tier.fail_next(outcome)
    store(client, path("p", 2))
    settle(rig)
    assert rig.counter(f"tier_writes.memory/{outcome}") == 1
    assert client.locate(path("p", 2)).boundary_tokens == 2 * CHUNK
    assert in_tier(rig) == 0, "the child alone is of no use after a restart"


@pytest.mark.requirement("I1")
def test_a_write_that_finds_bad_bytes_in_ram_drops_the_object() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    rig.tier.writable = False
    store(client, path("p", 2))
    rig.sum_all()  # sums that are not the bytes'
    rig.tier.writable = True
    settle(rig)
    assert rig.counter("corrupt_objects") == 1
    assert client.locate(path("p", 2)).boundary_tokens == 0


@pytest.mark.requirement("P10")
def test_a_write_leaves_its_sum_behind() -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("p", 2))
    assert rig.depot.unsummed == rig.depot.status().tier.pending_checksums == 2
    rig.tier.run()
    assert rig.depot.unsummed == rig.depot.status().tier.pending_checksums == 0
    audit(rig.depot)


# Demotion and eviction


def test_ram_gives_up_leaf_by_leaf_what_the_tier_has() -> None:
    rig = Rig(data_pages=8, tier=COMMIT)
    client = rig.attach()
    store(client, path("p", 4))
    rig.tier.run()
    store(client, path("q", 3), 9)
    rig.tier.run()
    audit(rig.depot)
    assert client.locate(path("p", 4)).boundary_tokens == 4 * CHUNK, "demoted, not dropped"
    assert client.locate(path("p", 4)).tier == "memory"
    answers = client.acquire_later(path("p", 4), ATTENTION * 4, 1)
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert read(rig, answers[0]) == {7}
    audit(rig.depot)


def test_at_eviction_what_ram_is_about_to_drop_is_written_first() -> None:
    rig = Rig(data_pages=20, tier=EVICT, high_watermark=0.8, low_watermark=0.4)
    client = rig.attach()
    store(client, path("p", 4))
    rig.now += 1
    store(client, path("q", 5), 9)
    assert rig.tier.jobs == []
    settle(rig)
    assert client.locate(path("p", 4)).boundary_tokens == 4 * CHUNK
    assert client.locate(path("q", 5)).boundary_tokens == 5 * CHUNK
    assert in_tier(rig) > 0 and rig.depot.status().tier.used_bytes <= 8 * 4096
    assert rig.counter("evicted_objects.watermark") > 0


def test_demotions_beyond_the_queue_are_dropped_and_counted() -> None:
    rig = Rig(
        data_pages=20, tier=TierConfig(WritePolicy.EVICT, queue_bytes=8192), high_watermark=0.5, low_watermark=0.2
    )
    client = rig.attach()
    rig.tier.writable = False
    store(client, path("p", 8))
    settle(rig)
    assert rig.depot.status().tier.used_bytes <= 4 * 4096, "a tier that takes nothing holds nothing up"


@pytest.mark.requirement("T2")
def test_the_tier_evicts_its_own_leaves_and_stays_closed_under_prefixes() -> None:
    rig = Rig(data_pages=200, rows=300, tier=COMMIT, tier_bytes=20 * 12288)
    client = rig.attach()
    for number in range(12):
        rig.now += 1
        store(client, path(number, 4))
        settle(rig)
        assert rig.tier.used_bytes <= rig.tier.capacity_bytes
    assert rig.counter("tier_evicted_objects.memory/watermark") + rig.counter("tier_evicted_objects.memory/room") > 0
    reboot(rig)
    audit(rig.depot)
    assert rig.counter("tier_found_objects.memory/accepted") == in_tier(rig) > 10, "each found its parent"
    assert rig.counter("tier_found_objects.memory/no_parent") == 0


@pytest.mark.requirement("I2")
def test_a_tier_evicts_ahead_of_need_in_slices_down_to_its_low_watermark() -> None:
    tier = TierConfig(WritePolicy.COMMIT, high_watermark=0.8, low_watermark=0.4)
    rig = Rig(data_pages=200, rows=300, tier=tier, tier_bytes=20 * 12288, evictions_at_once=2)
    client = rig.attach()
    for number in range(18):
        store(client, path(number, 1))
        rig.tier.run()
    assert in_tier(rig) == 18
    assert rig.depot.tick(), "there is more to do before the next tick"
    left = [in_tier(rig)]
    while rig.depot.trim():
        left.append(in_tier(rig))
    assert left == [*range(16, 7, -2)], "below the high watermark it goes on"
    assert rig.tier.used_bytes <= 0.4 * rig.tier.capacity_bytes
    before = in_tier(rig)
    assert not rig.depot.tick() and in_tier(rig) == before
    audit(rig.depot)


# Opening


def test_what_has_no_place_in_the_tree_is_dropped_when_found() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 3)
    store(rig.attach(), keys)
    rig.tier.run()
    del rig.medium.stored[1]
    reboot(rig)
    audit(rig.depot)
    assert rig.counter("tier_found_objects.memory/no_parent") == 1
    assert rig.attach().locate(keys).boundary_tokens == CHUNK


@pytest.mark.requirement("T6")
def test_after_a_daemon_crash_ram_and_tier_tell_one_story() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, path("p", 3))
    rig.tier.run()
    rig.crash()
    audit(rig.depot)
    client = rig.attach()
    reply = client.locate(path("p", 3))
    assert (reply.boundary_tokens, reply.tier) == (3 * CHUNK, "memory"), "RAM is not verified yet"
    rig.sum_all(lambda _: 0)  # none of the sums holds
    audit(rig.depot)
    reply = client.locate(path("p", 3))
    assert (reply.boundary_tokens, reply.tier) == (3 * CHUNK, "memory"), "the tier has what RAM lost"


def test_a_foreign_namespace_is_taken_in_before_any_engine_registers_it() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, path("p", 2), kinds=BOTH)
    settle(rig)
    reboot(rig)
    audit(rig.depot)
    assert in_tier(rig) == 4
    assert rig.attach("dense", 11, DENSE).locate(path("p", 2)).boundary_tokens == 0
    assert rig.attach(spec=HYBRID).locate(path("p", 2)).boundary_tokens == 2 * CHUNK


# Workers (I6, I1a)


@pytest.mark.requirement("I1a")
def test_a_worker_of_the_last_run_keeps_what_it_was_lent_until_its_death() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys, ATTENTION * 2, 1)
    for job in list(rig.tier.jobs):
        rig.tier.begin(job)
    worker, extents = rig.worker_pids, [job.extents[0] for job in rig.tier.jobs]
    assert rig.tier.registry.earlier == 0
    rig.crash()
    assert rig.tier.registry.earlier == 1
    audit(rig.depot)
    status = rig.depot.status()
    assert status.tier.lent_bytes == 4 * 4096
    assert [one.engine_id for one in status.sessions if one.engine_id.startswith("kvdepotd")] == []
    client = rig.attach()
    rig.depot.declare(DeclareCall(client.session, ()))  # the engine gives up its half
    assert rig.depot.status().tier.lent_bytes == 4 * 4096
    store(rig.attach("other", 11), path("q", 30), 1)
    for offset, length in extents:
        assert set(rig.buffer[offset : offset + length]) == {0}, "given to somebody else while a worker may write"
    (attachment,) = [one.attachment for one in rig.depot.attachments() if one.process.pid == worker]
    rig.depot.process_dead(attachment)
    audit(rig.depot)
    assert rig.tier.registry.earlier == 0
    rig.tier.run()
    audit(rig.depot)
    assert rig.depot.status().tier.lent_bytes == 0


@pytest.mark.requirement("I1a")
def test_a_dead_worker_of_the_last_run_holds_nothing() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    client.acquire_later(keys, ATTENTION, 1)
    rig.tier.begin(rig.tier.jobs[0])
    rig.dead |= {rig.worker_pids, 10}
    rig.crash()
    audit(rig.depot)
    assert rig.tier.registry.earlier == 0
    assert rig.depot.status().tier.used_bytes == 0


def test_a_worker_is_no_engine() -> None:
    rig = Rig(tier=COMMIT)
    with pytest.raises(InvalidArgument, match="the daemon's own"):
        rig.depot.attach(process(20), Membership("kvdepotd/io/3", scheduler=True, rank=0, world_size=1))
    rig.now += 1000
    rig.depot.tick()
    assert rig.depot.status().sessions == ()
    rig.tier.stop()
    assert rig.depot.attachments() == ()


def test_a_full_lent_table_cancels_and_does_not_lend() -> None:
    rig = Rig(lent_rows=3, tier=COMMIT)
    keys = path("p", 2)
    client = on_tier_only(rig, keys)
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    rig.tier.begin(rig.tier.jobs[0])
    rig.tier.run()
    audit(rig.depot)
    assert len(answers) == 1
    modes = rig.depot._ram.lent.modes
    assert not (modes == LentMode.WRITE).any()


def test_a_copy_lost_from_the_middle_of_a_path_is_written_again() -> None:
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("p", 3))
    settle(rig)
    rig.tier.lose(1)
    assert rig.counter(f"tier_lost_objects.{rig.tier.name}/") == 1
    settle(rig)
    assert in_tier(rig) == 3
    reboot(rig)
    assert rig.attach().locate(path("p", 3)).boundary_tokens == 3 * CHUNK


def test_what_a_tier_said_is_lost_is_not_dropped_from_it() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, path("p", 3), kinds=BOTH)
    rig.tier.run()
    reboot(rig)
    lost = sorted(rig.tier.medium.stored)[:4]
    rig.tier.lose(*lost)
    audit(rig.depot)
    assert not rig.tier.medium.stored, "what lay behind them went, each object once"
    assert rig.depot._tree.index.count == 0


def test_what_lies_behind_a_hole_in_the_path_is_dropped_when_found() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, path("p", 3), kinds=BOTH)
    settle(rig)
    (hole,) = [
        handle
        for handle, name in rig.medium.names.items()
        if name.kind == Kind.ATTENTION and name.boundary_tokens == 2 * CHUNK
    ]
    del rig.medium.stored[hole]
    reboot(rig)
    audit(rig.depot)
    assert rig.counter("tier_found_objects.memory/no_parent") == 2
    assert rig.attach(spec=HYBRID).locate(path("p", 3)).boundary_tokens == CHUNK


def test_what_is_being_stored_anew_is_not_offered_from_the_tier() -> None:
    rig = Rig(tier=COMMIT)
    keys = path("p", 1)
    client = on_tier_only(rig, keys)
    rig.tier.readable = False
    lease, _ = client.reserve(keys)
    rig.tier.readable = True
    assert client.locate(keys).boundary_tokens == 0
    assert client.acquire_later(keys, ATTENTION, 1)[0].outcome is AcquireOutcome.MISSING
    client.commit(lease, 0)
    assert client.locate(keys).boundary_tokens == CHUNK
    audit(rig.depot)


def test_a_write_that_found_no_room_is_tried_again_at_the_next_tick() -> None:
    rig = Rig(tier=COMMIT)
    rig.tier.fail_next(IoOutcome.NO_SPACE)
    store(rig.attach(), path("p", 2))
    rig.tier.run()
    assert rig.tier.jobs == [] and rig.depot.status().lower_tiers[0].queued_objects == 1
    settle(rig)
    assert in_tier(rig) == 2


@pytest.mark.requirement("T2")
def test_a_tier_that_runs_out_of_handles_before_bytes_evicts_for_them() -> None:
    rig = Rig(tier=COMMIT, tier_handles=8)
    client = rig.attach()
    for number in range(12):
        store(client, path(f"p{number}", 2))
        settle(rig)
    for _ in range(30):
        settle(rig)
    assert rig.depot.status().lower_tiers[0].queued_objects == 0
    assert rig.counter("tier_evicted_objects.memory/room") > 0
    assert in_tier(rig) > 4
    audit(rig.depot)


def test_an_object_larger_than_the_tier_holds_nothing_up() -> None:
    rig = Rig(tier=COMMIT, tier_bytes=8192)
    store(rig.attach(), path("p", 1))
    settle(rig)
    assert rig.counter("tier_writes_dropped.memory/too_large") == 1
    assert rig.depot.status().lower_tiers[0].queued_objects == 0


@pytest.mark.requirement("P11")
def test_a_lower_tier_gives_up_what_a_request_left_behind_that_nobody_can_resume_at() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    client.store(path("p", 2), request="r")  # attention without a state
    settle(rig)
    lower = rig.depot._tree.tiers[0]
    lower.evictor.evict_to(lower, 0, 10, "watermark")
    assert in_tier(rig) == 2, "a request in progress stands on it"
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    lower.evictor.evict_to(lower, 0, 10, "watermark")
    assert in_tier(rig) == 0
    audit(rig.depot)


def test_no_space_for_an_object_does_not_cost_the_one_it_follows() -> None:
    """The tier had bytes but no place: what goes for it is something else, or nothing."""
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    keys = path("p", 2)
    store(client, keys)
    rig.tier.finish(rig.tier.jobs[0])
    rig.tier.fail_next(IoOutcome.NO_SPACE)
    rig.tier.finish(rig.tier.jobs[0])
    settle(rig)
    assert in_tier(rig) == 2 and rig.counter("tier_writes_dropped.memory/no_parent") == 0
