"""What a Locate offers where not everything can be ready in time: estimates, and the longest boundary in a budget."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from kvdepot.core.calls import AcquireOutcome, Kind, LocateCall
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.loads.offers import ESTIMATE_SECONDS_MAX, Costs, Offer, Offers
from kvdepot.server.depot.tree.read_rate import FIRST_BYTES_PER_SECOND, FIRST_LATENCY_SECONDS, ReadRate
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.storage.base import IoOutcome, Tier, WorkerRegistry

from tests.fakes.memory_tier import Medium, MemoryTier
from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path, spec_of
from tests.rigs.half_cold import half_cold
from tests.rigs.seeds import RUN_SEED
from tests.rigs.tier_rig import ATTENTION, BOTH, COMMIT, reboot, store

OBJECT = 8192
IN_A_SECOND = LocateCall(b"", b"", b"", 1 << 30, budget_seconds=1.0)
MIB = 1 << 20


def seconds(size_bytes: int) -> float:
    """What a tier that was never read takes."""
    return FIRST_LATENCY_SECONDS + size_bytes / FIRST_BYTES_PER_SECOND


def test_before_the_first_answer_the_estimate_is_a_slow_disks_and_in_ram_it_is_nothing() -> None:
    _, client, keys = half_cold(0, 6)
    assert client.locate(keys).estimate_seconds == pytest.approx(seconds(6 * OBJECT))
    _, client, keys = half_cold(6, 6)
    assert (client.locate(keys).estimate_seconds, client.locate(keys).tier) == (0.0, "ram")


@pytest.mark.requirement("P5")
def test_the_longest_boundary_within_the_budget_is_offered_not_the_longest() -> None:
    rig, client, keys = half_cold(2, 8)
    rate = rig.depot._tree.tiers[0].reads
    reply = client.locate(keys)
    whole = reply.estimate_seconds
    assert reply.boundary_tokens == 8 * CHUNK
    each = OBJECT / rate.bytes_per_second
    for left_out in (1, 3, 5):
        reply = client.locate(keys, budget_seconds=whole - left_out * each + each / 2)
        assert reply.boundary_tokens == (8 - left_out) * CHUNK
        assert reply.estimate_seconds == pytest.approx(whole - left_out * each)
    reply = client.locate(keys, budget_seconds=1e-6)
    assert (reply.boundary_tokens, reply.tier, reply.estimate_seconds) == (2 * CHUNK, "ram", 0.0)
    assert rig.counter("shortened_offers") == 4


@pytest.mark.requirement("P5")
def test_without_anything_in_time_nothing_is_offered_for_a_reason_of_its_own() -> None:
    rig, client, keys = half_cold(0, 3)
    reply = client.locate(keys, budget_seconds=1e-6)
    assert (reply.boundary_tokens, reply.miss) == (0, "not_in_time")
    assert rig.counter("misses.not_in_time") == 1


@pytest.mark.requirement("P5")
def test_a_tier_that_hangs_is_not_waited_for() -> None:
    rig, client, keys = half_cold(2, 8)
    answers = client.acquire_later(keys, ATTENTION * 8, 2)
    rig.now += 0.1
    assert client.locate(keys, budget_seconds=20).boundary_tokens == 8 * CHUNK, "it may answer yet"
    rig.now += 3
    reply = client.locate(keys, budget_seconds=20)
    assert (reply.boundary_tokens, reply.tier) == (2 * CHUNK, "ram")
    assert client.locate(keys).estimate_seconds == ESTIMATE_SECONDS_MAX, "whoever has time hears that nobody knows"
    rig.tier.finish(rig.tier.jobs[0], IoOutcome.TIMEOUT)
    assert answers[0].outcome is AcquireOutcome.MISSING
    rig.tier.run()
    assert client.locate(keys, budget_seconds=20).boundary_tokens == 2 * CHUNK, "nothing has come of it since"
    rig.now += 6
    assert client.locate(keys, budget_seconds=20).boundary_tokens == 8 * CHUNK


@pytest.mark.requirement("I3")
def test_a_tier_that_was_too_slow_is_believed_again_once_nothing_was_read_for_a_while() -> None:
    rate, now = ReadRate(), 100.0
    expected = rate.asked(1 << 20, now)
    rate.answered(1 << 20, IoOutcome.OK, asked_at=now, expected_seconds=expected, now=now + 60)
    assert rate.seconds(1 << 20, now + 61) > 3
    assert rate.seconds(1 << 20, now + 85) > 3
    fresh = FIRST_LATENCY_SECONDS + (1 << 20) / FIRST_BYTES_PER_SECOND
    assert rate.seconds(1 << 20, now + 91) == pytest.approx(fresh)


def test_a_missed_deadline_is_held_against_a_tier_until_it_answers_or_for_some_seconds() -> None:
    rate = ReadRate()
    expected = rate.asked(MIB, 10.0)
    rate.answered(MIB, IoOutcome.TIMEOUT, asked_at=10.0, expected_seconds=expected, now=20.0)
    assert not rate.answers(24.9) and rate.seconds(1, 24.9) == float("inf")
    assert rate.answers(25.1)
    rate.asked(MIB, 26.0)
    rate.answered(MIB, IoOutcome.TIMEOUT, asked_at=26.0, expected_seconds=expected, now=36.0)
    rate.asked(MIB, 36.1)
    rate.answered(MIB, IoOutcome.OK, asked_at=36.1, expected_seconds=expected, now=36.2)
    assert rate.answers(36.3)


def test_the_rate_follows_what_is_seen_and_a_queue_counts() -> None:
    rate, now = ReadRate(), 0.0
    for _ in range(200):
        expected = rate.asked(8 * MIB, now)
        now += 0.1
        rate.answered(8 * MIB, IoOutcome.OK, asked_at=now - 0.1, expected_seconds=expected, now=now)
    assert rate.bytes_per_second == pytest.approx(80 * MIB, rel=0.05)
    assert rate.seconds(80 * MIB, now) == pytest.approx(1.0, rel=0.1)
    for _ in range(10):
        rate.asked(8 * MIB, now)
    assert rate.seconds(80 * MIB, now) == pytest.approx(2.0, rel=0.1)
    for _ in range(10):
        now += 1.0  # ten times as slow
        rate.answered(8 * MIB, IoOutcome.OK, asked_at=now - 1, expected_seconds=1.0, now=now)
    assert rate.bytes_per_second < 20 * MIB


def test_an_idle_tier_does_not_become_slow() -> None:
    rate = ReadRate()
    before = rate.bytes_per_second
    expected = rate.asked(MIB, 1000.0)
    rate.answered(MIB, IoOutcome.OK, asked_at=1000.0, expected_seconds=expected, now=1000.001)
    assert rate.bytes_per_second >= before


def test_latency_is_what_an_answer_takes_beyond_its_transfer() -> None:
    rate, now = ReadRate(), 0.0
    for _ in range(200):
        expected = rate.asked(4096, now)
        rate.answered(4096, IoOutcome.OK, asked_at=now, expected_seconds=expected, now=now + 0.5)
        now += 20.0
    assert 0.1 < rate.seconds(4096, now) < 1.2


def test_with_ram_full_of_what_others_hold_only_what_is_there_is_offered() -> None:
    rig, client, keys = half_cold(2, 8, data_pages=32)
    rig.attach("other", 11).reserve(path("q", 12))
    reply = client.locate(keys, budget_seconds=20)
    assert reply.boundary_tokens == 4 * CHUNK, "2 in RAM, and room for 2"
    rig.attach("third", 12).reserve(path("s", 2))
    reply = client.locate(keys, budget_seconds=20)
    assert (reply.boundary_tokens, reply.tier) == (2 * CHUNK, "ram")


def test_what_prefetch_has_brought_meanwhile_raises_the_offer() -> None:
    rig, client, keys = half_cold(2, 8, prefetch_share=0.25)
    offers = []
    while True:
        reply = client.locate(keys, request="r", budget_seconds=1e-6)
        offers.append(reply.boundary_tokens // CHUNK)
        if not rig.tier.jobs:
            break
        rig.tier.finish(rig.tier.jobs[0])
    assert offers == [2, 3, 4, 5, 6, 7, 8]
    assert rig.counter("tier_reads.memory/ok") == 8


def test_a_hybrid_boundary_costs_its_state_too() -> None:
    rig = Rig(data_pages=128, tier=COMMIT, prefetch_share=0.0)
    keys = path("h", 4)
    store(rig.attach(spec=HYBRID), keys, kinds=BOTH)
    rig.tier.run()
    reboot(rig)
    client = rig.attach(spec=HYBRID)
    assert client.locate(keys).estimate_seconds == pytest.approx(seconds(5 * OBJECT))
    client.acquire_later([*keys[:3], keys[2]], bytes([1, 1, 1, 3]), 1)
    rig.tier.run()
    assert client.locate(keys, budget_seconds=1e-6).boundary_tokens == 3 * CHUNK


class TwoTiers(Rig):
    """A second tier beside the first; `weights` of both."""

    weights = (1.0, 1.0)

    def start(self) -> None:
        self.other_medium = getattr(self, "other_medium", Medium())
        super().start()

    def _tiers(self, registry: WorkerRegistry) -> list[tuple[Tier, TierConfig]]:
        first = super()._tiers(registry)
        self.worker_pids += 1
        self.other = MemoryTier(self.buffer, registry, medium=self.other_medium, name="other", pid=self.worker_pids)
        weighted = [replace(COMMIT, load_weight=weight) for weight in self.weights]
        return [(first[0][0], weighted[0]), (self.other, weighted[1])]

    def run_both(self) -> None:
        while self.tier.run() + self.other.run():
            pass


def in_both(
    monkeypatch: pytest.MonkeyPatch, weights: tuple[float, float], **options: object
) -> tuple[TwoTiers, Client]:
    monkeypatch.setattr(TwoTiers, "weights", weights)
    rig = TwoTiers(**({"data_pages": 128, "tier": COMMIT} | options))  # type: ignore[arg-type]
    client = rig.attach()
    for name in "pq":
        store(client, path(name, 4))
        rig.run_both()
    reboot(rig)
    return rig, rig.attach()


@pytest.mark.requirement("P9")
def test_the_heaviest_tier_is_read_and_another_one_while_it_keeps_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, client = in_both(monkeypatch, (1.0, 2.0))
    assert client.locate(path("p", 4), request="r").tier == "other"
    assert (len(rig.tier.jobs), len(rig.other.jobs)) == (0, 4)
    rig.now += 5
    reply = client.locate(path("q", 4), request="s", budget_seconds=10)
    assert (reply.boundary_tokens, reply.tier) == (4 * CHUNK, "memory")
    assert len(rig.tier.jobs) == 4, "a source that is not ready does not block the other one"
    rig.tier.run()
    assert client.locate(path("q", 4)).tier == "ram"
    audit(rig.depot)


@pytest.mark.requirement("P9")
def test_a_request_behind_one_that_waits_for_a_silent_tier_is_served_by_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, client = in_both(monkeypatch, (1.0, 2.0))
    tree = rig.depot._tree
    rig.tier.lose(
        *[handle for handle in list(rig.tier.medium.stored) if rig.tier.medium.names[handle].key in path("p", 4)]
    )
    rig.other.lose(*[h for h in list(rig.other.medium.stored) if rig.other.medium.names[h].key in path("q", 4)])
    assert (tree.tiers[0].objects, tree.tiers[1].objects) == (4, 4)
    client.locate(path("p", 4), request="r")
    client.locate(path("q", 4), request="s")
    rig.tier.run()
    assert client.locate(path("q", 4)).tier == "ram"
    assert client.locate(path("p", 4)).tier == "other"


def costs_of(ready: list[float]) -> Costs:
    return Costs(np.array(ready), np.zeros(len(ready)), ())


@pytest.mark.requirement("I7")
def test_the_choice_equals_brute_force_over_random_presence_and_readiness() -> None:
    """Whatever is there and whatever is ready: legal, in time, and nothing longer is both."""
    window = spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
        GroupSpec(Kind.WINDOW, 16, rank_block_bytes=(4096,), window_tokens=70),
        GroupSpec(Kind.STATE, 32, rank_block_bytes=(4096,)),
    )
    rig = Rig(tier=COMMIT)
    offers = Offers(rig.depot._tree.index, rig.depot._ram, rig.depot._clock, rig.depot._tiering.promotions)
    random = Random(f"{RUN_SEED} offers")
    for spec in (window, HYBRID, spec_of(*window.groups[:2]), spec_of(*window.groups[:1])):
        planner = spec.planner()
        for _ in range(300):
            chunks = random.randint(1, 9)
            presence = {kind: bytes(random.random() < 0.8 for _ in range(chunks)) for kind in planner.kinds}
            in_ram = {kind: bytes(f and random.random() < 0.5 for f in flags) for kind, flags in presence.items()}
            ready = [random.random() < 0.5 for _ in range(chunks)]
            for at in range(chunks):
                legal = all(in_ram[kind][chunk] for chunk, kind in planner.objects((at + 1) * CHUNK))
                ready[at] = ready[at] or legal
            costs = costs_of([0.0 if one else 2.0 for one in ready])
            longest = planner.longest_boundary(presence, 0, chunks * CHUNK)
            offer = offers.choose(planner, presence, longest, costs, IN_A_SECOND) if longest else Offer(0)
            wanted = [
                (at + 1) * CHUNK
                for at in range(chunks)
                if ready[at] and all(presence[kind][chunk] for chunk, kind in planner.objects((at + 1) * CHUNK))
            ]
            assert offer.boundary_tokens == max(wanted, default=0)


def test_costs_of_each_boundary_are_those_of_what_it_needs() -> None:
    spec = spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
        GroupSpec(Kind.WINDOW, 16, rank_block_bytes=(4096,), window_tokens=70),
        GroupSpec(Kind.STATE, 32, rank_block_bytes=(5000,)),
    )
    rig = Rig(data_pages=512, rows=256, lent_rows=256, tier=TierConfig(WritePolicy.COMMIT), prefetch_share=0.0)
    kinds = tuple(spec.planner().kinds)
    keys = path("w", 7)
    store(rig.attach(spec=spec), keys, kinds=kinds)
    rig.tier.run()
    reboot(rig)
    client = rig.attach(spec=spec)
    rounded = rig.depot._ram.rounded
    for boundary in range(1, 8):
        needed = spec.planner().objects(boundary * CHUNK)
        size_bytes = sum(rounded(spec.object_bytes[kind]) for _, kind in needed)
        reply = client.locate(keys[:boundary])
        assert reply.boundary_tokens == boundary * CHUNK
        assert reply.estimate_seconds == pytest.approx(seconds(size_bytes))
