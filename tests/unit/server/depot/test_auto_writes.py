"""`write = "auto"`: a disk takes what is expected to be read again, within the endurance of its drive."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.write_admission import DAY_SECONDS
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.engine_rig import DENSE, HYBRID, Client, Rig, path
from tests.rigs.tier_rig import ATTENTION, BOTH, SECOND_USE, in_ram, in_tier, settle, store

AUTO = TierConfig(WritePolicy.AUTO)
OBJECT_BYTES = 8192


def small_ram(tier: TierConfig = AUTO, **options: object) -> Rig:
    """RAM for 10 chunks, of which it drops what is above 7 down to 5."""
    return Rig(data_pages=20, rows=32, tier=tier, high_watermark=0.7, low_watermark=0.5, **options)  # type: ignore[arg-type]


def decisions(rig: Rig) -> dict[str, float]:
    names = ("admitted", "unlikely", "endurance")
    return {name: count for name in names if (count := rig.counter(f"tier_admissions.memory/{name}"))}


def prompt(rig: Rig, client: Client, name: object) -> None:
    """A prompt of four chunks is stored, and RAM gets room for the next one."""
    rig.now += 1
    store(client, path(name, 4))
    for _ in range(3):
        rig.depot.tick()
        rig.tier.run()


def test_what_ram_is_about_to_drop_is_written_first() -> None:
    rig = small_ram()
    client = rig.attach()
    store(client, path("p", 4))
    assert rig.tier.jobs == []
    prompt(rig, client, "q")
    assert in_ram(rig) < 8
    assert client.locate(path("p", 4)).boundary_tokens == 4 * client.spec.chunk_tokens
    assert client.locate(path("q", 4)).boundary_tokens == 4 * client.spec.chunk_tokens


def test_what_never_comes_back_is_refused_and_counted() -> None:
    rig = small_ram(tier_bytes=1 << 22)
    client = rig.attach()
    for number in range(80):
        prompt(rig, client, number)
    early = in_tier(rig)
    assert decisions(rig)["unlikely"] > 0
    for number in range(80, 120):
        prompt(rig, client, number)
    assert 0 < in_tier(rig) <= early + 8, "nearly nothing more"
    assert rig.counter("evicted_objects.watermark") > 3 * in_tier(rig)


def test_what_was_computed_again_is_written() -> None:
    rig = small_ram(tier_bytes=1 << 22)
    client = rig.attach()
    for number in range(80):
        prompt(rig, client, number)
    before = in_tier(rig)
    rig.tier.writable = False  # nothing is written meanwhile, and what comes back counts all the same
    for number in range(240):
        prompt(rig, client, f"again {number % 12}")
    rig.tier.writable = True
    for number in range(24):
        prompt(rig, client, f"again {number % 12}")
    assert in_tier(rig) > before + 12


def test_a_second_use_is_written_although_ram_keeps_it() -> None:
    rig = Rig(tier=AUTO)
    client = rig.attach(spec=HYBRID)
    keys = path("p", 3)
    client.store(keys, BOTH)
    settle(rig)
    assert in_tier(rig) == 0
    _, reply = client.acquire([keys[2], keys[2]], BOTH)
    assert reply.outcome is AcquireOutcome.GRANTED
    settle(rig)
    assert in_tier(rig) == 4, "three of attention, and the state that was used"
    assert decisions(rig) == {"admitted": 1}


def test_the_target_bounds_what_is_written() -> None:
    day_bytes = 4 * OBJECT_BYTES
    rig = small_ram(TierConfig(WritePolicy.AUTO, write_bytes_per_day=day_bytes), tier_bytes=1 << 22)
    client = rig.attach()
    for number in range(60):
        prompt(rig, client, number % 8)  # all of it comes back
    first = rig.counter("tier_written_bytes.memory/")
    assert first <= day_bytes / 4 + 4 * OBJECT_BYTES, "what the bucket holds, and the rest of a path"
    assert decisions(rig)["endurance"] > 0
    rig.now += 3 * DAY_SECONDS
    for number in range(60):
        prompt(rig, client, number % 8)
    assert first < rig.counter("tier_written_bytes.memory/") <= first + day_bytes / 4 + 4 * OBJECT_BYTES


@pytest.mark.parametrize(("write", "shown"), [(WritePolicy.AUTO, 4096), (WritePolicy.SECOND_USE, 0)])
def test_status_has_the_target_of_the_policy_that_aims_at_it(write: WritePolicy, shown: int) -> None:
    rig = small_ram(TierConfig(write, write_bytes_per_day=4096))
    (tier,) = rig.depot.status().lower_tiers
    assert tier.write_target_bytes == shown


def test_a_chunk_on_its_way_is_judged_once() -> None:
    rig = small_ram()
    client = rig.attach()
    store(client, path("p", 4))
    store(client, path("q", 4))
    store(client, path("r", 2))
    for _ in range(20):
        rig.depot.tick()  # no write is answered
    judged = decisions(rig)
    for _ in range(20):
        rig.depot.tick()
    assert decisions(rig) == judged
    settle(rig)
    assert in_tier(rig) > 0


def test_a_disk_that_takes_no_writes_holds_nothing_up() -> None:
    rig = small_ram()
    client = rig.attach()
    rig.tier.writable = False
    store(client, path("p", 8))
    settle(rig)
    assert in_ram(rig) <= 5
    assert decisions(rig) == {}


def test_another_policy_can_be_chosen_while_the_daemon_runs() -> None:
    rig = small_ram(SECOND_USE)
    client = rig.attach()
    prompt(rig, client, "p")
    prompt(rig, client, "q")
    assert in_tier(rig) == 0
    rig.depot.configure(rig.config, {"memory": AUTO})
    prompt(rig, client, "r")
    prompt(rig, client, "s")
    assert in_tier(rig) > 0


@pytest.mark.requirement("P10")
def test_bytes_that_a_tier_supplied_are_counted() -> None:
    rig = small_ram()
    client = rig.attach(spec=DENSE)
    for name in "pqrs":
        prompt(rig, client, name)
    answers = client.acquire_later(path("p", 4), ATTENTION * 4, 1)
    settle(rig)
    assert answers[0].outcome is AcquireOutcome.GRANTED
    read = rig.counter("tier_reads.memory/ok")
    assert rig.counter("tier_hit_bytes.memory/") == read * OBJECT_BYTES > 0
