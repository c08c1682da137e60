"""Reserve, commit, abandon, credit and eviction."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import ROOT_KEY, CommitOutcome, EndRequestCall, Kind, ReserveCall, ReserveOutcome
from kvdepot.core.errors import InvalidArgument, LimitExceeded, UnknownNamespace, UnknownSession
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.types import Membership

from tests.rigs.engine_rig import (
    ARENA_ID,
    CHUNK,
    DENSE,
    HYBRID,
    Client,
    Rig,
    audit,
    path,
    process,
    spec_of,
    u32,
    unpack,
)

GRANTED, PRESENT, PENDING = ReserveOutcome.GRANTED, ReserveOutcome.PRESENT, ReserveOutcome.PENDING
BOTH = (Kind.ATTENTION, Kind.STATE)


def test_what_was_committed_is_located_and_acquired() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 3)
    lease, reply = client.reserve(keys)
    assert reply.outcomes == bytes([GRANTED] * 3)
    assert reply.arena_id == ARENA_ID
    assert client.locate(keys).boundary_tokens == 0
    assert client.commit(lease, 0, 1, 2) == bytes([CommitOutcome.COMMITTED] * 3)
    located = client.locate(keys)
    assert (located.boundary_tokens, located.tier, located.attention_tokens) == (3 * CHUNK, "ram", 3 * CHUNK)
    assert client.locate(keys, 2 * CHUNK + 5).boundary_tokens == 2 * CHUNK
    _, acquired = client.acquire(keys)
    granted, lent = unpack(reply.extents), unpack(acquired.extents)
    assert [e[:4] for e in granted] == [e[:4] for e in lent]
    assert [e[4] + 1 for e in granted] == [e[4] for e in lent]  # odd while written, even once committed
    audit(rig.depot)


@pytest.mark.requirement("P11")
def test_a_partial_commit_is_no_hit_beyond_the_gap() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 3)
    lease, _ = client.reserve(keys)
    client.commit(lease, 0, 2)
    assert client.locate(keys).boundary_tokens == CHUNK
    client.commit(lease, 1)
    assert client.locate(keys).boundary_tokens == 3 * CHUNK
    audit(rig.depot)


@pytest.mark.requirement("P11", "C1")
def test_a_boundary_needs_its_state_and_interior_chunks_need_none() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 4)
    client.store(keys)
    assert client.locate(keys).boundary_tokens == 0
    assert client.locate(keys).attention_tokens == 4 * CHUNK
    client.store(keys[2:3], (Kind.STATE,), start=2, parent=keys[1])
    assert client.locate(keys).boundary_tokens == 3 * CHUNK
    audit(rig.depot)


def test_reserve_answers_present_and_pending_without_a_second_copy() -> None:
    rig = Rig()
    one, other = rig.attach("one", 10), rig.attach("other", 11)
    keys = path("p", 2)
    one.store(keys[:1])
    one.reserve(keys)
    used = rig.depot.status().tier.used_bytes
    lease, reply = other.reserve(keys)
    assert reply.outcomes == bytes([PRESENT, PENDING])
    assert reply.extents == b""
    assert rig.depot.status().tier.used_bytes == used
    assert other.commit(lease, 0) == bytes([CommitOutcome.LOST])
    audit(rig.depot)


def test_reserve_is_idempotent_by_lease_id() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 2)
    lease, reply = client.reserve(keys)
    assert client.reserve(keys, lease=lease)[1] == reply
    assert client.reserve(path("q", 2), lease=lease)[1].outcomes == bytes([ReserveOutcome.REFUSED] * 2)
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    assert client.commit(lease, 0, 1) == client.commit(lease, 0, 1) == bytes([CommitOutcome.COMMITTED] * 2)
    assert client.reserve(keys, lease=lease)[1].outcomes == bytes([ReserveOutcome.REFUSED] * 2)


def test_an_abandon_before_its_reserve_refuses_it() -> None:
    rig = Rig()
    client = rig.attach()
    client.abandon(77)
    _, reply = client.reserve(path("p", 1), lease=77)
    assert reply.outcomes == bytes([ReserveOutcome.REFUSED])
    assert "released already" in reply.reason
    assert rig.depot.status().tier.used_bytes == 0


@pytest.mark.requirement("T7")
def test_abandon_gives_back_bytes_credit_and_entries() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 4)
    lease, _ = client.reserve(keys)
    client.abandon(lease, 2)
    # Chunk 3 stood on chunk 2: it is out of the index, but its writers have not acknowledged yet.
    assert rig.depot.status().sessions[0].credit_used_bytes == 3 * 8192
    assert client.commit(lease, 0, 1, 3) == bytes([1, 1, CommitOutcome.NO_PARENT])
    assert rig.depot.status().sessions[0].credit_used_bytes == 0
    assert rig.depot.status().sessions[0].leases == 0
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    assert client.commit(lease, 2) == bytes([CommitOutcome.LOST])
    audit(rig.depot)


def test_a_commit_without_its_parent_is_refused_and_with_a_pending_one_waits_unseen() -> None:
    rig = Rig()
    one, other = rig.attach("one", 10), rig.attach("other", 11)
    keys = path("p", 3)
    first, _ = one.reserve(keys[:1])
    second, reply = other.reserve(keys)
    assert reply.outcomes == bytes([PENDING, GRANTED, GRANTED])
    assert other.commit(second, 1) == bytes([CommitOutcome.COMMITTED])
    assert other.locate(keys).boundary_tokens == 0
    one.abandon(first)
    assert other.commit(second, 2) == bytes([CommitOutcome.NO_PARENT])
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


def test_no_parent_and_descendants_of_a_refusal_share_its_answer() -> None:
    rig = Rig(credit_bytes=2 * 8192)
    client = rig.attach()
    keys = path("p", 4)
    assert client.reserve(keys[1:2], start=1, parent=keys[0])[1].outcomes == bytes([ReserveOutcome.NO_PARENT])
    later = ReserveOutcome.LATER
    lease, reply = client.reserve(keys)
    assert reply.outcomes == bytes([GRANTED, GRANTED, later, later])
    client.commit(lease, 0, 1)
    assert client.reserve(keys)[1].outcomes == bytes([PRESENT, PRESENT, GRANTED, GRANTED])
    audit(rig.depot)


def test_the_checkpoint_is_never_refused_for_attentions_sake() -> None:
    rig = Rig(credit_bytes=8 * 8192, kept_back_share=0.25)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 8)
    _, reply = client.reserve(keys)
    assert reply.outcomes.count(GRANTED) == 6
    _, reply = client.reserve(keys[5:6], (Kind.STATE,), start=5, parent=keys[4])
    assert reply.outcomes == bytes([GRANTED])
    audit(rig.depot)


def test_all_kinds_together_never_exceed_the_credit() -> None:
    rig = Rig(credit_bytes=8 * 8192, kept_back_share=0.25)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 8)
    _, reply = client.reserve(keys[:6])
    assert reply.outcomes == bytes([GRANTED] * 6)
    outcomes = [client.reserve([keys[at]], (Kind.STATE,), start=at, parent=([bytes(16), *keys])[at])[1].outcomes[0]
                for at in range(3)]  # fmt: skip
    assert outcomes == [GRANTED, GRANTED, ReserveOutcome.LATER]
    assert rig.depot.status().sessions[0].credit_used_bytes == 8 * 8192
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_an_object_beyond_the_credit_is_refused_with_numbers() -> None:
    client = Rig(credit_bytes=4096).attach()
    _, reply = client.reserve(path("p", 1))
    assert reply.outcomes == bytes([ReserveOutcome.REFUSED])
    assert "8192" in reply.reason and "4096" in reply.reason


@pytest.mark.requirement("T1")
def test_stores_evict_the_least_recently_used_leaf_and_never_overfill() -> None:
    rig = Rig(data_pages=8)
    client = rig.attach()
    old, used = path("old", 2), path("used", 2)
    client.store(old)
    rig.now += 1
    client.store(used)
    rig.now += 1
    lease, _ = client.acquire(old)
    client.release(lease)
    rig.now += 1
    client.store(path("new", 1))
    assert client.locate(old).boundary_tokens == 2 * CHUNK
    assert client.locate(used).boundary_tokens == CHUNK
    assert rig.depot.status().tier.used_bytes == 8 * 4096
    assert rig.counter("evicted_objects.room") == 1
    audit(rig.depot)


@pytest.mark.requirement("I1a")
def test_nothing_lent_is_evicted() -> None:
    rig = Rig(data_pages=4)
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    lease, _ = client.acquire(keys)
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])
    client.release(lease)
    assert client.reserve(path("q", 1))[1].outcomes == bytes([GRANTED])
    assert client.locate(keys).boundary_tokens == CHUNK
    audit(rig.depot)


def test_ancestors_of_a_reservation_are_not_evicted() -> None:
    rig = Rig(data_pages=4)
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys[:1])
    lease, _ = client.reserve(keys[1:], start=1, parent=keys[0])
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])
    assert client.commit(lease, 0) == b"\x01"
    audit(rig.depot)


def test_a_chunk_behind_the_oldest_one_takes_the_room_of_another() -> None:
    """The oldest is no leaf any more while room is made: the next one goes."""
    rig = Rig(data_pages=4)
    client = rig.attach()
    keys, later = path("p", 2), path("later", 1)
    client.store(keys[:1])
    rig.now += 1
    client.store(later)
    client.store(keys[1:], start=1, parent=keys[0])
    assert client.locate(keys).boundary_tokens == 2 * CHUNK
    assert client.locate(later).boundary_tokens == 0
    audit(rig.depot)


def test_placing_beside_an_object_does_not_evict_its_own_node() -> None:
    rig = Rig(data_pages=3)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 1)
    client.store(keys)
    _, reply = client.reserve(keys, (Kind.STATE,))
    assert reply.outcomes == bytes([ReserveOutcome.NO_ROOM])
    assert client.locate(keys).attention_tokens == CHUNK
    audit(rig.depot)


@pytest.mark.requirement("T1")
def test_fragmented_room_is_used_as_several_extents() -> None:
    rig = Rig(data_pages=8)
    small = rig.attach(spec=HYBRID)
    for name in range(4):
        small.store(path(name, 1))
    lease, _ = small.acquire([*path(1, 1), *path(3, 1)])
    big = rig.attach("big", 11, _spec_of_pages(4))
    stored, reply = big.reserve(path("big", 1))
    extents = unpack(reply.extents)
    assert len(extents) == 2
    assert [e[0] for e in extents] == [0, 0]
    assert sum(e[3] for e in extents) == 4 * 4096
    big.commit(stored, 0)
    _, acquired = big.acquire(path("big", 1))
    assert [e[:4] for e in unpack(acquired.extents)] == [e[:4] for e in extents]
    small.release(lease)
    audit(rig.depot)


def _spec_of_pages(pages: int) -> NamespaceSpec:
    return spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(pages * 2048,)), name=f"{pages} pages")


@pytest.mark.requirement("I5", "I6")
def test_a_deadline_ends_service_but_not_the_loan() -> None:
    rig = Rig(lease_deadline_seconds=10.0)
    client = rig.attach()
    keys = path("p", 2)
    lease, _ = client.reserve(keys)
    rig.now += 11
    rig.depot.tick()
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    again, reply = client.reserve(keys)
    assert reply.outcomes == bytes([GRANTED, GRANTED])  # others may store it now
    assert client.commit(lease, 0, 1) == bytes([CommitOutcome.EXPIRED] * 2)
    assert client.commit(again, 0, 1) == bytes([1, 1])
    assert rig.depot.status().tier.used_bytes == 2 * 8192
    audit(rig.depot)


def test_watermarks_evict_in_bounded_slices() -> None:
    rig = Rig(data_pages=40, high_watermark=0.75, low_watermark=0.5, evictions_at_once=3)
    client = rig.attach()
    for name in range(20):
        client.store(path(name, 1))
    assert rig.depot.tick(), "there is more to do before the next tick"
    assert rig.counter("evicted_objects.watermark") == 3
    slices = 1
    while rig.depot.trim():
        slices += 1
        assert rig.counter("evicted_objects.watermark") == 3 * slices
    assert rig.depot.status().tier.used_bytes <= 0.5 * 40 * 4096, "below the high watermark it goes on to the low one"
    evicted = rig.counter("evicted_objects.watermark")
    assert not rig.depot.tick()
    assert rig.counter("evicted_objects.watermark") == evicted
    audit(rig.depot)


def test_end_request_prunes_what_no_request_can_resume_at() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 4)
    client.store(keys[:2], request="r")
    client.store(keys[1:2], (Kind.STATE,), start=1, parent=keys[0], request="r")
    client.store(keys[2:], start=2, parent=keys[1], request="r")
    client.reserve(keys[:3], request="other")
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    assert client.locate(keys).attention_tokens == 3 * CHUNK  # the other request stands on chunk 2
    rig.now += rig.config.provisional_seconds + 1
    rig.depot.tick()
    located = client.locate(keys)
    assert (located.boundary_tokens, located.attention_tokens) == (2 * CHUNK, 2 * CHUNK)
    audit(rig.depot)


def test_garbage_is_refused_by_name_and_changes_nothing() -> None:
    rig = Rig()
    client = rig.attach()
    good = path("p", 1)[0]

    def call(**change: object) -> ReserveCall:
        fields = {"keys": good, "parents": ROOT_KEY, "kinds": b"\x01", "boundaries": u32(CHUNK)} | change
        return ReserveCall(client.session, 1, client.namespace, **fields)  # type: ignore[arg-type]

    for change, word in (
        ({"keys": good[:-1]}, "keys"),
        ({"parents": b""}, "parents"),
        ({"boundaries": u32(CHUNK + 1)}, "boundary"),
        ({"kinds": b"\x03"}, "kind"),
        ({"kinds": b"\x09"}, "kind"),
    ):
        with pytest.raises(InvalidArgument, match=word):
            rig.depot.reserve(call(**change))
    with pytest.raises(LimitExceeded, match="request id"):
        rig.depot.reserve(call(request_id="x" * 1000))
    wrong_depth = rig.depot.reserve(call(boundaries=u32(2 * CHUNK)))
    assert wrong_depth.outcomes == bytes([ReserveOutcome.REFUSED])
    with pytest.raises(UnknownSession):
        rig.depot.reserve(ReserveCall(b"?" * 16, 1, client.namespace, good, ROOT_KEY, b"\x01", u32(CHUNK)))
    with pytest.raises(UnknownNamespace):
        rig.depot.reserve(ReserveCall(client.session, 1, b"?" * 16, good, ROOT_KEY, b"\x01", u32(CHUNK)))
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


def test_nothing_is_granted_before_every_rank_is_attached() -> None:
    rig = Rig()
    attached = rig.depot.attach(process(10), Membership("two", scheduler=True, rank=0, world_size=2))
    client = Client(rig, attached, DENSE)
    _, reply = client.reserve(path("p", 1))
    assert reply.outcomes == bytes([ReserveOutcome.REFUSED])
    assert "1 of 2" in reply.reason
    worker = rig.depot.attach(process(11), Membership("two", scheduler=False, rank=1, world_size=2))
    assert client.reserve(path("p", 1))[1].outcomes == bytes([GRANTED])
    rig.depot.disconnected(worker.attachment)
    assert client.reserve(path("q", 1))[1].outcomes == bytes([ReserveOutcome.REFUSED])
