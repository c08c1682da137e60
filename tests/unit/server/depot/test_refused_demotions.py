"""What RAM is about to drop waits for the tier that is to take it, unless the tier does not: RAM gets its room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvdepot.server.depot.types import DepotConfig, Quota
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import CHUNK, Client, Rig, audit, path
from tests.rigs.tier_rig import EVICT, in_tier, settle, store

PAGE = 4096
CAPACITY = 20 * PAGE


def above() -> tuple[Rig, Client]:
    """RAM is above its watermark, with objects that the tier has never had."""
    rig = Rig(data_pages=20, tier=EVICT, tier_bytes=8 * 12288, high_watermark=0.8, low_watermark=0.4)
    client = rig.attach()
    store(client, path("p", 4))
    rig.now += 1
    store(client, path("q", 5), 9)
    assert rig.depot.status().tier.used_bytes > 0.8 * CAPACITY
    return rig, client


def over_quota(rig: Rig) -> None:
    rig.depot.configure(
        # Less than one object of the tier.
        DepotConfig(
            credit_bytes=1 << 30, high_watermark=0.8, low_watermark=0.4,
            quotas=(Quota(tier="memory", capacity_bytes=PAGE),),
        ),
        {},
    )  # fmt: skip


def too_large(rig: Rig) -> None:
    rig.tier.too_large = lambda raw_bytes: True  # type: ignore[method-assign]


def budget_spent(rig: Rig) -> None:
    rig.tier.budget_spent = True


def fails(rig: Rig) -> None:
    rig.tier.fail_next(*[IoOutcome.IO_ERROR] * 100_000)


def no_room(rig: Rig) -> None:
    """It lacks handles or an unbroken place, and has nothing that may go."""
    rig.tier.fail_next(*[IoOutcome.NO_SPACE] * 100_000)


def full(rig: Rig) -> None:
    """It has as many bytes as it may, of objects that it is still writing or deleting."""
    rig.tier._used = rig.tier.capacity_bytes


TROUBLES = [over_quota, too_large, budget_spent, fails, no_room, full]


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_ram_comes_below_its_watermark_although_the_tier_takes_nothing(trouble: Callable[[Rig], None]) -> None:
    rig, client = above()
    trouble(rig)
    for _ in range(20):
        rig.now += 1.0
        settle(rig)
    assert rig.depot.status().tier.used_bytes <= 0.4 * CAPACITY
    assert in_tier(rig) == 0
    assert client.locate(path("q", 5)).boundary_tokens == 4 * CHUNK, "no more goes than the watermark asks for"


@pytest.mark.requirement("I4", "T8")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_owner_comes_within_a_smaller_quota_of_ram_although_the_tier_takes_nothing(
    trouble: Callable[[Rig], None],
) -> None:
    rig, _ = above()
    quotas = (Quota(tier="ram", capacity_bytes=5 * PAGE), Quota(tier="memory", capacity_bytes=1 << 20))
    if trouble is over_quota:
        quotas = (Quota(tier="ram", capacity_bytes=5 * PAGE), Quota(tier="memory", capacity_bytes=PAGE))
    else:
        trouble(rig)
    config = DepotConfig(credit_bytes=1 << 30, high_watermark=1.0, low_watermark=0.9, quotas=quotas)
    rig.depot.configure(config, {})
    for _ in range(20):
        rig.now += 1.0
        settle(rig)
    assert rig.depot.status().quotas[0].owners[0].used_bytes <= 5 * PAGE
    audit(rig.depot)


def test_what_a_tier_takes_later_is_demoted_again() -> None:
    """A refusal is not for ever."""
    rig, client = above()
    rig.tier.budget_spent = True
    settle(rig)
    for _ in range(20):
        rig.now += 1.0
        settle(rig)
    rig.tier.budget_spent = False
    store(client, path("r", 5), 5)
    settle(rig)
    assert in_tier(rig) > 0
    assert client.locate(path("q", 4)).boundary_tokens == 4 * CHUNK
    assert client.locate(path("r", 5)).boundary_tokens == 5 * CHUNK


def test_ram_waits_for_a_slow_tier() -> None:
    rig, client = above()
    rig.depot.tick()
    for _ in range(30):
        rig.now += 0.3
        rig.depot.tick()
    assert rig.tier.jobs and rig.depot.status().tier.used_bytes > 0.8 * CAPACITY, "they are being written"
    settle(rig)
    assert client.locate(path("p", 4)).boundary_tokens == 4 * CHUNK
    assert client.locate(path("q", 5)).boundary_tokens == 5 * CHUNK
    audit(rig.depot)
