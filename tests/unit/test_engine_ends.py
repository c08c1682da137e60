"""Ends: where RAM alone has the path to a chunk, and what follows it lies in tiers below. RAM gives them up last."""

from __future__ import annotations

from kvdepot.core.calls import Kind

from tests.fakes.engine_rig import CHUNK, Client, Rig, audit, path
from tests.fakes.shared_memory_tier import SharedMedium
from tests.fakes.tier_rig import COMMIT, EVICT, in_ram, in_tier, store, verify

KEYS = path("p", 8)


def with_a_gap(**options: object) -> tuple[Rig, Client]:
    """RAM was adopted and has the whole path, eight objects of two pages; the tier has all but the third chunk."""
    rig = Rig(tier=COMMIT, data_pages=20, **({"high_watermark": 0.25, "low_watermark": 0.25} | options))  # type: ignore[arg-type]
    client = rig.attach()
    store(client, KEYS)
    rig.tier.run()
    del rig.medium.stored[2]
    rig.crash()
    client = rig.attach()
    assert (in_ram(rig), in_tier(rig)) == (8, 7)
    return rig, client


def sweep(rig: Rig) -> None:
    """What pins begin goes on in slices."""
    while rig.engine.pins.run_once():
        audit(rig.engine)


def ticks(rig: Rig, count: int = 5) -> None:
    for _ in range(count):
        rig.engine.tick()
        audit(rig.engine)


def test_i4_the_watermark_is_met_where_a_tier_cannot_have_the_path() -> None:
    rig, client = with_a_gap()
    rig.tier.writable = False
    verify(rig)
    ticks(rig)
    assert in_ram(rig) == 2, "of ten that fit a quarter may stay"
    assert in_tier(rig) == 2, "what followed the third chunk could not be found any more"
    assert client.locate(KEYS).boundary_tokens == 2 * CHUNK
    assert rig.counter("evicted_objects.watermark") == 6


def test_an_end_stays_while_a_tier_is_about_to_have_it_and_nothing_is_lost() -> None:
    rig, client = with_a_gap()
    verify(rig)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (3, 7)
    rig.tier.run()
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (2, 8)
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK


def test_i6_an_end_that_is_lent_stays_until_it_is_given_back() -> None:
    rig, client = with_a_gap()
    rig.tier.writable = False
    verify(rig)
    lease, _ = client.acquire([KEYS[2]], [Kind.ATTENTION])
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (3, 7)
    client.release(lease)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (2, 2)


def test_an_end_that_is_pinned_stays() -> None:
    rig, client = with_a_gap(pin_share=0.5)
    rig.tier.writable = False
    verify(rig)
    rig.engine.pins.pin(client.namespace, KEYS[2], 60.0)
    sweep(rig)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (3, 7)
    rig.now += 61
    rig.engine.tick()
    sweep(rig)
    ticks(rig)
    assert (in_ram(rig), in_tier(rig)) == (2, 2)


def test_making_room_gives_no_end_up() -> None:
    """What a call makes room for may follow it: here the fourth chunk, whose copy RAM has dropped."""
    rig, client = with_a_gap(high_watermark=1.0)
    rig.tier.writable = False
    verify(rig)
    store(client, path("q", 2))
    lease, reply = client.reserve(path("q", 12))
    audit(rig.engine)
    assert in_tier(rig) == 7 and in_ram(rig) >= 3, reply
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
    client.abandon(lease)


def test_what_a_shared_tier_was_asked_for_keeps_nothing_in_ram() -> None:
    """A node computed the beginning itself; another one published all of it, and its files stay and are found again."""
    medium = SharedMedium()
    other = Rig(shared=COMMIT, shared_medium=medium)
    other.shared.automatic = True
    store(other.attach(), KEYS)
    rig = Rig(shared=EVICT, shared_medium=medium, data_pages=20, high_watermark=0.5, low_watermark=0.25)
    rig.shared.automatic, rig.shared.writable = True, False
    client = rig.attach()
    store(client, KEYS[:6])
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
    ticks(rig)
    assert in_ram(rig) == 2
    assert client.locate(KEYS).boundary_tokens == 8 * CHUNK
