"""Prefetch: what waiting requests need from a lower tier is read ahead, in their order, within a share of RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome, DeclareCall, Kind, LocateCall
from kvdepot.server.depot.tiering import prefetch as prefetch_module
from kvdepot.server.depot.types import Quota
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path
from tests.rigs.tier_rig import ATTENTION, BOTH, COMMIT, in_ram, read, reboot, store

OBJECT = 8192


def cold(*prompts: list[bytes], **options: object) -> tuple[Rig, Client]:
    """These prompts lie in the lower tier and not in RAM."""
    rig = Rig(**({"data_pages": 128, "tier": COMMIT, "lease_deadline_seconds": 100.0} | options))  # type: ignore[arg-type]
    client = rig.attach()
    for prompt in prompts:
        store(client, prompt)
        rig.tier.run()
    reboot(rig)
    return rig, rig.attach()


def held(rig: Rig) -> tuple[int, int]:
    """Objects and bytes that prefetch holds."""
    audit(rig.depot)
    tier = rig.depot.status().tier
    return tier.prefetched_objects, tier.prefetched_bytes


def wasted(rig: Rig, reason: str) -> float:
    return rig.counter(f"prefetch_wasted_objects.{reason}")


def asked(rig: Rig) -> list[bytes]:
    """Keys that the tier has been asked for, in that order."""
    return [job.name.key for job in rig.tier.jobs]


def test_what_a_waiting_request_needs_is_in_ram_when_it_acquires() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    reply = client.locate(keys, request="r")
    assert (reply.boundary_tokens, reply.tier) == (6 * CHUNK, "memory")
    assert reply.estimate_seconds > 0
    assert rig.tier.run() == 6
    assert held(rig) == (6, 6 * OBJECT)
    reply = client.locate(keys, request="r")
    assert (reply.tier, reply.estimate_seconds) == ("ram", 0.0)
    lease, answer = client.acquire(keys, request="r")
    assert answer.outcome is AcquireOutcome.GRANTED
    assert read(rig, answer) == {7}
    assert rig.counter("tier_reads.memory/ok") == 6
    assert rig.depot.counters.histograms()["tier_read_seconds.memory/"].cumulative()[-1] == 6
    assert held(rig) == (0, 0), "its lease pins them now"
    assert rig.counter("prefetch_used_objects") == rig.counter("prefetched_objects") == 6
    client.release(lease)
    audit(rig.depot)


@pytest.mark.requirement("I2")
def test_a_lookup_is_answered_before_anything_is_asked_for() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    asked_before: list[int] = []
    call = LocateCall(client.session, client.namespace, b"".join(keys), 1 << 30, "r")
    rig.depot.locate(call, lambda _: asked_before.append(len(asked(rig))))
    assert asked_before == [0], "the workers that it wakes may keep the daemon from answering for milliseconds"
    assert asked(rig)
    audit(rig.depot)


def test_ten_requests_for_one_prefix_cause_one_read_and_the_last_one_ends_the_hold() -> None:
    keys = path("p", 4)
    rig, client = cold(keys)
    other = rig.attach("other", 11)
    for number in range(5):
        client.locate(keys, request=f"r{number}")
        other.locate(keys, request=f"r{number}")
    rig.tier.run()
    assert rig.counter("tier_reads.memory/ok") == 4
    assert held(rig) == (4, 4 * OBJECT), "each counts once"
    for number in range(5):
        assert held(rig)[0] == 4
        client.end_request(f"r{number}")
        other.end_request(f"r{number}")
    assert held(rig) == (0, 0)
    assert wasted(rig, "ended") == 4


def test_requests_are_served_in_the_order_of_their_coming_and_a_renewal_keeps_its_place() -> None:
    prompts = [path(number, 3) for number in range(3)]
    rig, client = cold(*prompts)
    other = rig.attach("other", 11)
    other.locate(prompts[1], request="first")
    client.locate(prompts[0], request="second")
    client.locate(prompts[2], request="third")
    other.locate(prompts[1], request="first")
    order: list[bytes] = []
    while rig.tier.jobs:
        order.append(rig.tier.jobs[0].name.key)
        rig.tier.finish(rig.tier.jobs[0])
    assert order == prompts[1] + prompts[0] + prompts[2]


def test_no_more_is_begun_ahead_than_a_tier_has_hands() -> None:
    keys = path("p", 12)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    assert len(rig.tier.jobs) == 4
    rig.tier.finish(rig.tier.jobs[0])
    assert len(rig.tier.jobs) == 4


def test_loads_go_before_prefetches() -> None:
    wanted, loaded = path("wanted", 6), path("loaded", 6)
    rig, client = cold(wanted, loaded)
    answers = client.acquire_later(loaded, ATTENTION * 6, 1)
    client.locate(wanted, request="r")
    assert asked(rig) == loaded
    for _ in range(5):
        rig.tier.finish(rig.tier.jobs[0])
        assert set(asked(rig)) <= set(loaded)
    rig.tier.finish(rig.tier.jobs[0])
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert asked(rig) == wanted[:4]


def test_an_acquire_joins_what_is_being_read_ahead_and_the_rest_is_not_read_ahead_any_more() -> None:
    keys = path("p", 8)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    assert asked(rig) == keys[:4]
    answers = client.acquire_later(keys, ATTENTION * 8, 1, "r")
    assert sorted(asked(rig)) == sorted(keys), "each once"
    assert held(rig) == (0, 0)
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert read(rig, answers[0]) == {7}
    assert rig.counter("prefetch_used_objects") == 4


def test_the_end_of_a_request_never_cancels_what_another_ones_acquire_waits_for() -> None:
    keys = path("p", 4)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.begin(rig.tier.jobs[0])
    answers = client.acquire_later(keys, ATTENTION * 4, 1, "another")
    client.end_request("r")
    assert held(rig) == (0, 0)
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    assert rig.counter("tier_reads.memory/ok") == 4


def test_a_request_that_ends_is_not_read_for_any_more_and_what_a_worker_has_begun_is_kept_as_content() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    begun = rig.tier.jobs[0]
    rig.tier.begin(begun)
    client.end_request("r")
    assert held(rig) == (0, 0)
    assert wasted(rig, "ended") == 4
    rig.tier.run()
    assert rig.counter("tier_reads.memory/ok") == 1
    assert in_ram(rig) == 1
    rig.depot.tick()
    audit(rig.depot)
    assert rig.depot._ram.evictor.victim() is not None, "it may be evicted now"


def test_a_locate_that_comes_after_the_end_of_its_request_reads_nothing() -> None:
    keys = path("p", 3)
    rig, client = cold(keys)
    client.end_request("r")
    assert client.locate(keys, request="r").boundary_tokens == 3 * CHUNK
    assert rig.tier.jobs == []
    rig.attach("other", 11).locate(keys, request="r")
    assert len(rig.tier.jobs) == 3, "the id is another engine's"


def test_a_locate_without_a_request_and_a_share_of_nothing_read_nothing() -> None:
    keys = path("p", 3)
    rig, client = cold(keys)
    client.locate(keys)
    assert rig.tier.jobs == []
    rig, client = cold(keys, prefetch_share=0.0)
    assert client.locate(keys, request="r").boundary_tokens == 3 * CHUNK
    assert rig.tier.jobs == []


@pytest.mark.requirement("I4")
def test_what_is_held_stays_within_the_share_and_the_next_request_gets_what_the_first_one_leaves() -> None:
    first, second = path("first", 6), path("second", 6)
    rig, client = cold(first, second, data_pages=64)  # a quarter: 8 objects
    client.locate(first, request="first")
    client.locate(second, request="second")
    rig.tier.run()
    assert held(rig) == (8, 8 * OBJECT)
    assert rig.depot.status().tier.prefetching_requests == 2
    lease, _ = client.acquire(first, request="first")
    rig.tier.run()
    assert held(rig) == (6, 6 * OBJECT)
    assert client.locate(second, request="second").tier == "ram"
    client.release(lease)


def test_what_is_held_is_not_evicted_until_its_time_is_over() -> None:
    keys = path("p", 4)
    rig, client = cold(keys, data_pages=64)
    client.locate(keys, request="r")
    rig.tier.run()
    store(client, path("q", 28), 1)  # fills RAM
    rig.tier.run()
    store(client, path("s", 20), 2)
    assert client.locate(keys).tier == "ram"
    rig.now += 101
    rig.depot.tick()
    assert held(rig) == (0, 0)
    assert wasted(rig, "expired") == 4
    rig.tier.run()
    for number in range(6):  # what RAM has room for, and not the tier
        store(client, path(f"t{number}", 8), 3)
        rig.tier.run()
    assert client.locate(keys).tier == "memory"


def test_a_request_whose_turn_has_not_come_waits_beyond_the_deadline_of_those_before_it() -> None:
    first, second = path("first", 8), path("second", 4)
    rig, client = cold(first, second, data_pages=64)
    client.locate(first, request="first")
    client.locate(second, request="second")
    rig.tier.run()
    rig.now += 101
    rig.depot.tick()
    rig.tier.run()
    assert held(rig) == (4, 4 * OBJECT)
    assert client.locate(second).tier == "ram"


def test_stores_that_find_no_other_room_get_what_the_last_request_holds() -> None:
    """A hold never costs anybody else's object its place: neither a store, nor the credit kept back for states."""
    first, second = path("first", 4), path("second", 4)
    rig, client = cold(first, second, data_pages=64)
    client.locate(first, request="first")
    client.locate(second, request="second")
    rig.tier.run()
    assert held(rig) == (8, 8 * OBJECT)
    client.reserve(path("q", 26))  # of 32 objects' room, none of it evictable
    assert held(rig) == (4, 4 * OBJECT)
    assert wasted(rig, "preempted") == 4
    assert client.locate(first).tier == "ram", "the last one gives way first"


@pytest.mark.requirement("I3")
def test_a_prefix_that_thousands_wait_for_gives_way_too() -> None:
    keys = path("p", 4)
    rig, client = cold(keys, data_pages=64)
    for number in range(2000):
        client.locate(keys, request=f"r{number}")
    rig.tier.run()
    assert held(rig) == (4, 4 * OBJECT)
    client.reserve(path("q", 31))  # of 32 objects' room
    assert held(rig) == (0, 0)


def test_an_acquire_that_finds_no_other_room_gets_what_others_hold() -> None:
    keys, loaded = path("p", 8), path("loaded", 8)
    rig, client = cold(keys, loaded, data_pages=64)
    client.locate(keys, request="r")
    rig.tier.run()
    client.reserve(path("q", 20))
    answers = client.acquire_later(loaded, ATTENTION * 8, 1)
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)
    assert wasted(rig, "preempted") == 8


@pytest.mark.requirement("T8")
def test_prefetch_stays_within_its_tenants_quota_and_gives_way_within_it() -> None:
    keys = path("p", 8)
    rig, client = cold(keys, quotas=(Quota(tier="ram", capacity_bytes=4 * OBJECT),))
    assert client.locate(keys, request="r").boundary_tokens == 4 * CHUNK
    rig.tier.run()
    assert held(rig) == (4, 4 * OBJECT)
    store(client, path("q", 1), 1)
    assert wasted(rig, "preempted") == 4


def test_what_running_requests_hold_is_not_evicted_for_a_prefetch() -> None:
    keys = path("p", 6)
    rig, client = cold(keys, data_pages=64)
    client.reserve(path("q", 29))
    client.locate(keys, request="r")
    rig.tier.run()
    assert held(rig) == (3, 3 * OBJECT)
    assert client.locate(keys).boundary_tokens == 6 * CHUNK


@pytest.mark.requirement("P6")
def test_what_cannot_be_read_ahead_is_dropped_and_the_rest_goes_on() -> None:
    keys, other = path("p", 4), path("q", 4)
    rig, client = cold(keys, other)
    client.locate(keys, request="r")
    client.locate(other, request="s")
    rig.tier.finish(rig.tier.jobs[1], IoOutcome.CORRUPT)
    assert wasted(rig, "lost") == 3, "what lies behind it cannot be reached"
    rig.tier.run()
    assert held(rig) == (5, 5 * OBJECT)
    assert client.locate(keys, request="r").boundary_tokens == CHUNK
    assert held(rig)[0] == 5


@pytest.mark.requirement("T7")
def test_a_session_that_dies_leaves_no_hold_and_a_declaration_keeps_them() -> None:
    keys = path("p", 4)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.run()
    rig.depot.declare(DeclareCall(client.session, ()))
    assert held(rig)[0] == 4
    rig.depot.process_dead(client.attachment)
    assert held(rig) == (0, 0)
    assert wasted(rig, "session") == 4


def test_a_request_that_computes_instead_needs_nothing_ahead() -> None:
    keys = path("p", 4)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.run()
    client.reserve(path("q", 1), request="r")
    assert held(rig) == (0, 0)
    assert wasted(rig, "computed") == 4


def test_a_refused_acquire_ends_its_hold_too() -> None:
    keys, other = path("p", 4), path("q", 1)
    rig, client = cold(keys, other, loads_in_flight=1)
    client.locate(keys, request="r")
    rig.tier.run()
    client.acquire_later(other, ATTENTION, 1)
    assert client.acquire(keys, request="r")[1].outcome is AcquireOutcome.LATER
    assert held(rig) == (0, 0)
    assert wasted(rig, "acquired") == 4


def test_a_renewal_that_reaches_less_far_lets_go_of_the_rest() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.run()
    client.locate(keys[:2], request="r")
    assert held(rig) == (2, 2 * OBJECT)
    client.locate([], request="r")
    assert held(rig) == (0, 0)
    assert wasted(rig, "renewed") == 6
    assert rig.depot.status().tier.prefetching_requests == 0


def test_a_hybrid_prompt_gets_the_state_at_its_boundary_and_no_other() -> None:
    keys = path("h", 4)
    rig = Rig(data_pages=128, tier=COMMIT)
    store(rig.attach(spec=HYBRID), keys, kinds=BOTH)
    rig.tier.run()
    reboot(rig)
    client = rig.attach(spec=HYBRID)
    client.locate(keys, request="r")
    rig.tier.run()
    assert held(rig)[0] == 5
    _, answer = client.acquire([*keys, keys[-1]], [*([Kind.ATTENTION] * 4), Kind.STATE], request="r")
    assert answer.outcome is AcquireOutcome.GRANTED
    assert rig.counter("prefetch_used_objects") == 5


@pytest.mark.requirement("I4")
def test_what_is_larger_than_the_share_is_not_waited_for() -> None:
    prompt = path("p", 2)
    rig, client = cold(prompt, data_pages=7)
    for number in range(3):
        client.locate(prompt, request=f"r{number}")
    status = rig.depot.status().tier
    assert (status.prefetching_requests, status.prefetched_objects) == (0, 0)
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_requests_and_their_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "REQUESTS_MAX", 3)
    monkeypatch.setattr(prefetch_module, "KEYS_MAX", 8)
    monkeypatch.setattr(prefetch_module, "ENDED_MAX", 2)
    prompts = [path(number, 2 + number) for number in range(5)]
    rig, client = cold(*prompts)
    for number in (0, 1, 2):
        client.locate(prompts[number], request=f"r{number}")
    assert rig.depot.status().tier.prefetching_requests == 2, "2 and 3 keys, and no room for 4"
    client.locate(prompts[0], request="s")
    client.locate(prompts[0], request="t")
    assert rig.depot.status().tier.prefetching_requests == 3
    assert rig.counter("prefetch_refused_requests") == 2
    audit(rig.depot)
    for number in range(5):
        client.end_request(f"e{number}")
    assert len(rig.depot._prefetch._ended) == 2


@pytest.mark.requirement("I4", "T9")
def test_a_request_that_ends_while_prefetch_is_off_leaves_nothing_pinned() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.run()
    assert held(rig) == (6, 6 * OBJECT)
    rig.depot.configure(replace(rig.config, prefetch_share=0.0), {})
    client.end_request("r")
    assert held(rig) == (0, 0)
    assert rig.depot.status().tier.prefetching_requests == 0
    audit(rig.depot)


@pytest.mark.requirement("T9")
def test_a_shorter_time_holds_for_older_requests_too() -> None:
    keys = path("p", 6)
    rig, client = cold(keys)
    client.locate(keys, request="r")
    rig.tier.run()
    rig.depot.configure(replace(rig.config, lease_deadline_seconds=10.0), {})
    rig.now += 9.0
    rig.depot.tick()
    assert held(rig) == (6, 6 * OBJECT)
    rig.now += 1.5
    rig.depot.tick()
    assert held(rig) == (0, 0)
