"""Engines over RAM and a lower tier with quotas: nobody is ever above its own, nobody loses for another's (T8, I4)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from kvdepot.server.depot.types import Quota, TierConfig, WritePolicy

from tests.rigs.quota_audit import only_owners_lose
from tests.rigs.seeds import drawn, one_in, steps_until
from tests.stateful.engine_world import World
from tests.stateful.tier_model import TierModel, act

PAGE = 4096
QUOTAS = (
    Quota(namespace="*", tier="ram", capacity_bytes=13 * PAGE),
    Quota(namespace="odd", tier="ram", capacity_bytes=9 * PAGE),
    Quota(tier="ram", capacity_bytes=18 * PAGE),
    Quota(namespace="*", capacity_bytes=3 * 12288 + PAGE),
    Quota(tenant="", tier="memory", capacity_bytes=5 * 12288),
)


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with only_owners_lose():
        yield


class QuotaModel(TierModel):
    """Two namespaces of one tenant, with quotas for each, for both together, and of each tier."""

    quotas = QUOTAS


QuotaModel.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQuotaModel = QuotaModel.TestCase


@pytest.mark.requirement("T8", "I4")
@pytest.mark.parametrize("policy", one_in(2, WritePolicy, 2))
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1], [pytest.mark.long(seconds=1)])])
def test_no_owner_is_ever_above_its_quota_and_no_other_pays_for_it(seed: int, policy: WritePolicy) -> None:
    random = Random(seed)
    world = World(tier=TierConfig(policy), quotas=QUOTAS)
    rises = [0.0, 0.0, 0.0]
    awaited = 3 if policy is WritePolicy.COMMIT else 2  # else no write is dropped
    for _ in steps_until(lambda: all(rises[:awaited]), 600):
        run = world.rig.run
        before = _figures(world)
        act(world, random)
        world.check()
        if world.rig.run == run:
            for which, (now, then) in enumerate(zip(_figures(world), before, strict=True)):
                rises[which] += now - then
    world.finish()


def _figures(world: World) -> tuple[float, float, float]:
    counter, ram = world.rig.counter, world.rig.depot._ram.account
    refused = sum(quota.refused_objects for quota in ram.statuses())
    return (counter("evicted_objects.quota"), refused, counter("tier_writes_dropped.memory/quota"))
