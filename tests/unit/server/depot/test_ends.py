"""Ends: where RAM alone has the path to a chunk, and what follows it lies in tiers below. RAM gives them up last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.loads import acquires
from kvdepot.server.depot.tree.evicting import ORPHAN_SECONDS
from kvdepot.server.depot.types import EVERY, Quota, TierConfig, WritePolicy

from tests.fakes.shared_memory_tier import SharedMedium
from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, key, path, spec_of
from tests.rigs.pin_audit import sweep
from tests.rigs.tier_rig import COMMIT, EVICT, SECOND_USE, in_ram, in_tier, store, verify

KEYS = path("p", 8)


def with_a_gap(
    policy: WritePolicy = WritePolicy.COMMIT, *, high: float = 0.25, low: float = 0.25, pin_share: float = 0.25,
    data_pages: int = 20, quotas: tuple[Quota, ...] = (), before: list[bytes] | None = None,
) -> tuple[Rig, Client]:  # fmt: skip
    """RAM was adopted and has the whole path, eight objects of two pages; the tier has all but the third chunk.

    It also has the chunks that were stored `before`, if any.
    """
    rig = Rig(tier=COMMIT, data_pages=data_pages, high_watermark=high, low_watermark=low, pin_share=pin_share)
    client = rig.attach()
    if before:
        store(client, before)
        rig.tier.run()
    store(client, KEYS)
    rig.tier.run()
    del rig.medium.stored[len(before or ()) + 2]
    rig.tier_config = TierConfig(policy)
    rig.config = replace(rig.config, quotas=quotas)
    rig.crash()
    client = rig.attach()
    assert before or (in_ram(rig), in_tier(rig)) == (8, 7)
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


def short_of_room() -> tuple[Rig, Client, int]:
    """A store lacks room: seven objects are reserved, RAM alone has the path to what lies on the tier."""
    rig, client = with_a_gap(high=0.96, low=0.9, data_pages=21)
    rig.tier.writable = False
    verify(rig)
    held, _ = client.reserve(path("held", 7))
    assert list(client.reserve(path("new", 1))[1].outcomes) == [ReserveOutcome.LATER]
    return rig, client, held


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("commits", [True, False])
def test_no_end_goes_where_the_next_try_finds_room_without(commits: bool) -> None:
    """What was reserved is committed and may go, or it is free again."""
    rig, client, held = short_of_room()
    if commits:
        client.commit(held, *range(7))
    else:
        client.abandon(held, *range(7))
    ticks(rig)
    assert in_tier(rig) == 7 and not rig.counter("dropped_objects.orphaned")
    assert list(client.reserve(path("new", 1))[1].outcomes) == [ReserveOutcome.GRANTED]


@pytest.mark.requirement("I4")
def test_no_end_goes_once_the_store_got_its_room() -> None:
    """It is full again at the next tick, of what nobody may evict. But nobody lacks anything."""
    rig, client, held = short_of_room()
    client.abandon(held, *range(7))
    assert set(client.reserve(path("other", 7))[1].outcomes) == {ReserveOutcome.GRANTED}
    ticks(rig)
    assert in_tier(rig) == 7 and not rig.counter("dropped_objects.orphaned")


LARGE = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4 * 4096,)), name="large")  # eight pages an object


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("quota", [True, False])
def test_no_end_goes_for_an_object_that_would_not_fit_without_all_of_them(quota: bool) -> None:
    """All but seven pages are reserved, of RAM or of what the tenant may have."""
    quotas = (Quota(EVERY, None, "ram", 21 * 4096),) if quota else ()
    rig, client = with_a_gap(high=0.96, low=0.9, data_pages=30 if quota else 21, quotas=quotas)
    rig.tier.writable = False
    verify(rig)
    client.reserve(path("held", 7))
    large = rig.attach("large", 11, LARGE)
    for _ in range(3 * int(ORPHAN_SECONDS)):
        assert list(large.reserve(path("large", 1))[1].outcomes) != [ReserveOutcome.GRANTED]
        ticks(rig, 1)
    assert in_tier(rig) == 7 and not rig.counter("dropped_objects.orphaned")


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("own", [True, False])
def test_what_a_tenant_lacks_costs_only_ends_of_its_own(own: bool) -> None:
    rig, client = with_a_gap(high=0.96, low=0.9, data_pages=21)
    rig.tier.writable = False
    verify(rig)
    client.reserve(path("held", 7))
    lacking = client if own else rig.attach("other", 11, spec_of(*DENSE.groups, name="b", tenant="b"))
    for _ in range(3 * int(ORPHAN_SECONDS)):
        lacking.reserve(path("new", 1))
        ticks(rig, 1)
    assert bool(rig.counter("dropped_objects.orphaned")) is own


@pytest.mark.requirement("I4")
def test_a_load_lacks_only_what_has_no_room_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the five that RAM does not have, one is being read for another load too, and stays."""
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    below = path("below", 5)
    rig, client = with_a_gap(high=0.96, low=0.9, data_pages=21, before=below)
    rig.tier.writable = False
    verify(rig)
    held, _ = client.reserve(path("held", 7))
    client.abandon(held, 0, 1)
    rig.places_at_once = False
    replies = client.acquire_later(below, bytes([Kind.ATTENTION]) * 5, 99)
    client.acquire_later(below[:1], bytes([Kind.ATTENTION]), 100)
    while rig.depot.place_some():
        pass
    assert [reply.outcome for reply in replies] == [AcquireOutcome.LATER]
    assert rig.depot._ram._shortages[0, ""].size_bytes == 4 * 8192
    audit(rig.depot)


def test_one_end_goes_at_a_time_and_each_owner_has_its_turn() -> None:
    """What follows an end may be a thousand objects, and no call may hold the others up for several of them."""
    specs = [spec_of(*DENSE.groups, name=f"m{number}") for number in range(4)]
    rig = Rig(256, tier=COMMIT, high_watermark=0.96, low_watermark=0.9)
    gone = []
    for number, spec in enumerate(specs):
        before = set(rig.medium.stored)
        store(rig.attach(f"e{number}", 10 + number, spec), KEYS)
        rig.tier.run()
        gone.append(sorted(set(rig.medium.stored) - before)[2])
    for one in gone:
        del rig.medium.stored[one]
    rig.config = replace(rig.config, quotas=(Quota(EVERY, EVERY, "ram", 7 * 4096),))
    rig.crash()
    clients = [rig.attach(f"e{number}", 10 + number, spec) for number, spec in enumerate(specs)]
    rig.tier.writable = False
    verify(rig)
    ticks(rig, 3)
    for client in clients:
        assert list(client.reserve(path("new", 1))[1].outcomes) == [ReserveOutcome.LATER]
    ticks(rig, 1)
    rig.now += ORPHAN_SECONDS
    more, dropped = [], []
    for _ in range(5):
        before_tick = in_tier(rig)
        more.append(rig.depot._ram.trim(0.96, 0.9, 64, rig.depot._tiering))
        dropped.append(before_tick - in_tier(rig))
    assert dropped == [5, 5, 5, 5, 0]
    assert more == [True, True, True, False, False]
    audit(rig.depot)


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
