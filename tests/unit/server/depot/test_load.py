"""Locate, acquire, release."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireCall, AcquireOutcome, Kind, LocateCall
from kvdepot.core.errors import InvalidArgument
from kvdepot.server.depot.types import Membership

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, key, path, process


def test_acquire_is_all_or_nothing() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 3)
    client.store(keys)
    _, reply = client.acquire([*keys, key("absent")])
    assert reply.outcome is AcquireOutcome.MISSING
    assert reply.extents == b""
    _, reply = client.acquire(keys, [Kind.ATTENTION, Kind.ATTENTION, Kind.STATE])
    assert reply.outcome is AcquireOutcome.MISSING
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


def test_what_is_being_written_is_neither_located_nor_acquired() -> None:
    client = Rig().attach()
    keys = path("p", 1)
    lease, _ = client.reserve(keys)
    assert client.acquire(keys)[1].outcome is AcquireOutcome.MISSING
    client.commit(lease, 0)
    assert client.acquire(keys)[1].outcome is AcquireOutcome.GRANTED


def test_acquire_is_idempotent_and_a_release_ends_it_for_good() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    lease, reply = client.acquire(keys)
    assert client.acquire(keys, lease=lease)[1] == reply
    assert rig.depot.status().sessions[0].leases == 1
    client.release(lease)
    client.release(lease)
    assert client.acquire(keys, lease=lease)[1].outcome is AcquireOutcome.REFUSED
    assert rig.depot.status().sessions[0].leases == 0
    audit(rig.depot)


@pytest.mark.requirement("P10")
def test_a_hit_is_counted_once_its_load_is_over_and_has_brought_something() -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11)
    keys = path("p", 3)
    client.store(keys)
    brought, unused, left = (client.acquire(keys, request=f"r{number}")[0] for number in range(3))
    other.acquire(keys)
    assert not rig.depot.status().counters.get("hit_tokens")
    client.release(brought, unused, unused=(unused,))
    client.release(brought, unused)  # repeated, as by an engine that has not heard the answer
    assert rig.depot.status().counters["hit_tokens"] == 3 * CHUNK
    assert [rig.depot.records.explain(f"r{number}")[0].loads[0].outcome for number in range(3)] == [
        "granted", "unused", "granted"
    ]  # fmt: skip
    rig.depot.process_dead(other.attachment)
    assert [session.leases for session in rig.depot.status().sessions] == [1]
    client.release(left, unused=(brought,))
    assert rig.depot.status().counters["hit_tokens"] == 6 * CHUNK
    counters = rig.depot.status().counters
    assert (counters["released_loads.used"], counters["released_loads.unused"]) == (2, 2)
    assert counters["acquired_objects"] == 4 * 3
    audit(rig.depot)


def test_a_release_before_its_acquire_refuses_it() -> None:
    client = Rig().attach()
    client.store(path("p", 1))
    client.release(99)
    assert client.acquire(path("p", 1), lease=99)[1].outcome is AcquireOutcome.REFUSED


@pytest.mark.requirement("P7")
def test_loads_in_flight_are_limited_per_session() -> None:
    rig = Rig(loads_in_flight=2)
    one, other = rig.attach("one", 10), rig.attach("other", 11)
    keys = path("p", 1)
    one.store(keys)
    first, _ = one.acquire(keys)
    one.acquire(keys)
    assert one.acquire(keys)[1].outcome is AcquireOutcome.LATER
    assert other.acquire(keys)[1].outcome is AcquireOutcome.GRANTED
    one.release(first)
    assert one.acquire(keys)[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_a_full_lent_table_answers_later() -> None:
    rig = Rig(lent_rows=4)
    client = rig.attach()
    keys = path("p", 3)
    client.store(keys)
    client.acquire(keys)
    assert client.acquire(keys)[1].outcome is AcquireOutcome.LATER
    assert client.acquire(keys[:1])[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


def test_a_hit_renews_the_end_of_the_path_only() -> None:
    rig = Rig(data_pages=8)
    client = rig.attach()
    hit, other = path("hit", 2), path("other", 2)
    client.store(hit)
    rig.now += 1
    client.store(other)
    rig.now += 1
    lease, _ = client.acquire(hit)
    client.release(lease)
    client.store(path("new", 2))
    assert client.locate(hit).boundary_tokens == 2 * CHUNK
    assert client.locate(other).boundary_tokens == 0


def test_locate_counts_why_it_missed() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 2)
    assert client.locate(keys).boundary_tokens == 0
    assert client.locate([]).boundary_tokens == 0
    lease, _ = client.reserve(keys)
    client.locate(keys)
    client.commit(lease, 0, 1)
    client.locate(keys)
    counted = {reason: rig.counter(f"misses.{reason}") for reason in ("unknown", "being_written", "no_checkpoint")}
    assert counted == {"unknown": 2, "being_written": 1, "no_checkpoint": 1}


@pytest.mark.requirement("P10")
def test_hits_are_counted_in_tokens_and_bytes() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 2)
    client.store(keys, (Kind.ATTENTION, Kind.STATE))
    lease, _ = client.acquire([*keys, keys[1]], [Kind.ATTENTION, Kind.ATTENTION, Kind.STATE])
    client.release(lease)
    assert rig.counter("hit_tokens") == 2 * CHUNK
    assert rig.counter("granted_read_bytes") == 2 * 8192 + 5000
    assert rig.counter("acquires.granted") == 1


def test_a_namespace_sees_only_its_own() -> None:
    rig = Rig()
    dense, hybrid = rig.attach("dense", 10, DENSE), rig.attach("hybrid", 11, HYBRID)
    keys = path("p", 2)
    dense.store(keys)
    assert hybrid.locate(keys).attention_tokens == 0
    assert hybrid.acquire(keys)[1].outcome is AcquireOutcome.MISSING


def test_ranks_not_all_attached_are_refused() -> None:
    rig = Rig()
    rig.attach().store(path("p", 1))
    attached = rig.depot.attach(process(20), Membership("two", scheduler=True, rank=0, world_size=2))
    client = Client(rig, attached, DENSE)
    assert client.acquire(path("p", 1))[1].outcome is AcquireOutcome.REFUSED


def test_one_object_may_be_named_twice_in_a_lease() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 1)
    client.store(keys)
    lease, reply = client.acquire(keys * 2)
    assert reply.outcome is AcquireOutcome.GRANTED
    audit(rig.depot)
    client.release(lease)
    audit(rig.depot)


def test_garbage_is_refused_by_name() -> None:
    rig = Rig()
    client = rig.attach()
    with pytest.raises(InvalidArgument, match="keys"):
        rig.depot.locate(
            LocateCall(client.session, client.namespace, b"short", 100), lambda reply: pytest.fail(str(reply))
        )
    for keys, kinds in ((b"", b""), (b"x" * 15, b"\x01"), (b"x" * 16, b"\x01\x01")):
        with pytest.raises(InvalidArgument, match="keys"):
            rig.depot.acquire(AcquireCall(client.session, 1, client.namespace, keys, kinds), lambda _: None)
    assert [one.outcome for one in client.acquire_later([b"x" * 16], b"\xff", 1)] == [AcquireOutcome.MISSING]
    audit(rig.depot)
