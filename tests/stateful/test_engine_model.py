"""Index, leases and lent table against a model, with daemon kills between calls and within them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from kvdepot.core.calls import Kind

from tests.rigs.seeds import drawn, one_in, steps_until
from tests.stateful.auditing import compare
from tests.stateful.engine_model import ALL, EngineModel
from tests.stateful.engine_world import DEPTH, SPECS, World

EngineModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineModel = EngineModel.TestCase


def test_the_model_ends_with_what_an_operator_has_pinned() -> None:
    """`World.finish` says that nothing is kept, and a pin outlives the engines."""
    model = EngineModel()
    model.reserve("a", 0, 0, 2, (Kind.ATTENTION,))
    model.commit(0, True)
    model.pin("a", 0, 2, 30.0)
    assert any(model.world.rig.depot._ram.pins.user.pinned)
    model.teardown()


LINES_MAX = {"reserve": 200, "commit": 60, "abandon": 60, "acquire": 20, "release": 10, "sum": 30, "die": 60}


def _step(world: World, random: Random) -> tuple[str, Callable[[], None]]:
    """A random action, prepared so far that a kill in it is a kill in the daemon."""
    name = random.choice(sorted(SPECS))
    world.attach(name)
    engine = world.engines[name]
    action = random.choice(["reserve", "reserve", "commit", "commit", "acquire", "release", "abandon", "sum", "die"])
    if action == "die" and random.random() < 0.7:
        action = "sum"
    if (action in ("commit", "abandon") and not engine.writes) or (action == "release" and not engine.reads):
        action = "reserve"
    if action == "reserve":
        path, depth = random.randrange(3), random.randint(1, DEPTH)
        return action, lambda: world.reserve(name, path, 0, depth, ALL)
    if action == "acquire":
        path = random.randrange(3)
        return action, lambda: world.acquire(name, path, DEPTH)
    if action == "sum":
        return action, lambda: world.sum(8)
    if action == "die":
        return action, lambda: world.die(name)
    lease = random.choice(sorted(engine.reads if action == "release" else engine.writes))
    if action == "release":
        return action, lambda: world.release(name, lease)
    indices = sorted(engine.writes[lease])
    chosen = indices if random.random() < 0.7 else indices[:1]
    act = world.commit if action == "commit" else world.abandon
    return action, lambda: act(name, lease, chosen)


@pytest.mark.requirement("T1", "I1a", "I1c")
@pytest.mark.parametrize("seed", [*drawn(range(2)), *drawn(range(2, 12), [pytest.mark.long(seconds=1)])])
def test_a_kill_at_any_line_leaves_a_truth_that_can_be_adopted(seed: int) -> None:
    """About 40 kills a seed; the tables as they were at that line are all that the next run gets."""
    random = Random(seed)
    world = World()
    seen = Counter[str]()
    for _ in steps_until(lambda: seen["kills"] > 10 and world.split_objects, 400):
        action, act = _step(world, random)
        if random.random() < 0.15:
            killed = world.killed(random.randrange(LINES_MAX[action]), act)
            seen["kills"] += killed
            if killed and action == "die":
                # Whoever was proven dead is still dead; the world learns it from the adopted table.
                for name, engine in world.engines.items():
                    if engine.pid in world.rig.dead:
                        world.die(name)
        else:
            act()
        world.check()
        if random.random() < 0.1:
            world.tick(random.choice([0.1, 4.0]))
    world.finish()


def _split() -> tuple[World, int]:
    """A world where an object of `c` has two extents, between others of `a`; and its lease."""
    world = World(data_pages=12)
    world.reserve("a", 2, 0, 6, (Kind.ATTENTION,))
    (lease,) = world.engines["a"].writes
    for index in (5, 3, 1):
        world.abandon("a", lease, [index])
    world.reserve("c", 0, 0, 1, (Kind.ATTENTION,))
    assert world.split_objects == 1
    return world, next(iter(world.engines["c"].writes))


def _reserve() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    world.abandon("c", lease, [])
    return world, lambda: world.reserve("c", 0, 0, 1, (Kind.ATTENTION, Kind.STATE))


def _commit() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    return world, lambda: world.commit("c", lease, [0])


def _abandon() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    return world, lambda: world.abandon("c", lease, [0])


def _abandon_expired() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    world.tick(11)
    return world, lambda: world.abandon("c", lease, [0])


def _evict() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    world.commit("c", lease, [0])
    world.sum(1)
    world.abandon("a", next(iter(world.engines["a"].writes)), [])
    world.attach("b")
    return world, lambda: world.reserve("b", 1, 0, 6, (Kind.ATTENTION,))


def _die() -> tuple[World, Callable[[], None]]:
    world, _ = _split()
    return world, lambda: world.die("c")


def _crash() -> tuple[World, Callable[[], None]]:
    world, lease = _split()
    world.commit("c", lease, [0])
    world.acquire("c", 0, 1)
    return world, world.crash


def _present() -> World:
    """`a` has a chunk in RAM, which `b` computes too."""
    world = World(data_pages=48)
    world.rig.depot.configure(replace(world.rig.config, audit_sample=1.0), {})
    world.reserve("a", 0, 0, 1, (Kind.ATTENTION,))
    world.commit("a", next(iter(world.engines["a"].writes)), [0])
    world.attach("b")
    return world


def _audit() -> tuple[World, Callable[[], None]]:
    world = _present()
    return world, lambda: world.reserve("b", 0, 0, 1, (Kind.ATTENTION,))


def _audited() -> tuple[World, Callable[[], None]]:
    world = _present()
    world.reserve("b", 0, 0, 1, (Kind.ATTENTION,))
    ((lease, held),) = world.engines["b"].writes.items()
    assert held[0].scratch
    return world, lambda: world.commit("b", lease, [0])


def _drift() -> tuple[World, Callable[[], None]]:
    world, commit = _audited()
    commit()
    return world, lambda: compare(world.rig)


SCENES = (_reserve, _commit, _abandon, _abandon_expired, _evict, _die, _audited, _drift)
LARGE_SCENES = (_crash, _audit)


@pytest.mark.requirement("I1a", "T1")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scene",
    [*one_in(2, SCENES, 2), *(pytest.param(scene, marks=pytest.mark.long(seconds=50)) for scene in LARGE_SCENES)],
)
def test_a_kill_at_each_line_in_turn(scene: Callable[[], tuple[World, Callable[[], None]]]) -> None:
    """Every line of each change to an object of several extents, also of adoption itself."""
    lines, killed = 0, True
    while killed:
        world, act = scene()
        killed = world.killed(lines, act)
        lines += 1
        for name, engine in world.engines.items():
            if engine.pid in world.rig.dead:
                world.die(name)
        for name in SPECS:
            world.attach(name)
        world.check()
        world.finish()
    assert lines > 10, "nothing was killed"


def test_the_model_notices_when_lent_bytes_are_reused() -> None:
    """The negative control: an engine that frees what is lent fails the check."""
    world = World()
    world.reserve("a", 0, 0, 2, (Kind.ATTENTION,))
    (lease,) = world.engines["a"].writes
    world.attach("a").abandon(lease)  # behind the model's back: its ranks still write
    world.reserve("b", 2, 0, 2, (Kind.ATTENTION,))
    with pytest.raises(AssertionError, match="given to somebody else"):
        world.check()
