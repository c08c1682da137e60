"""Ends: where RAM alone has the path to a chunk, and what follows it lies in tiers below. RAM gives them up last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.server.depot.tree.evicting import ORPHAN_SECONDS
from kvdepot.server.depot.types import EVERY, Quota, TierConfig, WritePolicy

from tests.fakes.shared_memory_tier import SharedMedium
from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, key, path
from tests.rigs.pin_audit import sweep
from tests.rigs.tier_rig import COMMIT, EVICT, SECOND_USE, in_ram, in_tier, store, verify

KEYS = path("p", 8)


def with_a_gap(
    policy: WritePolicy = WritePolicy.COMMIT, *, high: float = 0.25, low: float = 0.25, pin_share: float = 0.25,
    data_pages: int = 20, quotas: tuple[Quota, ...] = (),
) -> tuple[Rig, Client]:  # fmt: skip
    """RAM was adopted and has the whole path, eight objects of two pages; the tier has all but the third chunk."""
    rig = Rig(tier=COMMIT, data_pages=data_pages, high_watermark=high, low_watermark=low, pin_share=pin_share)
    client = rig.attach()
    store(client, KEYS)
    rig.tier.run()
    del rig.medium.stored[2]
    rig.tier_config = TierConfig(policy)
    rig.config = replace(rig.config, quotas=quotas)
    rig.crash()
    client = rig.attach()
    assert (in_ram(rig), in_tier(rig)) == (8, 7)
    return rig, client


def ticks(rig: Rig, seconds: float = 3 * ORPHAN_SECONDS) -> None:
    until = rig.now + seconds
    while rig.now < until:
        rig.now += 1
        rig.depot.tick()
        audit(rig.depot)


@pytest.mark.requirement("I4")
def test_the_watermark_is_met_where_a_tier_cannot_have_the_path() -> None:
    rig, client = with_a_gap()
    rig.tier.writable = False
    verify(rig)
    ticks(rig, ORPHAN_SECONDS - 1)
    assert (in_ram(rig), in_tier(rig)) == (3, 7), "the tier may come back"
    ticks(rig)
    assert in_ram(rig) == 2, "of ten that fit a quarter may stay"
    assert in_tier(rig) == 2, "what followed the third chunk could not be found any more"
    assert client.locate(KEYS).boundary_tokens == 2 * CHUNK
    assert rig.counter("evicted_objects.watermark") == 6 and rig.counter("dropped_objects.orphaned") == 5


@pytest.mark.parametrize("policy", WritePolicy)
def test_an_end_is_offered_first_whatever_is_written_when_and_nothing_is_lost(policy: WritePolicy) -> None:
    rig, client = with_a_gap(policy)
    if policy is WritePolicy.COMMIT:
        verify(rig)
        rig.tier.run()  # at its commit by this run
    ticks(rig, ORPHAN_SECONDS / 2)
    verify(rig)
    ticks(rig, 2)
    rig.tier.run()
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (2, 8)
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
    assert not rig.counter("dropped_objects.orphaned")


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("policy", [WritePolicy.COMMIT, WritePolicy.SECOND_USE])
@pytest.mark.parametrize("quota", [True, False])
def test_a_store_gets_room_where_ram_has_only_orphans_below_the_watermark(policy: WritePolicy, quota: bool) -> None:
    """No tick trims anything: of 3.5 objects that fit there are three, or of 10.5 ten. No store may take an orphan."""
    quotas = (Quota(EVERY, None, "ram", 7 * 4096),) if quota else ()
    rig, client = with_a_gap(policy, high=0.96, low=0.9, data_pages=21, quotas=quotas)
    rig.tier.writable = False
    verify(rig)
    client.reserve(path("held", 0 if quota else 7))
    outcomes = []
    for _ in range(3 * int(ORPHAN_SECONDS)):
        lease, reply = client.reserve(path("new", 1))
        outcomes.append(ReserveOutcome(reply.outcomes[0]))
        if outcomes[-1] is ReserveOutcome.GRANTED:
            break
        ticks(rig, 1)
    assert set(outcomes[:-1]) == {ReserveOutcome.LATER} and outcomes[-1] is ReserveOutcome.GRANTED
    assert client.commit(lease, 0) == bytes([CommitOutcome.COMMITTED])
    orphaned = rig.counter("dropped_objects.orphaned")
    ticks(rig)
    assert rig.counter("dropped_objects.orphaned") == orphaned, "no more goes than the store lacked"


@pytest.mark.requirement("I6")
def test_an_end_that_is_lent_stays_until_it_is_given_back() -> None:
    rig, client = with_a_gap()
    rig.tier.writable = False
    verify(rig)
    lease, _ = client.acquire([KEYS[2]], [Kind.ATTENTION])
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (3, 7)
    client.release(lease)
    ticks(rig, 2)
    assert (in_ram(rig), in_tier(rig)) == (2, 2)


def test_an_end_that_is_pinned_stays() -> None:
    rig, client = with_a_gap(pin_share=0.5)
    rig.tier.writable = False
    verify(rig)
    rig.depot.pins.pin(client.namespace, KEYS[2], 60.0)
    sweep(rig.depot)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (3, 7)
    rig.now += 61
    rig.depot.tick()
    sweep(rig.depot)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (2, 2)


@pytest.mark.requirement("I6")
def test_an_end_stays_while_ram_has_anything_that_follows_it() -> None:
    """A chunk behind what the tier alone has is reserved, then committed; a reader has it."""
    rig, client = with_a_gap(high=0.35, low=0.3)
    rig.tier.writable = False
    verify(rig)
    ticks(rig, 2)
    held, _ = client.acquire([KEYS[2]], [Kind.ATTENTION])
    new, reply = client.reserve([key("new")], start=8, parent=KEYS[7], request="r")
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED]
    client.release(held)
    ticks(rig)
    assert list(client.commit(new, 0)) == [CommitOutcome.COMMITTED]
    lease, read = client.acquire([key("new")], [Kind.ATTENTION])
    ticks(rig, 2)
    assert read.outcome is AcquireOutcome.GRANTED and in_tier(rig) == 7
    client.release(lease)
    client.end_request("r")
    ticks(rig)
    assert in_ram(rig) == 3, "what was behind has gone, and that is enough"


def test_making_room_gives_no_end_up() -> None:
    """What a call makes room for may follow it: here the fourth chunk, whose copy RAM has dropped."""
    rig, client = with_a_gap(high=1.0)
    rig.tier.writable = False
    verify(rig)
    store(client, path("q", 2))
    lease, reply = client.reserve(path("q", 12))
    audit(rig.depot)
    assert in_tier(rig) == 7 and in_ram(rig) >= 3, reply
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
    client.abandon(lease)


def test_what_a_shared_tier_was_asked_for_keeps_nothing_in_ram() -> None:
    """A node computed the beginning itself; another one published all of it, and its files stay and are found again."""
    medium = SharedMedium()
    other = Rig(shared=COMMIT, shared_medium=medium)
    other.shared.automatic = True
    store(other.attach(), KEYS)
    rig = Rig(shared=EVICT, shared_medium=medium, data_pages=20, high_watermark=0.25, low_watermark=0.25)
    rig.shared.automatic, rig.shared.writable = True, False
    client = rig.attach()
    store(client, KEYS[:6])
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
    ticks(rig)
    assert in_ram(rig) == 2
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK


def test_the_book_of_ends_knows_states_in_the_making_and_those_that_come_later() -> None:
    """Of hybrid models, where a state decides whether anybody could resume."""
    medium = SharedMedium()
    other = Rig(shared=COMMIT, shared_medium=medium)
    other.shared.automatic = True
    publisher = other.attach(spec=HYBRID)
    publisher.store(KEYS[:3])
    rig = Rig(shared=SECOND_USE, shared_medium=medium)
    rig.shared.automatic, rig.shared.writable = True, False
    client = rig.attach(spec=HYBRID)
    lease, _ = client.reserve(KEYS[:1], request="r")
    client.commit(lease, 0)
    client.locate(KEYS[:3])
    audit(rig.depot)
    made, _ = client.reserve(KEYS[:1], [Kind.STATE])
    audit(rig.depot)
    client.abandon(made)
    audit(rig.depot)
    state, _ = publisher.reserve(KEYS[2:3], [Kind.STATE], start=2, parent=KEYS[1])
    publisher.commit(state, 0)
    client.locate(KEYS[:3])
    audit(rig.depot)
    client.end_request("r")
    audit(rig.depot)
