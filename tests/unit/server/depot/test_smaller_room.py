"""RAM of which less may be used than before: what lies beyond is dropped, and its bytes are never granted again."""

from __future__ import annotations

import numpy as np
import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome

from tests.rigs.engine_rig import Rig, audit, path, unpack
from tests.rigs.tier_rig import COMMIT, read, write

OBJECT = 8192
PAGES = 64
ROOM = 32 * 4096
OBJECTS, KEPT = PAGES * 4096 // OBJECT, ROOM // OBJECT


def full_rig(**options: object) -> Rig:
    """RAM is full of paths of one chunk, each with bytes of its own."""
    rig = Rig(data_pages=PAGES, **options)  # type: ignore[arg-type]
    client = rig.attach("one", 10)
    for number in range(OBJECTS):
        lease, reply = client.reserve(path(number, 1))
        write(client, reply.extents, number + 1)
        client.commit(lease, 0)
    rig.sum_all()
    return rig


def beyond(rig: Rig) -> list[int]:
    rows = rig.depot._ram.rows
    return [int(row) for row in np.flatnonzero((rows.states != 0) & (rows.offsets >= ROOM))]


def shrink(rig: Rig) -> None:
    rig.room_bytes = (ROOM,)
    rig.crash()


@pytest.mark.requirement("I1")
def test_what_lies_beyond_is_dropped_and_the_rest_has_its_bytes() -> None:
    rig = full_rig()
    lost = {rig.depot._ram.rows.key(row) for row in beyond(rig)}
    assert len(lost) == OBJECTS - KEPT
    rig.dead.add(10)
    shrink(rig)
    assert dict(rig.report.dropped) == {"beyond_capacity": OBJECTS - KEPT} and rig.report.kept == KEPT
    tier = rig.depot.status().tier
    assert (tier.capacity_bytes, tier.used_bytes, tier.ready_bytes) == (ROOM, ROOM, ROOM)
    audit(rig.depot)
    client = rig.attach("two", 20)
    rig.sum_all()
    served = 0
    for number in range(OBJECTS):
        _, reply = client.acquire(path(number, 1))
        if path(number, 1)[0] in lost:
            assert reply.outcome is not AcquireOutcome.GRANTED
        else:
            assert read(client, reply) == {number + 1}
            served += 1
    assert served == KEPT


@pytest.mark.requirement("I1")
def test_nothing_beyond_is_ever_granted() -> None:
    rig = full_rig()
    rig.dead.add(10)
    shrink(rig)
    client = rig.attach("two", 20)
    for number in range(3 * KEPT):
        client.store(path(("new", number), 1))
        assert not beyond(rig)
        audit(rig.depot)


@pytest.mark.requirement("I1", "I1a")
def test_what_is_lent_beyond_keeps_its_bytes_and_is_never_served_again() -> None:
    rig = full_rig()
    row = beyond(rig)[0]
    key = rig.depot._ram.rows.key(row)
    client = rig.attach("one", 10)
    lease, reply = client.acquire([key])
    assert reply.outcome is AcquireOutcome.GRANTED
    generation = int(rig.depot._ram.rows.generation[row])
    shrink(rig)
    assert rig.report.pinned == rig.report.lent_beyond == 1
    assert int(rig.depot._ram.rows.generation[row]) != generation  # its reader throws its copy away
    audit(rig.depot)
    ram = rig.depot._ram
    assert ram.lent_bytes() == OBJECT and ram.lent_bytes(room=ram.rooms[0]) == 0, "orphans may make room all the same"
    client = rig.attach("one", 10)
    client.release(lease)
    assert rig.counter("leaked_objects") == 0
    assert client.acquire([key])[1].outcome is not AcquireOutcome.GRANTED
    assert rig.depot.status().tier.used_bytes == ROOM
    audit(rig.depot)


@pytest.mark.requirement("T1")
def test_what_is_dropped_within_the_room_and_lent_keeps_no_memory_beyond_it() -> None:
    rig = full_rig()
    client = rig.attach("one", 10)
    for number in range(KEPT):
        lease, reply = client.acquire(path(number, 1))
        assert reply.outcome is AcquireOutcome.GRANTED
        (row,) = (row for _, row, *_ in unpack(reply.extents))
        if rig.depot._ram.rows.offsets[row] < ROOM:
            break
        client.release(lease)
    rig.depot._ram.rows.flags[row] = 0  # it has no checksum
    shrink(rig)
    assert (rig.report.pinned, rig.report.lent_beyond) == (1, 0)
    audit(rig.depot)


@pytest.mark.requirement("I1", "I1a")
def test_a_write_beyond_is_refused_at_its_commit() -> None:
    rig = Rig(data_pages=PAGES)
    client = rig.attach("one", 10)
    client.store(path("first", KEPT))
    lease, reply = client.reserve(path("written", 2))
    write(client, reply.extents, 9)
    assert beyond(rig)
    rig.sum_all()
    shrink(rig)
    client = rig.attach("one", 10)
    assert set(client.commit(lease, 0, 1)).isdisjoint({CommitOutcome.COMMITTED})
    assert client.acquire(path("written", 1))[1].outcome is not AcquireOutcome.GRANTED
    audit(rig.depot)


def test_what_follows_a_dropped_chunk_waits_for_a_disk_tier_or_goes() -> None:
    for tier, expected in ((None, "dropped"), (COMMIT, "detached")):
        rig = Rig(data_pages=PAGES, tier=tier)
        client = rig.attach("one", 10)
        client.store(path("long", OBJECTS))
        rig.sum_all()
        rows = rig.depot._ram.rows
        first = int(rows.keys.tolist().index(path("long", OBJECTS)[0]))
        last = int(rows.keys.tolist().index(path("long", OBJECTS)[-1]))
        rows.offsets[first], rows.offsets[last] = int(rows.offsets[last]), int(rows.offsets[first])
        rig.dead.add(10)
        rig.room_bytes = (max(int(rows.offsets[first]), int(rows.offsets[last])),)
        rig.tier_opens_at_start = False
        rig.crash()
        assert rig.report.kept == 0 and rig.report.dropped["beyond_capacity"] == 1
        assert (rig.report.detached if expected == "detached" else rig.report.dropped["no_parent"]) == OBJECTS - 1


@pytest.mark.requirement("I1", "I1a", "I6")
@pytest.mark.parametrize("writes", [True, False], ids=["written", "read"])
def test_what_is_lent_across_the_new_end_keeps_the_bytes_before_it(writes: bool) -> None:
    rig = Rig(data_pages=PAGES)
    client = rig.attach("one", 10)
    last = path("last", 1)
    for number in range(KEPT):
        client.store(path(number, 1))
    rig.sum_all()
    lease, reply = client.reserve(last)
    if not writes:
        write(client, reply.extents, 9)
        client.commit(lease, 0)
        rig.sum_all()
        lease, _ = client.acquire(last)
    [(_, row, offset, length, _)] = unpack(reply.extents)
    assert (offset, length) == (ROOM, OBJECT)
    rig.room_bytes = (ROOM + 4096,)  # in the middle of it
    rig.crash()
    assert rig.report.lent_beyond == 1 and rig.report.dropped["beyond_capacity"] == 1
    assert rig.depot.status().tier.used_bytes == ROOM + 4096
    audit(rig.depot)
    other = rig.attach("two", 20)
    rig.sum_all()
    for number in range(2 * KEPT):
        _, granted = other.reserve(path(("new", number), 1))
        for _, _, start, size, _ in unpack(granted.extents):
            assert start + size <= offset, "its user may still touch these bytes"
    client = rig.attach("one", 10)
    used_bytes = rig.depot.status().tier.used_bytes
    client.abandon(lease) if writes else client.release(lease)
    assert int(rig.depot._ram.rows.states[row]) == 0 and rig.counter("leaked_objects") == 0
    assert rig.depot.status().tier.used_bytes == used_bytes - 4096
    audit(rig.depot)
