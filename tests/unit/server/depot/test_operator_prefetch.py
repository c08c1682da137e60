"""Reading into RAM what an operator names: last in line, within the share, and nothing of anybody's is taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.control import PrefetchReply, Switch
from kvdepot.core.errors import LoadsOff, NotFound
from kvdepot.server.depot.operators import operator_prefetch as module
from kvdepot.server.depot.operators.operator_prefetch import OperatorPrefetch
from kvdepot.server.depot.types import Quota
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import HYBRID, Rig, audit, path
from tests.rigs.tier_rig import ATTENTION, BOTH, COMMIT, in_ram, read, reboot, store

KEYS, OTHER = path("p", 6), path("q", 4)
OBJECT = 8192


def left_of_the_share(rig: Rig) -> int:
    prefetch, (room,) = rig.depot._prefetch, rig.depot._ram.rooms
    return int(prefetch._share * room.allocator.ready_bytes) - prefetch.pinned_bytes


def cold(*prompts: list[bytes], **options: object) -> Rig:
    """These prompts lie in the lower tier and not in RAM, and no engine is there."""
    rig = Rig(**({"data_pages": 128, "tier": COMMIT} | options))  # type: ignore[arg-type]
    client = rig.attach()
    for prompt in prompts:
        store(client, prompt)
        rig.tier.run()
    reboot(rig)
    return rig


def begun(rig: Rig, key: bytes = b"") -> OperatorPrefetch:
    """Looked at to its end, as far as it looks ahead."""
    (namespace,) = rig.depot._tree.namespaces.by_id
    warming = rig.depot.operator_prefetch(namespace, key)
    while warming.run_once() and warming.hurried:
        pass
    audit(rig.depot)
    return warming


def finish(rig: Rig, warming: OperatorPrefetch) -> PrefetchReply:
    for _ in range(100):
        rig.tier.run()
        if not warming.run_once():
            audit(rig.depot)
            return warming.reply()
        audit(rig.depot)
        rig.now += 0.1
    raise AssertionError(warming.reply())


def wasted(rig: Rig, reason: str) -> float:
    return rig.counter(f"prefetch_wasted_objects.{reason}")


def test_all_of_a_namespace_that_no_engine_has_registered_parents_first() -> None:
    rig = cold(KEYS, OTHER)
    warming = begun(rig)
    assert [job.name.key for job in rig.tier.jobs] == [KEYS[0], OTHER[0], KEYS[1], OTHER[1]]
    reply = finish(rig, warming)
    assert reply == PrefetchReply(10, 10, 0, 10, 10 * OBJECT, finished=True)
    assert in_ram(rig) == 10
    client = rig.attach()
    assert client.locate(KEYS).tier == "ram"
    lease, granted = client.acquire(KEYS)
    assert granted.outcome is AcquireOutcome.GRANTED and read(rig, granted) == {7}
    client.release(lease)
    assert (rig.counter("prefetched_objects"), wasted(rig, "operator")) == (10, 10)
    assert finish(rig, begun(rig)) == PrefetchReply(10, 10, 10, finished=True)


def test_a_chunk_means_the_path_to_it() -> None:
    rig = cold(KEYS, OTHER)
    assert finish(rig, begun(rig, KEYS[2])) == PrefetchReply(0, 3, 0, 3, 3 * OBJECT, finished=True)
    assert finish(rig, begun(rig, KEYS[4])) == PrefetchReply(0, 5, 3, 2, 2 * OBJECT, finished=True)
    assert in_ram(rig) == 5


def test_all_kinds_that_a_tier_has() -> None:
    rig = Rig(data_pages=128, tier=COMMIT)
    store(rig.attach("one", 10, HYBRID), KEYS, kinds=BOTH)
    rig.tier.run()
    reboot(rig)
    rig.attach("one", 10, HYBRID)
    reply = finish(rig, begun(rig))
    assert (reply.examined, reply.read, in_ram(rig)) == (6, 12, 12)


def test_within_the_share_and_the_rest_is_refused_by_name() -> None:
    rig = cold(KEYS, OTHER, prefetch_share=5 * OBJECT / (128 * 4096))
    reply = finish(rig, begun(rig))
    assert (reply.read, reply.refused, reply.failed, reply.reason) == (5, {"share": 5}, {}, "")


def test_what_is_pinned_or_leased_stays_and_all_else_may_go() -> None:
    rig = cold(KEYS, OTHER, data_pages=20, prefetch_share=1.0)
    client = rig.attach()
    finish(rig, begun(rig, OTHER[3]))
    fresh = path("fresh", 2)
    store(client, fresh, 5)
    rig.tier.run()
    lease, granted = client.acquire(fresh)
    assert granted.outcome is AcquireOutcome.GRANTED
    rig.depot.pins.configure(0.5)
    rig.depot.pins.pin(client.namespace, OTHER[3], 100)
    while rig.depot.pins.run_once():
        pass
    reply = finish(rig, begun(rig, KEYS[5]))
    assert (reply.read, reply.refused) == (4, {"room": 2}), "ten objects, of which six are taken"
    assert read(rig, granted) == {5}
    assert rig.depot._ram.pins.user.objects == 4
    assert client.locate(OTHER).tier == "ram"
    client.release(lease)


def test_a_quota_refuses_and_the_owners_own_are_not_read_in_vain() -> None:
    rig = cold(KEYS)
    rig.config = replace(rig.config, quotas=(Quota(tier="ram", capacity_bytes=3 * OBJECT),))
    reboot(rig)
    reply = finish(rig, begun(rig))
    assert (reply.read, reply.refused) == (3, {"quota": 3})
    assert in_ram(rig) == 3


def test_loads_and_waiting_requests_go_first() -> None:
    rig = cold(KEYS, OTHER)
    client = rig.attach()
    warming = begun(rig)
    assert len(rig.tier.jobs) == 4
    answers = client.acquire_later(KEYS[:5], ATTENTION * 5, 1)
    loaded = set(KEYS[2:5])
    client.locate(OTHER, request="r")
    assert {job.name.key for job in rig.tier.jobs[4:]} == loaded
    while loaded & {job.name.key for job in rig.tier.jobs}:
        assert len(rig.tier.jobs) <= 7, "nothing is begun ahead while a load is read"
        rig.tier.finish(rig.tier.jobs[0])
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert [job.name.key for job in rig.tier.jobs] == [*OTHER[2:], KEYS[5]], "what a request waits for comes next"
    client.release(1)
    assert finish(rig, warming).reason == ""
    assert in_ram(rig) == 10


def test_while_a_request_waits_for_the_share_nothing_is_begun_or_refused() -> None:
    rig = cold(KEYS, OTHER, prefetch_share=5 * OBJECT / (128 * 4096))
    client = rig.attach()
    client.locate(KEYS, request="r")
    rig.tier.run()
    assert left_of_the_share(rig) == 0 and in_ram(rig) == 5
    warming = begun(rig, OTHER[3])
    assert warming.run_once() and not rig.tier.jobs and not warming.reply().refused
    client.end_request("r")
    reply = finish(rig, warming)
    assert (reply.read, reply.refused) == (4, {})


def test_a_request_that_needs_the_share_gets_it() -> None:
    rig = cold(KEYS, OTHER, prefetch_share=5 * OBJECT / (128 * 4096))
    client = rig.attach()
    warming = begun(rig, KEYS[5])
    rig.tier.finish(rig.tier.jobs[0])
    assert not warming.over and left_of_the_share(rig) == 0
    client.locate(OTHER, request="r")
    rig.tier.run()
    assert warming.reply().reason == "requests needed the room" and not warming.run_once()
    audit(rig.depot)
    assert client.locate(OTHER, request="r").tier == "ram"
    assert in_ram(rig) == 9, "what was read, or being read, stays"


def test_a_request_that_needs_the_room_gets_it() -> None:
    rig = cold(KEYS, OTHER, data_pages=12, prefetch_share=1.0)
    client = rig.attach()
    warming = begun(rig, KEYS[5])
    rig.tier.finish(rig.tier.jobs[0])
    rig.tier.finish(rig.tier.jobs[0])
    assert not warming.over and left_of_the_share(rig) == 0
    client.locate(OTHER, request="r")
    rig.tier.run()
    assert warming.reply().reason == "requests needed the room"
    rig.depot.tick()
    rig.tier.run()
    audit(rig.depot)
    assert client.locate(OTHER, request="r").tier == "ram"


def test_a_store_that_finds_no_room_gets_it() -> None:
    rig = cold(KEYS, data_pages=12, prefetch_share=1.0)
    client = rig.attach()
    warming = begun(rig)
    rig.tier.run()
    assert not warming.over and in_ram(rig) >= 4
    store(client, path("fresh", 3), 5)
    assert warming.reply().reason == "requests needed the room" and wasted(rig, "preempted") > 0
    audit(rig.depot)


def test_what_cannot_be_read_is_counted_and_a_tier_that_goes_away_is_not_waited_for() -> None:
    rig = cold(KEYS, OTHER)
    warming = begun(rig)
    rig.tier.fail_next(IoOutcome.IO_ERROR, IoOutcome.CORRUPT)
    rig.tier.run()
    reply = finish(rig, warming)
    assert reply.failed["not_read"] >= 2 and reply.read + sum(reply.failed.values()) == 10
    rig = cold(KEYS, OTHER)
    warming = begun(rig)
    rig.tier.readable = False
    for job in list(rig.tier.jobs):
        rig.tier.finish(job, IoOutcome.IO_ERROR)
    assert finish(rig, warming).failed == {"not_read": 4, "out_of_use": 6}


def test_a_tier_that_hangs_ends_it_with_a_reason() -> None:
    rig = cold(KEYS)
    warming = begun(rig)
    rig.now += module.SILENCE_SECONDS - 1
    assert warming.run_once()
    rig.now += 2
    assert not warming.run_once()
    assert "nothing was read for 60 s" in warming.reply().reason
    rig.tier.run()
    audit(rig.depot)
    assert warming.reply().read == 0 and in_ram(rig) == 0, "what no worker had begun is not read"


def test_cancelled_it_holds_nothing_and_begins_nothing_more() -> None:
    rig = cold(KEYS, OTHER)
    warming = begun(rig)
    rig.tier.finish(rig.tier.jobs[0])
    warming.cancel()
    rig.tier.run()
    rig.depot.tick()
    audit(rig.depot)
    assert (rig.depot.status().tier.prefetched_objects, in_ram(rig)) == (0, 1)
    assert finish(rig, begun(rig)).read == 9


def test_loads_that_are_off_end_it_and_refuse_the_next_one() -> None:
    for draining in (False, True):
        rig = cold(KEYS, OTHER)
        warming = begun(rig)
        if draining:
            rig.depot.drain(draining=True)
        else:
            rig.depot.switch(Switch.LOADS, b"", on=False)
        rig.tier.run()
        assert in_ram(rig) == 4, "what was asked for, and nothing more"
        assert not warming.run_once() and "the operator" in warming.reply().reason
        with pytest.raises(LoadsOff, match="the operator"):
            begun(rig)


def test_what_leaves_meanwhile_is_not_read() -> None:
    rig = cold(KEYS, OTHER)
    client = rig.attach()
    warming = begun(rig)
    removal = rig.depot.deletion(client.namespace, OTHER[0])
    while removal.run_once():
        pass
    reply = finish(rig, warming)
    assert reply.read == 6 and reply.failed["left"] >= 1
    with pytest.raises(NotFound):
        rig.depot.operator_prefetch(client.namespace, OTHER[0])
    with pytest.raises(NotFound):
        rig.depot.operator_prefetch(b"x" * 16, b"")
