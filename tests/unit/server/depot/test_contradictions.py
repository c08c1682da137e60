"""Two checksums of one object that differ: its bytes changed between commit and checksum, and nobody knows when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.core.arena import LentMode
from kvdepot.core.calls import ReleaseCall
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.depot.stores.checksums import HELD_BACK_SECONDS_MAX
from kvdepot.server.depot.types import ToSum
from kvdepot.server.storage.base import IoOutcome

from tests.fakes.memory_tier import MemoryTier
from tests.fakes.operator_control import control_over
from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, path
from tests.rigs.tier_rig import (
    ATTENTION,
    BOTH,
    COMMIT,
    boundary,
    in_ram,
    in_tier,
    read,
    reboot,
    settle,
    store,
    verify,
    write,
)

KEYS = path("p", 3)
ORDERS = ("checksum_first", "write_first")


def _observed(rig: Rig, job: ToSum) -> Callable[[], None]:
    """The worker reads the bytes now; its answer comes when the test wants it."""
    raw_sum = payload_sum([rig.buffer[offset : offset + length] for offset, length in job.extents])
    return lambda: rig.depot.summed(job.row, job.generation, raw_sum & (1 << 64) - 1, raw_sum >> 64)


def _contradicted(rig: Rig, tier: MemoryTier, order: str) -> None:
    """A byte of the first object that is written changes after its checksum was taken and before it is written."""
    job = rig.depot.next_to_sum()
    assert job is not None and list(job.extents) == list(tier.jobs[0].extents)
    answer = _observed(rig, job)
    if order == "checksum_first":
        answer()
    rig.buffer[job.extents[0][0]] ^= 0x40
    tier.finish(tier.jobs[0])
    if order == "write_first":
        answer()
    audit(rig.depot)


def _served_after_a_reboot(rig: Rig) -> set[int]:
    """The different bytes that a client gets."""
    reboot(rig)
    settle(rig)
    client = rig.attach(pid=12)
    chunks = client.locate(KEYS).boundary_tokens // CHUNK
    if not chunks:
        return set()
    answers = client.acquire_later(KEYS[:chunks], ATTENTION * chunks, client.lease())
    settle(rig)
    (reply,) = answers
    return read(rig, reply)


def _boundary(client: Client) -> int:
    return client.locate(KEYS).boundary_tokens // CHUNK


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("order", ORDERS)
def test_an_object_whose_checksums_differ_leaves_every_tier_in_either_order(order: str) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    _contradicted(rig, rig.tier, order)
    assert (in_ram(rig), in_tier(rig), rig.counter("corrupt_objects")) == (0, 0, 1)
    assert _boundary(client) == 0
    assert not rig.medium.stored
    assert _served_after_a_reboot(rig) <= {7}


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("order", ORDERS)
def test_what_follows_a_doubtful_object_goes_too(order: str) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS)
    _contradicted(rig, rig.tier, order)
    settle(rig)
    assert (in_ram(rig), in_tier(rig), rig.counter("dropped_objects.below_corrupt")) == (0, 0, 2)
    store(client, KEYS)  # again, and right
    verify(rig)
    settle(rig)
    assert _boundary(client) == 3
    assert _served_after_a_reboot(rig) == {7}


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("writable", [True, False])
def test_a_doubtful_object_that_a_tier_cannot_drop_for_good_is_not_served_by_the_next_run(
    tmp_path: Path, writable: bool
) -> None:
    rig, file = Rig(tier=COMMIT), StateFile(tmp_path / "state")

    async def run() -> None:
        control = control_over(rig, file)
        store(rig.attach(), KEYS[:2])
        job = rig.depot.next_to_sum()
        assert job is not None
        answer = _observed(rig, job)
        rig.buffer[job.extents[0][0]] ^= 0x40
        rig.tier.finish(rig.tier.jobs[0])
        rig.tier.writable = writable
        answer()
        await asyncio.sleep(0)
        await control.close(60.0)

    asyncio.run(run())
    assert (in_ram(rig), in_tier(rig)) == (0, 0)
    assert file.read().switches.loads_off_namespaces == (() if writable else (DENSE.namespace_id(),))
    reboot(rig)
    settle(rig)
    assert in_tier(rig) == (0 if writable else 1), "the tier has it again"
    control_over(rig, file).restore()
    assert _boundary(rig.attach(pid=12)) == 0


@pytest.mark.requirement("I1", "I6")
@pytest.mark.parametrize("order", ORDERS)
def test_a_doubtful_object_that_is_lent_keeps_its_bytes_until_it_is_given_back(order: str) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    lease, _ = client.acquire(KEYS[:1])
    assert rig.depot.next_to_sum() is None, "engines copy"
    rig.now += HELD_BACK_SECONDS_MAX
    _contradicted(rig, rig.tier, order)
    assert in_ram(rig) == 0
    assert rig.depot.status().tier.lent_bytes > 0
    client.release(lease)
    audit(rig.depot)
    assert rig.depot.status().tier.lent_bytes == 0


@pytest.mark.requirement("I1")
def test_a_verified_object_that_changes_in_ram_leaves_the_tier_its_copy() -> None:
    """What the tier has was written with the checksum that RAM does not match any more."""
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    verify(rig)
    settle(rig)
    (row,) = (row for row in range(rig.depot._ram.rows.count) if rig.depot._ram.rows.state[row] == 2)
    rig.depot._checksums.again(row, lambda _: None)
    rig.buffer[rig.depot._ram.rows.offset[row]] ^= 1
    verify(rig)
    audit(rig.depot)
    assert (in_ram(rig), in_tier(rig), rig.counter("corrupt_objects")) == (0, 1, 1)
    assert _served_after_a_reboot(rig) == {7}


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("first", [0, 1])
def test_two_tiers_that_wrote_different_bytes_both_lose_them(first: int) -> None:
    """Both writes began before there was a checksum."""
    rig = Rig(tier=COMMIT, shared=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    assert [job.raw_sum for tier in rig.lower_tiers for job in tier.jobs] == [None, None]
    rig.lower_tiers[first].run()
    rig.buffer[rig.tier.jobs[0].extents[0][0] if first else rig.shared.jobs[0].extents[0][0]] ^= 1
    rig.lower_tiers[1 - first].run()
    settle(rig)
    rig.shared.run()
    audit(rig.depot)
    assert (in_ram(rig), in_tier(rig), rig.counter("corrupt_objects")) == (0, 0, 1)
    assert not rig.medium.stored
    assert not rig.shared_medium.files
    assert len(rig.shared_medium.quarantined) == 1


@pytest.mark.requirement("I1", "T3")
@pytest.mark.parametrize("order", ORDERS)
def test_a_published_file_with_doubtful_bytes_is_moved_aside_for_all_nodes(order: str) -> None:
    rig = Rig(shared=COMMIT)
    store(rig.attach(), KEYS[:1])
    _contradicted(rig, rig.shared, order)
    rig.shared.run()
    audit(rig.depot)
    assert (in_ram(rig), in_tier(rig)) == (0, 0)
    assert not rig.shared_medium.files
    assert len(rig.shared_medium.quarantined) == 1


@pytest.mark.requirement("I1", "T3")
@pytest.mark.parametrize("order", ORDERS)
def test_the_file_that_another_node_had_published_before_stays(order: str) -> None:
    other = Rig(shared=COMMIT)
    rig = Rig(shared=COMMIT, shared_medium=other.shared_medium)
    store(rig.attach(), KEYS[:1])
    store(other.attach(), KEYS[:1], fill=8)
    other.shared.run()
    _contradicted(rig, rig.shared, order)
    rig.shared.run()
    audit(rig.depot)
    assert (in_ram(rig), in_tier(rig)) == (0, 0)
    assert len(rig.shared_medium.files) == 1
    assert not rig.shared_medium.quarantined


@pytest.mark.requirement("I1", "T3")
def test_a_write_under_way_of_a_corrupt_object_is_moved_aside_when_it_is_answered() -> None:
    """A disk's write found the contradiction. The shared tier's began before the first checksum, too."""
    rig = Rig(tier=COMMIT, shared=COMMIT)
    store(rig.attach(), KEYS[:1])
    assert rig.shared.begin(rig.shared.jobs[0])
    _contradicted(rig, rig.tier, "checksum_first")
    assert in_ram(rig) == 0
    rig.shared.run()
    audit(rig.depot)
    assert not rig.shared_medium.files
    assert len(rig.shared_medium.quarantined) == 1


@pytest.mark.requirement("I1", "T3")
def test_a_file_that_was_looked_up_while_it_was_written_is_given_up_with_its_object() -> None:
    """Its key is stored again before the write of the corrupt object is answered."""
    rig = Rig(tier=COMMIT, shared=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    doubtful = rig.shared.jobs[0]
    assert rig.shared.begin(doubtful)
    _contradicted(rig, rig.tier, "checksum_first")
    ended: list[object] = []
    answer, doubtful.done = doubtful.done, ended.append
    rig.shared.finish(doubtful)  # the file is there, and the answer is on its way
    store(client, KEYS[:1])
    rig.shared.run()  # it is there already, with other bytes
    answer(*ended)  # type: ignore[arg-type]
    rig.shared.run()
    audit(rig.depot)
    assert len(rig.shared_medium.quarantined) == 1
    assert not rig.depot.status().lower_tiers[1].objects, "the handle of a file that is not there"
    assert boundary(client, KEYS[:1]) == 1


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("order", ORDERS)
def test_a_doubtful_state_takes_its_chunk_along(order: str) -> None:
    """What follows may have been computed from it, although the path does not need it."""
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    store(client, KEYS, kinds=BOTH)
    rig.tier.finish(rig.tier.jobs[0])
    job = rig.depot.next_to_sum()
    while job is not None and list(job.extents) != list(rig.tier.jobs[0].extents):
        _observed(rig, job)()
        job = rig.depot.next_to_sum()
    assert job is not None
    answer = _observed(rig, job)
    if order == "checksum_first":
        answer()
    rig.buffer[job.extents[0][0]] ^= 1
    rig.tier.finish(rig.tier.jobs[0])
    if order == "write_first":
        answer()
    settle(rig)
    assert (in_ram(rig), in_tier(rig), rig.counter("corrupt_objects")) == (0, 0, 1)


@pytest.mark.requirement("I1", "T3")
def test_a_file_that_the_tier_does_not_keep_is_compared_too() -> None:
    """The path before it is lost while it is written: the file is there, and nobody has its handle."""
    rig = Rig(shared=COMMIT)
    client = rig.attach()
    store(client, KEYS[:2])
    first, second = rig.shared.jobs
    jobs = [rig.depot.next_to_sum(), rig.depot.next_to_sum()]
    answers = [_observed(rig, job) for job in jobs if job is not None]
    rig.buffer[second.extents[0][0]] ^= 1
    rig.shared.finish(first, IoOutcome.IO_ERROR)
    rig.shared.finish(second)
    assert in_tier(rig) == 0
    assert len(rig.shared_medium.files) == 1
    for answer in answers:
        answer()
    rig.shared.run()
    audit(rig.depot)
    assert rig.counter("corrupt_objects") == 1
    assert not rig.shared_medium.files


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("bad", [True, False])
def test_an_object_that_an_engine_doubts_is_compared_first_and_dropped_only_if_it_is_bad(bad: bool) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS[:2])
    verify(rig)
    store(client, KEYS[2:3])  # has no checksum yet
    lease, _ = client.acquire(KEYS[:2])
    rows = rig.depot._ram.lent.rows[rig.depot._ram.lent.modes == LentMode.READ].tolist()
    if bad:
        rig.buffer[rig.depot._ram.rows.offset[rows[1]]] ^= 1
    rig.depot.release(ReleaseCall(client.session, (lease,), (lease,), (lease,)))
    assert rig.counter("doubted_objects") == 2
    jobs = [rig.depot.next_to_sum(), rig.depot.next_to_sum()]
    assert {job.row for job in jobs if job} == set(rows)
    rig.depot.sum_worker_died()
    verify(rig)
    audit(rig.depot)
    assert rig.counter("corrupt_objects") == bad
    assert not rig.depot._checksums._doubted


@pytest.mark.requirement("I4")
def test_doubts_of_objects_without_a_checksum_and_of_those_that_left_are_forgotten() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    for verified in (False, True):
        if verified:
            verify(rig)
        lease, _ = client.acquire(KEYS[:1])
        rig.depot.release(ReleaseCall(client.session, (lease,), (), (lease,)))
        assert bool(rig.depot._checksums._doubted) == verified
    doubted = rig.depot._checksums._doubted
    (row,) = doubted
    doubted[row] -= 2  # as if another object had the row now
    assert rig.depot.next_to_sum() is None
    assert not doubted


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("following", ["written", "under_way", "waiting"])
@pytest.mark.parametrize("order", ORDERS)
def test_files_of_what_follows_doubtful_bytes_are_not_found_once_these_are_stored_again(
    order: str, following: str
) -> None:
    """An engine loads the bytes before anything compared them, and stores what it has computed from them."""
    rig = Rig(shared=COMMIT)
    client = rig.attach()
    store(client, KEYS[:1])
    (doubtful,) = rig.shared.jobs
    assert rig.shared.begin(doubtful)
    job = rig.depot.next_to_sum()
    assert job is not None and list(job.extents) == list(doubtful.extents)
    lease, reply = client.reserve(KEYS[1:], start=1, parent=KEYS[0])
    write(client, reply.extents, 9)
    assert client.commit(lease, 0, 1) == bytes([1, 1])
    answer = _observed(rig, job)
    if order == "checksum_first":
        answer()
    rig.buffer[job.extents[0][0]] ^= 0x40
    for later in rig.shared.jobs[1:] if following != "waiting" else ():
        assert rig.shared.begin(later)
        if following == "written":
            rig.shared.finish(later)
    rig.shared.finish(doubtful)
    if order == "write_first":
        answer()
    rig.shared.run()
    audit(rig.depot)
    assert (in_ram(rig), len(rig.shared_medium.files)) == (0, 0)
    store(client, KEYS[:1])
    assert boundary(client, KEYS) == 1
