"""Whether a load is worth its time: what the tiers take against what the engine takes (design.md#offers)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from kvdepot.core.calls import Kind, LocateCall
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.loads.offers import WORTH_SHARE, Costs, Offers
from kvdepot.server.depot.tiering import rejected_loads as rejected_module
from kvdepot.server.depot.tree.read_rate import (
    FIRST_BYTES_PER_SECOND,
    FIRST_LATENCY_SECONDS,
    MEASURED_READS,
    UNMEASURED_BYTES_PER_SECOND,
    ReadRate,
)
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path, spec_of
from tests.rigs.half_cold import half_cold
from tests.rigs.seeds import RUN_SEED
from tests.rigs.tier_rig import ATTENTION, COMMIT, reboot, store

OBJECT = 8192
MB = 1e6
SLOW = 20 * MB  # bytes a second, as in llm-d-router#2833


def token_seconds(bytes_per_second: float) -> float:
    """Of an engine that computes so many bytes of KV a second."""
    return OBJECT / CHUNK / bytes_per_second


def feed(rate: ReadRate, bytes_per_second: float, now: float) -> float:
    """Answers of a tier of this speed, without a latency. Returns the time after them."""
    for _ in range(200):
        size_bytes = int(bytes_per_second / 10)
        expected = rate.asked(size_bytes, now)
        now += 0.1
        rate.answered(size_bytes, IoOutcome.OK, asked_at=now - 0.1, expected_seconds=expected, now=now)
    return now


def cold(
    chunks: int = 100, in_ram: int = 0, *, measured: float = SLOW, weight: float = 1.0, prefetch_share: float = 0.25
) -> tuple[Rig, Client, list[bytes]]:
    """A prompt that a tier has, and RAM the beginning of. `measured`: the tier's speed; 0: nobody has read it."""
    rig, client, keys = half_cold(
        in_ram, chunks, data_pages=1024, rows=512, lent_rows=512, tier=replace(COMMIT, load_weight=weight),
        tier_bytes=1 << 24, prefetch_share=prefetch_share,
    )  # fmt: skip
    rate = rig.depot._tree.tiers[0].reads
    rate.__init__()  # type: ignore[misc]
    if measured:
        rig.now = feed(rate, measured, rig.now)
    return rig, client, keys


COMPUTES = 30 * MB
"""Bytes of KV a second, of an engine that does not wait for a tier of `SLOW`."""


def declined(rig: Rig, client: Client, keys: list[bytes], request: str = "r", **call: int) -> float:
    """A lookup that is not worth its time; the seconds in which the prompt is computed."""
    reply = client.locate(keys, request=request, token_seconds=token_seconds(COMPUTES), **call)
    assert reply.miss == "not_worth_it" and reply.boundary_tokens < len(keys) * CHUNK
    audit(rig.depot)
    return len(keys) * CHUNK * token_seconds(COMPUTES)


def pass_by(rig: Rig, seconds: float) -> None:
    rig.now += seconds
    rig.depot.tick()
    audit(rig.depot)


@pytest.mark.requirement("I2", "B4")
def test_what_is_computed_faster_than_read_is_a_miss_and_is_read_once_it_has_been_computed() -> None:
    rig, client, keys = cold()
    computed = declined(rig, client, keys)
    assert rig.counter("misses.not_worth_it") == 1
    client.end_request("r")
    pass_by(rig, computed)
    assert not rig.tier.jobs, "it computes, and does not share its cores with what reads"
    pass_by(rig, 1.1 * computed)
    for _ in keys:
        assert len(rig.tier.jobs) == 1, "a load that comes waits behind no more"
        audit(rig.depot)
        rig.tier.finish(rig.tier.jobs[0])
    pass_by(rig, 0.0)
    tier = rig.depot.status().tier
    assert not rig.tier.jobs and tier.prefetching_requests == tier.prefetched_objects == 0, "nobody waits for it"
    assert rig.counter("prefetch_wasted_objects.rejected") == len(keys)
    assert client.locate(keys, request="s", token_seconds=token_seconds(COMPUTES)).boundary_tokens == 100 * CHUNK


def test_what_is_declined_is_read_while_its_request_waits_for_longer_than_it_computes() -> None:
    rig, client, keys = cold()
    computed = declined(rig, client, keys)
    pass_by(rig, 3 * computed)
    assert rig.tier.run() == 100
    reply = client.locate(keys, request="r", local_tokens=CHUNK, token_seconds=token_seconds(COMPUTES))
    assert (reply.boundary_tokens, reply.tier) == (100 * CHUNK, "ram")


def test_what_is_offered_is_read_ahead_at_once_and_what_is_declined_behind_it_later() -> None:
    """A fast disk has the beginning of what a slow directory has, as disks keep beginnings longest."""
    rig = Rig(data_pages=1024, rows=512, lent_rows=512, tier=COMMIT, tier_bytes=1 << 24, shared=COMMIT)
    client, keys = rig.attach(), path("p", 100)
    store(client, keys)
    rig.tier.run()
    rig.shared.run()
    tree, ram = rig.depot._tree, rig.depot._ram
    disk, directory = tree.tiers
    while ram.evictor.evict_one("room"):
        pass
    rig.tier.lose(*(disk.handle(tree.index.find(0, key), Kind.ATTENTION) for key in keys[40:]))
    for tier, speed in ((disk, 1000 * MB), (directory, SLOW)):
        rig.now = feed(tier.reads, speed, rig.now)
    reply = client.locate(keys, request="r", token_seconds=token_seconds(COMPUTES))
    assert (reply.boundary_tokens, reply.tier, reply.miss) == (40 * CHUNK, disk.tier.name, "not_worth_it")
    assert rig.tier.run() == 40 and not rig.shared.jobs
    pass_by(rig, 3 * len(keys) * CHUNK * token_seconds(COMPUTES))
    assert rig.shared.run() == 60 and not rig.tier.jobs
    audit(rig.depot)


def test_what_requests_wait_for_and_loads_go_before_what_was_declined() -> None:
    rig, client, keys = cold()
    pass_by(rig, 3 * declined(rig, client, keys))
    assert len(rig.tier.jobs) == 1
    assert client.locate(keys[:50], request="w").boundary_tokens == 50 * CHUNK
    lease = client.lease()
    answers = client.acquire_later(keys[:60], ATTENTION * 60, lease, "w")
    while not answers:
        assert all(job.name.key in keys[:60] for job in rig.tier.jobs[1:])
        rig.tier.finish(rig.tier.jobs[0])
        audit(rig.depot)
    client.release(lease)
    assert rig.tier.run() == 40
    audit(rig.depot)


def test_a_prompt_that_many_decline_is_read_once_and_no_more_prompts_wait_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejected_module, "PROMPTS_MAX", 3)
    rig, client, keys = cold()
    for number in range(5):
        declined(rig, client, keys, request=f"r{number}")
    assert rig.depot.status().tier.prefetching_requests == 1
    for number in range(5):
        declined(rig, client, keys[: 90 + number])
    assert rig.depot.status().tier.prefetching_requests == 3
    pass_by(rig, 10.0)
    assert rig.tier.run() == 100
    pass_by(rig, 1000.0)
    assert rig.depot.status().tier.prefetching_requests == 0


@pytest.mark.requirement("T7")
@pytest.mark.parametrize("dies", [False, True])
def test_what_was_declined_is_forgotten_when_it_is_not_read_in_time_or_its_engine_dies(dies: bool) -> None:
    rig, client, keys = cold()
    computed = declined(rig, client, keys)
    if dies:
        rig.depot.process_dead(client.attachment)
    pass_by(rig, 3 * computed if dies else 1000.0)
    assert not rig.tier.jobs and rig.depot.status().tier.prefetching_requests == 0


@pytest.mark.requirement("I1e")
@pytest.mark.parametrize("begun", [False, True])
def test_nothing_that_was_declined_is_read_where_an_operator_lets_nothing_be_loaded(begun: bool) -> None:
    rig, client, keys = cold()
    computed = declined(rig, client, keys)
    if begun:
        pass_by(rig, 3 * computed)
    rig.depot.drain(draining=True)
    audit(rig.depot)
    tier = rig.depot.status().tier
    assert tier.prefetching_requests == tier.prefetched_objects == 0
    rig.tier.run()
    pass_by(rig, 3 * computed)
    assert not rig.tier.jobs


@pytest.mark.requirement("I4")
def test_nothing_that_was_declined_is_read_later_where_nothing_is_read_ahead() -> None:
    rig, client, keys = cold(prefetch_share=0.0)
    computed = declined(rig, client, keys)
    assert rig.depot.status().tier.prefetching_requests == 0
    pass_by(rig, 3 * computed)
    assert not rig.tier.jobs


def test_what_the_engine_has_itself_is_not_read_later() -> None:
    rig, client, keys = cold()
    declined(rig, client, keys, local_tokens=len(keys) * CHUNK)
    assert rig.depot.status().tier.prefetching_requests == 0


@pytest.mark.requirement("I4")
def test_of_what_was_declined_no_more_is_read_than_prefetch_may_hold() -> None:
    rig, client, keys = cold(prefetch_share=0.05)
    limit = int(0.05 * rig.depot._ram.rooms.ready_bytes) // OBJECT
    pass_by(rig, 3 * declined(rig, client, keys))
    assert 0 < rig.tier.run() == limit < 100
    pass_by(rig, 1.0)
    assert not rig.tier.jobs and rig.depot.status().tier.prefetching_requests == 0


@pytest.mark.requirement("P6")
def test_what_was_declined_and_cannot_be_read_ends_its_hold_and_the_rest_is_read() -> None:
    rig, client, keys = cold()
    pass_by(rig, 3 * declined(rig, client, keys))
    rig.tier.finish(rig.tier.jobs[0], IoOutcome.IO_ERROR)
    audit(rig.depot)
    assert rig.tier.run() == 99
    audit(rig.depot)


def test_an_engine_that_computes_slower_is_offered_all_of_it() -> None:
    _, client, keys = cold()
    reply = client.locate(keys, token_seconds=token_seconds(10 * MB))
    assert (reply.boundary_tokens, reply.tier, reply.miss) == (100 * CHUNK, "memory", "")


def test_an_engine_that_is_not_measured_is_offered_everything() -> None:
    _, client, keys = cold()
    assert client.locate(keys).boundary_tokens == 100 * CHUNK


def test_a_shorter_boundary_in_ram_beats_a_deep_one_on_a_slow_disk() -> None:
    rig, client, keys = cold(in_ram=60)
    reply = client.locate(keys, token_seconds=token_seconds(30 * MB))
    assert (reply.boundary_tokens, reply.tier, reply.miss) == (60 * CHUNK, "ram", "not_worth_it")
    assert rig.counter("shortened_offers") == 1
    reply = client.locate(keys, token_seconds=token_seconds(10 * MB))
    assert reply.boundary_tokens == 100 * CHUNK, "and not where the disk is the faster one"


@pytest.mark.requirement("P9")
@pytest.mark.parametrize(("weight", "chunks"), [(0.4, 0), (1.0, 0), (2.0, 100)])
def test_load_weight_of_a_tier_is_the_operators_thumb_on_the_scale(weight: float, chunks: int) -> None:
    _, client, keys = cold(weight=weight)
    assert client.locate(keys, token_seconds=token_seconds(20 * MB)).boundary_tokens == chunks * CHUNK


@pytest.mark.requirement("P9")
def test_of_a_tier_that_weighs_nothing_nothing_is_offered_to_an_engine_that_can_compute() -> None:
    _, client, keys = cold(weight=0.0)
    assert client.locate(keys, token_seconds=1.0).boundary_tokens == 0
    assert client.locate(keys).boundary_tokens == 100 * CHUNK


def test_what_the_engine_has_itself_costs_nothing_and_saves_nothing() -> None:
    rig, client, keys = cold()
    whole = client.locate(keys, token_seconds=token_seconds(10 * MB)).estimate_seconds
    reply = client.locate(keys, local_tokens=75 * CHUNK, token_seconds=token_seconds(10 * MB))
    assert reply.boundary_tokens == 100 * CHUNK
    each = OBJECT / rig.depot._tree.tiers[0].reads.bytes_per_second
    assert reply.estimate_seconds == pytest.approx(whole - 75 * each)
    # 20 ms of a tier's latency are worth it for a hundred chunks, and not for the last one.
    rate = rig.depot._tree.tiers[0].reads
    rate._latency_seconds = 0.02
    assert client.locate(keys, token_seconds=token_seconds(10 * MB)).boundary_tokens == 100 * CHUNK
    reply = client.locate(keys, local_tokens=99 * CHUNK, token_seconds=token_seconds(10 * MB))
    assert (reply.boundary_tokens, reply.miss) == (0, "not_worth_it")


def test_a_hybrid_boundary_is_weighed_with_its_state() -> None:
    rig = Rig(data_pages=512, tier=COMMIT, prefetch_share=0.0)
    keys = path("h", 4)
    store(rig.attach(spec=HYBRID), keys, kinds=(Kind.ATTENTION, Kind.STATE))
    rig.tier.run()
    reboot(rig)
    client, rate = rig.attach(spec=HYBRID), rig.depot._tree.tiers[0].reads
    rig.now = feed(rate, SLOW, rig.now)
    rate._latency_seconds = 0.0
    each = token_seconds(SLOW * WORTH_SHARE * 4 / 5)  # four chunks' tokens pay for five objects
    assert client.locate(keys, local_tokens=0, token_seconds=each * 1.01).boundary_tokens == 4 * CHUNK
    assert client.locate(keys, local_tokens=0, token_seconds=each * 0.99).boundary_tokens == 0


def test_a_tier_that_was_never_read_is_taken_for_slow_until_prefetch_has_measured_it() -> None:
    rig, client, keys = cold(200, measured=0)
    fast = token_seconds(UNMEASURED_BYTES_PER_SECOND * 5)
    assert client.locate(keys, request="r", token_seconds=fast).boundary_tokens == 0
    assert client.locate(keys, request="r", token_seconds=token_seconds(MB)).boundary_tokens == 200 * CHUNK
    for _ in range(MEASURED_READS):
        rig.now += OBJECT / (200 * MB)
        rig.tier.finish(rig.tier.jobs[0])
    rig.depot._tree.tiers[0].reads._latency_seconds = 0.0
    assert client.locate(keys, request="s", token_seconds=fast).boundary_tokens == 200 * CHUNK


def test_where_nobody_reads_ahead_a_tier_that_was_never_read_is_tried() -> None:
    _, client, keys = cold(measured=0, prefetch_share=0.0)
    assert client.locate(keys, request="r", token_seconds=token_seconds(1000 * MB)).boundary_tokens == 100 * CHUNK
    _, client, keys = cold(measured=0)
    assert client.locate(keys, token_seconds=token_seconds(1000 * MB)).boundary_tokens == 100 * CHUNK, "no request"


def test_a_slow_tier_is_not_taken_for_a_faster_one_because_nobody_has_read_it_for_a_while() -> None:
    rig, client, keys = cold()
    rig.now += 1000
    assert client.locate(keys, request="r", token_seconds=token_seconds(30 * MB)).boundary_tokens == 0
    rig, client, keys = cold(measured=1000 * MB)
    rig.now += 1000
    estimate = client.locate(keys, request="r", token_seconds=token_seconds(30 * MB))
    assert estimate.boundary_tokens == 100 * CHUNK, "nor a fast one for a slow one"


def test_the_first_figures_end_with_the_first_answers() -> None:
    rate, now = ReadRate(), 10.0
    for size in range(1, MEASURED_READS + 1):
        assert not rate.measured
        expected = rate.asked(1 << 20, now)
        now += (1 << 20) / SLOW
        rate.answered(1 << 20, IoOutcome.OK, asked_at=now - 0.05, expected_seconds=expected, now=now)
        assert rate.measured_bytes_per_second == pytest.approx(size * (1 << 20) / (now - 10.0), rel=0.01)
    assert rate.measured
    assert rate.bytes_per_second > FIRST_BYTES_PER_SECOND / 2, "a promise is not given up for a few slow answers"


def test_an_answer_that_may_never_come_is_worth_no_wait() -> None:
    rate = ReadRate()
    rate.asked(1 << 20, 10.0)
    sizes = np.array([1.0])
    assert np.isinf(rate.weighed_seconds(sizes, 100.0, explored=True)).all()
    assert np.isinf(rate.weighed_seconds(sizes, 100.0, explored=False)).all()
    assert ReadRate().weighed_seconds(sizes, 1.0, explored=True)[0] >= FIRST_LATENCY_SECONDS


def test_the_choice_saves_the_most_and_equals_brute_force() -> None:
    """Over random presence, costs and speeds; and no offer takes longer than its share of computing."""
    window = spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
        GroupSpec(Kind.WINDOW, 16, rank_block_bytes=(4096,), window_tokens=70),
        GroupSpec(Kind.STATE, 32, rank_block_bytes=(4096,)),
    )
    rig, random = Rig(tier=COMMIT), Random(f"{RUN_SEED} offers by worth")
    offers = Offers(rig.depot._tree.index, rig.depot._ram, rig.depot._clock, rig.depot._tiering.promotions)
    chosen = 0
    for spec in (window, HYBRID, spec_of(*window.groups[:1])):
        planner = spec.planner()
        for _ in range(300):
            chunks = random.randint(1, 9)
            presence = {kind: bytes(random.random() < 0.8 for _ in range(chunks)) for kind in planner.kinds}
            longest = planner.longest_boundary(presence, 0, chunks * CHUNK)
            if not longest:
                continue
            seconds = [random.choice((0.0, random.random())) for _ in range(chunks)]
            weighed = [one * random.choice((0.5, 1.0, 2.0)) for one in seconds]
            each, local = random.random() / CHUNK, random.choice((0, 0, CHUNK, 3 * CHUNK))
            call = LocateCall(b"", b"", b"", 1 << 30, budget_seconds=0.9, local_tokens=local, token_seconds=each)
            offer = offers.choose(planner, presence, longest, Costs(np.array(seconds), np.array(weighed), ()), call)
            saved = {}
            for at in range(longest // CHUNK):
                gain = ((at + 1) * CHUNK - local) * each
                legal = all(presence[kind][chunk] for chunk, kind in planner.objects((at + 1) * CHUNK))
                if gain > 0 and legal and seconds[at] <= 0.9 and (not weighed[at] or weighed[at] <= WORTH_SHARE * gain):
                    saved[(at + 1) * CHUNK] = gain - weighed[at]
            assert saved.get(offer.boundary_tokens, 0.0) == pytest.approx(max(saved.values(), default=0.0))
            assert bool(saved) == bool(offer.boundary_tokens)
            assert (offer.boundary_tokens == longest) == (offer.miss is None)
            chosen += offer.boundary_tokens > 0
    assert chosen > 300


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("computed", [4, 15, 19, 21, 26, 40, 400])
def test_with_a_tier_slowed_to_20_mb_a_second_no_request_is_slower_than_computing_by_a_tenth(computed: int) -> None:
    """Requests one after the other, each of a prompt that only the tier has, from the first read of the tier on.

    `computed`: MB of KV a second. Where reading is much faster than computing, it is what happens.
    """
    random = Random(computed)
    rig = Rig(data_pages=4096, rows=4096, lent_rows=4096, tier=COMMIT, tier_bytes=1 << 26, tier_handles=4096)
    prompts = [path(name, random.randint(8, 80)) for name in range(40)]
    for keys in prompts:
        store(rig.attach(), keys)
        rig.tier.run()
    reboot(rig)
    client, each, loaded, whole = rig.attach(), token_seconds(computed * MB), 0.0, 0.0
    for number, keys in enumerate(prompts):
        started, request = rig.now, f"r{number}"
        reply = client.locate(keys, request=request, budget_seconds=22.5, token_seconds=each)
        chunks = reply.boundary_tokens // CHUNK
        if chunks:
            lease = client.lease()
            answers = client.acquire_later(keys[:chunks], ATTENTION * chunks, lease, request)
            while not answers:
                rig.now += OBJECT / SLOW
                rig.tier.finish(rig.tier.jobs[0])
            client.release(lease)
        computes_until = rig.now + (len(keys) - chunks) * CHUNK * each
        while rig.tier.jobs and rig.now + OBJECT / SLOW < computes_until:  # read ahead
            rig.now += OBJECT / SLOW
            rig.tier.finish(rig.tier.jobs[0])
        rig.now = computes_until
        client.end_request(request)
        took, computing = rig.now - started, len(keys) * CHUNK * each
        assert took <= 1.1 * computing, (number, len(keys), chunks)
        loaded += chunks * CHUNK * each
        whole += computing
    assert (loaded > 0.8 * whole) == (computed == 4)
