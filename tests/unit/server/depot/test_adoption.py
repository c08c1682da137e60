"""What survives a daemon that was killed, and what is never believed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
from kvdepot.core.arena import NO_ROW, LentMode, RowState
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome, CommitOutcome, DeclareCall, Kind, ReserveOutcome
from kvdepot.core.errors import EngineIdInUse
from kvdepot.core.limits import LABEL_BYTES_MAX
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree.rows import Rows
from kvdepot.server.depot.types import Membership

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, key, path, process, spec_of, unpack
from tests.rigs.seeds import drawn

BOTH = (Kind.ATTENTION, Kind.STATE)


@pytest.mark.requirement("I1c")
def test_adopted_objects_are_served_only_after_their_sum_held() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 3)
    client.store(keys)
    rig.sum_all()
    rig.crash()
    assert rig.report.kept == 3
    client = rig.attach()
    assert client.locate(keys).boundary_tokens == 0
    assert client.acquire(keys[:1])[1].outcome is AcquireOutcome.MISSING
    assert client.reserve(keys)[1].outcomes == bytes([ReserveOutcome.PENDING] * 3)
    assert rig.counter("misses.unverified") == 1
    assert rig.depot.status().tier.unverified_objects == 3
    assert rig.sum_all() == 3
    assert client.locate(keys).boundary_tokens == 3 * CHUNK
    assert client.acquire(keys)[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_a_stray_object_index_of_a_lease_costs_no_memory_and_none_of_its_other_objects() -> None:
    rig = Rig()
    client = rig.attach()
    lease, _ = client.reserve(path("p", 3))
    lent = rig.depot._tables.lent
    lent["index"][(lent["mode"] == LentMode.WRITE) & (lent["index"] == 2)] = 0xFFFFFFFF
    tracemalloc.start()
    rig.crash()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20
    assert rig.report.reserved == 3, "all of it may yet be written to"
    client = rig.attach()
    assert client.commit(lease, 0, 1, 2) == bytes([CommitOutcome.COMMITTED] * 2 + [CommitOutcome.LOST])
    assert client.locate(path("p", 3)).boundary_tokens == 2 * CHUNK
    client.abandon(lease)
    assert rig.depot.status().sessions[0].credit_used_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("I1c")
def test_objects_without_a_checksum_are_dropped_with_what_stands_on_them() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 3)
    client.store(keys)
    jobs = [rig.depot.next_to_sum() for _ in range(3)]
    for job in (jobs[0], jobs[2]):
        assert job is not None
        rig.depot.summed(job.row, job.generation, 1, 1)
    rig.crash()
    assert rig.report.kept == 1
    assert rig.report.dropped == {"no_checksum": 1, "no_parent": 1}
    assert rig.depot.status().tier.used_bytes == 8192
    audit(rig.depot)


@pytest.mark.requirement("I1c")
def test_a_sum_that_differs_drops_the_subtree() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 4)
    client.store(keys)
    rig.sum_all()
    rig.crash()
    client = rig.attach()
    offsets: list[int] = []

    def second_is_corrupt(offset: int) -> int:
        offsets.append(offset)
        return offset if len(offsets) != 2 else 666

    rig.sum_all(second_is_corrupt)
    assert client.locate(keys).boundary_tokens == CHUNK
    assert rig.counter("corrupt_objects") == 1
    assert rig.counter("dropped_objects.below_corrupt") == 2
    assert rig.depot.status().tier.used_bytes == 8192
    audit(rig.depot)


def test_what_a_request_asks_for_is_verified_first() -> None:
    rig = Rig()
    client = rig.attach()
    for name in range(6):
        client.store(path(name, 1))
    rig.sum_all()
    rig.crash()
    client = rig.attach()
    client.locate(path(4, 1))
    job = rig.depot.next_to_sum()
    assert job is not None and job.verify
    rig.depot.summed(job.row, job.generation, job.extents[0][0], 1)
    assert client.locate(path(4, 1)).boundary_tokens == CHUNK


@pytest.mark.requirement("I1a")
def test_a_reservation_survives_the_crash_and_can_be_committed() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 2)
    lease, reply = client.reserve(keys)
    rig.crash()
    assert (rig.report.reserved, rig.report.sessions, rig.report.leases) == (2, 1, 1)
    client = rig.attach()
    assert rig.depot.status().sessions[0].credit_used_bytes == 2 * 8192
    assert rig.depot.declare(DeclareCall(client.session, (lease,))).lost == ()
    assert client.reserve(keys, lease=lease)[1].outcomes == bytes([ReserveOutcome.REFUSED] * 2)
    assert client.commit(lease, 0, 1) == bytes([CommitOutcome.COMMITTED] * 2)
    _, acquired = client.acquire(keys)
    assert [e[:4] for e in unpack(acquired.extents)] == [e[:4] for e in unpack(reply.extents)]
    audit(rig.depot)


@pytest.mark.requirement("I1a")
def test_a_readers_pin_survives_the_crash_until_it_is_acknowledged() -> None:
    rig = Rig(data_pages=4)
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    lease, _ = client.acquire(keys)
    rig.crash()
    # Never summed, so nobody may read it again; but the old reader may still be copying.
    assert (rig.report.kept, rig.report.pinned) == (0, 2)
    client = rig.attach()
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])
    client.release(lease)
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.GRANTED])
    audit(rig.depot)


@pytest.mark.requirement("T7")
def test_leases_of_processes_proven_dead_are_not_adopted() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 1))
    rig.sum_all()
    client.acquire(path("p", 1))
    client.reserve(path("q", 2))
    rig.dead.add(10)
    rig.crash()
    assert (rig.report.sessions, rig.report.leases, rig.report.reserved) == (0, 0, 0)
    assert rig.report.dropped == {"reservation_ended": 2}
    status = rig.depot.status()
    assert (status.tier.lent_bytes, status.tier.used_bytes, status.sessions) == (0, 8192, ())
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_a_process_whose_death_is_not_provable_keeps_its_extents() -> None:
    rig = Rig(grace_seconds=60.0)
    attached = rig.depot.attach(
        type(process(1))(0, 0, process(1).boot_id), Membership("hidden", scheduler=True, rank=0, world_size=1)
    )
    client = Client(rig, attached, HYBRID)
    client.reserve(path("p", 1), BOTH)
    rig.crash()
    rig.now += 1000
    rig.depot.tick()
    assert rig.depot.status().tier.used_bytes == 4 * 4096
    assert rig.attach().locate(path("p", 1)).attention_tokens == 0
    audit(rig.depot)


def test_one_dead_rank_among_living_ones_leaves_the_table() -> None:
    rig = Rig()
    for rank in (0, 1):
        rig.depot.attach(process(10 + rank), Membership("e", scheduler=rank == 0, rank=rank, world_size=2))
    rig.dead.add(11)
    rig.crash()
    assert [info.process.pid for info in rig.depot.attachments()] == [10]
    rig.crash()
    assert [info.process.pid for info in rig.depot.attachments()] == [10]


def test_checksum_loans_of_the_last_run_are_forgotten() -> None:
    rig = Rig()
    rig.attach().store(path("p", 1))
    assert rig.depot.next_to_sum() is not None
    rig.crash()
    assert rig.depot.status().tier.lent_bytes == 0
    assert rig.report.dropped == {"no_checksum": 1}
    audit(rig.depot)


def test_objects_of_several_extents_survive() -> None:
    rig = Rig(data_pages=8)
    small = rig.attach(spec=HYBRID)
    for name in range(4):
        small.store(path(name, 1))
    big_spec = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4 * 2048,)), name="big")
    held, _ = small.acquire([*path(1, 1), *path(3, 1)])
    big = rig.attach("big", 11, big_spec)
    big.store(path("big", 1))
    small.release(held)
    rig.sum_all()
    rig.crash()
    assert rig.report.kept == 3
    big = rig.attach("big", 11, big_spec)
    rig.sum_all()
    _, acquired = big.acquire(path("big", 1))
    assert len(unpack(acquired.extents)) == 2
    audit(rig.depot)


def damage_overlap(rows: Rows) -> None:
    rows.offset[1] = rows.offset[2]


def damage_offset(rows: Rows) -> None:
    rows.offset[1] = 1 << 63


def damage_length(rows: Rows) -> None:
    rows.length[1] = (1 << 64) - 1


def damage_generation(rows: Rows) -> None:
    rows.generation[1] += 1


def damage_namespace(rows: Rows) -> None:
    rows.namespace[1] = 999


def damage_kind(rows: Rows) -> None:
    rows.kind[1] = 77


def damage_state(rows: Rows) -> None:
    rows.state[1] = 99


def damage_links(rows: Rows) -> None:
    rows.next[1] = 1


def damage_far_link(rows: Rows) -> None:
    rows.next[1] = NO_ROW - 1


def damage_key(rows: Rows) -> None:
    rows._key[16:32] = rows._key[0:16]


def damage_boundary(rows: Rows) -> None:
    rows.boundary[1] = 0


DAMAGE = [
    (damage_overlap, "overlap"),
    (damage_offset, "torn_extent"),
    (damage_length, "torn_extent"),
    (damage_generation, "torn_generation"),
    (damage_namespace, "unknown_namespace"),
    (damage_kind, "torn_fields"),
    (damage_state, "torn_fields"),
    (damage_links, "torn_links"),
    (damage_far_link, "torn_links"),
    (damage_key, "repeated"),
    (damage_boundary, "torn_fields"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("lent", [False, True], ids=["idle", "lent"])
def test_torn_rows_are_dropped_and_counted_never_trusted(
    damage: Callable[[Rows], None], reason: str, lent: bool
) -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 4)
    client.store(keys)
    rig.sum_all()
    if lent:
        lease, _ = client.acquire(keys[1:3])
    damage(rig.depot._ram.rows)
    rig.crash()
    assert reason in rig.report.dropped, rig.report
    client = rig.attach()
    rig.sum_all()
    assert client.locate(keys).boundary_tokens <= CHUNK
    assert rig.depot.status().tier.used_bytes <= 4 * 8192
    if lent:
        # Whatever else is wrong with them, bytes in the arena that are lent are not granted to anybody.
        granted = unpack(client.reserve(path("q", 4))[1].extents)
        rows = rig.depot._ram.rows
        sane = [row for row in (1, 2) if rows.state[row] == RowState.DYING and rows.length[row] == 8192]
        held = {rows.offset[row] for row in sane}
        assert held.isdisjoint(extent[2] for extent in granted)
        client.release(lease)
    rig.crash()
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_bytes_that_two_lent_rows_claim_are_not_reused_whatever_else_is_torn() -> None:
    rig = Rig(data_pages=8)
    client = rig.attach()
    keys = path("p", 4)
    client.store(keys)
    rig.sum_all()
    first, _ = client.acquire(keys[1:2])
    client.acquire(keys[2:3])
    shared = rig.depot._ram.rows.offset[2]
    damage_overlap(rig.depot._ram.rows)
    damage_generation(rig.depot._ram.rows)
    rig.crash()
    client = rig.attach()
    client.release(first)
    granted = unpack(client.reserve(path("q", 4))[1].extents)
    assert granted
    assert shared not in {extent[2] for extent in granted}, "the other reader copies from them"


def test_an_entry_whose_reply_was_never_sent_is_cleared() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 1))
    lent = rig.depot._ram.lent
    lent.lend(1, 0, LentMode.WRITE, 50, 0)
    lent.lend(1, 99, LentMode.READ, 0, 0)  # of nobody
    lent.rows[lent.lend(1, 0, LentMode.READ, 0, 0)] = 10_000  # beyond the table
    rig.crash()
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("S6")
def test_an_adopted_label_has_no_control_characters_and_fits_its_column() -> None:
    rig = Rig()
    rig.attach().store(path("p", 1))
    labels = rig.depot._tables.namespaces["label"].view("u1").reshape(-1, LABEL_BYTES_MAX)
    labels[0] = list(("\x1b[2J\u202e" + "x" * 48).encode().ljust(LABEL_BYTES_MAX, b"\xff"))
    rig.crash()
    assert [one.label for one in rig.depot.status().namespaces] == ["?[2J?" + "x" * 48]


def test_an_empty_arena_is_adopted_as_empty_and_is_not_ready_by_that() -> None:
    rig = Rig()
    assert rig.ready_bytes_after_adoption == 0
    assert rig.report.kept == rig.report.sessions == 0
    assert rig.report.dropped == {}
    audit(rig.depot)


def test_the_run_that_was_not_advanced_trusts_nothing_either() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 1))
    rig.sum_all()
    rig.run -= 1
    rig.crash()
    assert rig.attach().locate(path("p", 1)).boundary_tokens == 0


def test_a_sum_for_what_was_replaced_meanwhile_changes_nothing() -> None:
    rig = Rig(data_pages=2)
    client = rig.attach()
    client.store(path("p", 1))
    job = rig.depot.next_to_sum()
    assert job is not None
    # It is lent to the worker: it cannot be evicted, and is not handed out twice.
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])
    assert rig.depot.next_to_sum() is None
    rig.depot.sum_worker_died()
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.GRANTED])
    rig.depot.summed(job.row, job.generation, 1, 1)
    assert rig.counter("checksummed_objects") == 0
    audit(rig.depot)


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("seed", drawn(range(6)))
def test_exactly_what_has_a_sum_and_its_whole_path_is_kept(seed: int) -> None:
    """Random trees of two namespaces that share keys, random sums; twice, so that what is kept lies scattered."""
    random = Random(seed)
    rig = Rig(data_pages=1024, rows=512, lent_rows=512, seed=seed)
    for _ in range(2):
        for client in (rig.attach("dense", 10, DENSE), rig.attach("hybrid", 11, HYBRID)):
            for _ in range(12):
                turns = [random.choice("ab") for _ in range(random.randrange(1, 8))]
                prompt = [key(*turns[: depth + 1]) for depth in range(len(turns))]
                client.store(prompt, BOTH if client.spec is HYBRID else BOTH[:1])
        for job in iter(rig.depot.next_to_sum, None):
            if random.random() < 0.8:
                rig.depot.summed(job.row, job.generation, job.extents[0][0], 1)
        objects = _objects(rig)
        expected: set[Name] = set()
        while len(expected) < len(more := {name for name in objects if _stands(objects, name, expected)}):
            expected = more
        rig.crash()
        assert rig.report.kept == len(expected)
        assert set(_objects(rig)) == expected
        assert 0 < len(expected) < len(objects)
        audit(rig.depot)
        rig.sum_all()
        assert rig.counter("corrupt_objects") == 0


Name = tuple[int, bytes, int]


def _objects(rig: Rig) -> dict[Name, tuple[bytes, bool]]:
    """Committed objects by namespace slot, key and kind: the parent's key, and whether there is a sum."""
    rows = rig.depot._ram.rows
    heads = [row for row in range(rows.count) if rows.state[row] == RowState.COMMITTED]
    return {(rows.namespace[r], rows.key(r), rows.kind[r]): (rows.parent(r), rows.summed(r)) for r in heads}


def _stands(objects: dict[Name, tuple[bytes, bool]], name: Name, standing: set[Name]) -> bool:
    parent, summed = objects[name]
    return summed and (parent == ROOT_KEY or (name[0], parent, int(Kind.ATTENTION)) in standing)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("rank", [0, -1], ids=["scheduler and worker", "scheduler alone"])
def test_a_scheduler_keeps_its_place_over_a_restart_as_long_as_it_may_live(rank: int) -> None:
    """Else another process would say what the session still holds, and free what this one writes."""
    rig = Rig()
    attached = rig.depot.attach(process(10), Membership("engine", scheduler=True, rank=rank, world_size=1))
    if rank < 0:
        rig.depot.attach(process(11), Membership("engine", scheduler=False, rank=0, world_size=1))
    writing = Client(rig, attached, DENSE)
    lease, _ = writing.reserve(path("p", 2))
    rig.crash()
    with pytest.raises(EngineIdInUse, match="already the scheduler"):
        rig.depot.attach(process(12), Membership("engine", scheduler=True, rank=-1, world_size=1))
    back = rig.depot.attach(process(10), Membership("engine", scheduler=True, rank=rank, world_size=1))
    assert rig.depot.declare(DeclareCall(back.session, (lease,))).lost == ()
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_a_scheduler_that_died_while_no_daemon_ran_has_no_successor_in_its_session() -> None:
    rig = Rig(data_pages=8)
    attached = rig.depot.attach(process(10), Membership("engine", scheduler=True, rank=-1, world_size=1))
    rig.depot.attach(process(11), Membership("engine", scheduler=False, rank=0, world_size=1))
    client = Client(rig, attached, DENSE)
    _, reply = client.reserve(path("p", 2))
    lent = [(row, offset) for _, row, offset, _, _ in unpack(reply.extents)]
    rig.dead = {10}
    rig.crash()
    rig.depot.tick()
    successor = rig.attach("engine", pid=12)
    assert successor.session != client.session
    rig.depot.declare(DeclareCall(successor.session, ()))
    _, reply = successor.reserve(path("q", 2))
    assert reply.outcomes == bytes([ReserveOutcome.GRANTED] * 2)
    taken = {(row, offset) for _, row, offset, _, _ in unpack(reply.extents)}
    assert taken.isdisjoint(lent), "the worker of before may still write there"
    assert rig.depot.status().tier.lent_bytes == 4 * 8192
    audit(rig.depot)
    rig.dead = {10, 11}
    rig.crash()
    assert rig.depot.status().tier.lent_bytes == 2 * 8192, "until its death is proven"
    audit(rig.depot)
