"""The engine over a lower tier against the model: promotions and writes fail, hang and are killed at any moment."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from kvdepot.server.depot.loads import acquires
from kvdepot.server.depot.tree import read_rate
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.seeds import drawn, one_in, steps_until
from tests.stateful.engine_world import World
from tests.stateful.tier_model import PLACE_ACTIONS, QUEUE_ACTIONS, TierModel, act

TierModel.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTierModel = TierModel.TestCase


@pytest.mark.requirement("I1", "I6", "I1a")
@pytest.mark.parametrize("policy", one_in(2, WritePolicy, 2))
@pytest.mark.parametrize("seed", [*drawn([1]), *drawn([2, 3], [pytest.mark.long(seconds=1)])])
def test_long_random_histories_over_a_lower_tier(seed: int, policy: WritePolicy) -> None:
    """Promotions, demotions, damage, hangs, kills and reboots; patterns in everything a worker may still write to."""
    random = Random(seed)
    world = World(tier=TierConfig(policy))
    for _ in steps_until(lambda: world.promoted + world.read_ahead >= 2, 700):
        act(world, random)
        world.check()
    world.finish()


@pytest.mark.parametrize("seed", [*drawn([0, 1]), *drawn([2, 3], [pytest.mark.long(seconds=1)])])
def test_loads_whose_room_is_made_object_by_object_are_right_whatever_happens_between(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    random = Random(seed)
    world = World(tier=TierConfig(WritePolicy.COMMIT))
    world.rig.places_at_once = False
    seen = Counter[str]()
    for number in steps_until(lambda: seen["between"] >= 50 and world.promoted >= 10, 700):
        if number % 60 == 59:
            world.run()
            world.reboot()
        act(world, random, PLACE_ACTIONS)
        seen["between"] += bool(world.rig.depot._loads._pending._placing)
        world.check()
    world.finish()


@pytest.mark.requirement("I4", "I7")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1, 2], [pytest.mark.long(seconds=2)])])
def test_long_random_histories_of_queues(seed: int) -> None:
    """Many requests wait, with a cold RAM again and again: nothing is held for nobody, nor beyond the share."""
    random = Random(seed)
    world = World(tier=TierConfig(WritePolicy.COMMIT))
    for number in steps_until(lambda: world.read_ahead >= 5, 500):
        if number % 50 == 49:
            world.run()
            world.reboot()
        act(world, random, QUEUE_ACTIONS)
        world.check()
    world.finish()


@pytest.mark.requirement("I4", "I7")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1, 2], [pytest.mark.long(seconds=2)])])
def test_long_random_histories_of_queues_in_which_half_is_declined(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not worth its time is read when its time has come, whatever else happens meanwhile."""
    monkeypatch.setattr(read_rate, "MEASURED_READS", 0)
    random = Random(seed)
    world = World(tier=TierConfig(WritePolicy.COMMIT))
    seen = Counter[str]()
    for number in steps_until(lambda: seen["read"] >= 3, 1200):
        if number % 25 == 24:
            world.run()
            world.reboot()
        world.token_seconds = random.choice((0.0, 1e-9))
        before = world.rig.counter("prefetch_wasted_objects.rejected")
        act(world, random, QUEUE_ACTIONS)
        seen["read"] += max(
            int(world.rig.counter("prefetch_wasted_objects.rejected") - before), 0
        )  # a new run begins at 0
        world.check()
    world.finish()
