"""Reloads at any moment of random histories: nothing moves, nothing is freed or forgotten, and limits come true."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from kvdepot.core.arena import LentMode
from kvdepot.core.calls import Kind
from kvdepot.server.depot.loads import acquires
from kvdepot.server.depot.tree.quotas import Account
from kvdepot.server.depot.types import DepotConfig, Quota, TierConfig, WritePolicy

from tests.rigs.seeds import drawn, steps_until
from tests.stateful.engine_world import DEPTH, SPECS, World
from tests.stateful.peer_world import PeerWorld, act_of_peers
from tests.stateful.reloads import WATERMARKS, drawn_changes
from tests.stateful.tenant_world import TenantWorld, act_of_tenants
from tests.stateful.tier_model import ACTIONS, PLACE_ACTIONS, QUEUE_ACTIONS, act

SMALL = {"watermarks": WATERMARKS[-1]}


def _reload(world: World, random: Random) -> None:
    """Several in a row, now and then."""
    for _ in range(random.choice([1, 1, 3])):
        world.reloads.reload(*(drawn_changes(values, random) for values in world.settings))


def _met(world: World) -> bool:
    """Whether the history has met what its world is there for."""
    match world:
        case PeerWorld():
            return world.leased >= 5
        case TenantWorld():
            return world.unhindered >= 2
    return world.promoted + world.read_ahead > 0


def _history(world: World, random: Random, others: Callable[[], None], steps: int) -> None:
    def enough() -> bool:
        above = world.reloads.above >= 2 or isinstance(world, TenantWorld)
        return _met(world) and above and world.reloads.count >= 20

    for _ in steps_until(enough, steps):
        if random.random() < 0.08:
            _reload(world, random)
        else:
            others()
        world.check()
    world.reloads.reload(SMALL, SMALL)  # which `finish` sees come true
    world.finish()


@pytest.mark.requirement("T9", "I4", "I6")
@pytest.mark.parametrize("actions", [ACTIONS, QUEUE_ACTIONS], ids=["acquires", "queues"])
@pytest.mark.parametrize("seed", [*drawn([0, 1]), *drawn(range(2, 8), [pytest.mark.long(seconds=2)])])
def test_reloads_among_engines_over_a_disk(seed: int, actions: tuple[str, ...]) -> None:
    random = Random(seed)
    world = World(tier=TierConfig(random.choice(list(WritePolicy))))

    def others() -> None:
        if actions is QUEUE_ACTIONS and random.random() < 0.02:  # so that there is something to read ahead
            world.run()
            world.reboot()
        act(world, random, actions)

    _history(world, random, others, 400)


@pytest.mark.requirement("T9", "I4", "I6")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn(range(1, 5), [pytest.mark.long(seconds=2)])])
def test_reloads_between_two_slices_of_a_load(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    random = Random(seed)
    world = World(tier=TierConfig(WritePolicy.COMMIT))
    world.rig.places_at_once = False
    _history(world, random, lambda: act(world, random, PLACE_ACTIONS), 1000)  # of which few wait for the disk


@pytest.mark.requirement("T9", "I4", "I6", "S4")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn(range(1, 5), [pytest.mark.long(seconds=3)])])
def test_reloads_among_engines_of_tenants(seed: int) -> None:
    random = Random(seed)
    world = TenantWorld(tier=TierConfig(WritePolicy.COMMIT))

    def others() -> None:
        if random.random() < 0.15:
            act_of_tenants(world, random, random.choice(sorted(SPECS)))
        else:
            act(world, random)

    _history(world, random, others, 250)


@pytest.mark.requirement("T9", "I6", "P2")
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn(range(1, 5), [pytest.mark.long(seconds=2)])])
def test_reloads_while_peers_load(seed: int) -> None:
    random = Random(seed)
    world = PeerWorld(tier=TierConfig(WritePolicy.COMMIT))

    def others() -> None:
        if random.random() < 0.3:
            act_of_peers(world, random)
        else:
            act(world, random)

    _history(world, random, others, 400)


def _stored() -> World:
    world = World()
    world.reserve("a", 0, 0, DEPTH, (Kind.ATTENTION,))
    world.commit("a", next(iter(world.engines["a"].writes)), list(range(DEPTH)))
    world.acquire("a", 0, 1)
    assert world.engines["a"].reads
    return world


def test_the_model_notices_a_reload_that_ends_a_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _stored()
    depot = world.rig.depot
    configure = depot.configure

    def ends_a_loan(config: DepotConfig, tiers: dict[str, TierConfig]) -> None:
        configure(config, tiers)
        lent = depot._ram.lent
        lent.clear(int(np.flatnonzero(lent.modes == LentMode.READ)[0]))

    monkeypatch.setattr(depot, "configure", ends_a_loan)
    with pytest.raises(AssertionError, match="a reload has changed the tables"):
        world.reloads.reload({}, {})


def test_the_model_notices_a_quota_that_never_comes_true(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _stored()
    world.reloads.reload({"quotas": (Quota(capacity_bytes=1),)}, {})
    assert world.reloads.above == 1
    monkeypatch.setattr(Account, "trim", lambda *_: False)
    with pytest.raises(AssertionError, match="32768 of 1"):
        world.finish()
