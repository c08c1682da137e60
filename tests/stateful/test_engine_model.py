"""Index, leases and lent table against a model, with daemon kills between calls and within them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvdepot.core.calls import Kind
from kvdepot.core.control import Switch
from kvdepot.core.errors import NotFound
from kvdepot.server.depot.types import Quota, TierConfig

from tests.rigs.pin_audit import sweep
from tests.rigs.seeds import drawn, steps_until
from tests.stateful.auditing import compare
from tests.stateful.engine_world import DEPTH, SPECS, World, keys_of
from tests.stateful.operator_world import Operator

who = st.sampled_from(sorted(SPECS))
paths = st.integers(0, 2)
depths = st.integers(1, DEPTH)
ALL = (Kind.ATTENTION, Kind.WINDOW, Kind.STATE)
kinds = st.sampled_from([(Kind.ATTENTION,), (Kind.WINDOW,), (Kind.STATE,), ALL])
picks = st.integers(0, 1 << 16)


class EngineModel(RuleBasedStateMachine):
    """Rows P11, T1, T7, I1a, I1c and I4 to I6, over random histories."""

    tier: TierConfig | None = None
    quotas: tuple[Quota, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(tier=self.tier, quotas=self.quotas)
        self.operator = Operator()

    def writing(self) -> list[tuple[str, int]]:
        return [(name, lease) for name, engine in self.world.engines.items() for lease in engine.writes]

    def reading(self) -> list[tuple[str, int]]:
        return [(name, lease) for name, engine in self.world.engines.items() for lease in engine.reads]

    @rule(who=who, path=paths, first=st.integers(0, 2), depth=depths, kinds=kinds)
    def reserve(self, who: str, path: int, first: int, depth: int, kinds: tuple[Kind, ...]) -> None:
        self.world.reserve(who, path, first, depth, kinds)

    @precondition(lambda self: self.writing())
    @rule(pick=picks, everything=st.booleans())
    def commit(self, pick: int, everything: bool) -> None:
        name, lease = self.writing()[pick % len(self.writing())]
        held = list(self.world.engines[name].writes[lease])
        self.world.commit(name, lease, held if everything else held[::2])

    @precondition(lambda self: self.writing())
    @rule(pick=picks, everything=st.booleans())
    def abandon(self, pick: int, everything: bool) -> None:
        name, lease = self.writing()[pick % len(self.writing())]
        self.world.abandon(name, lease, [] if everything else list(self.world.engines[name].writes[lease])[:1])

    @precondition(lambda self: self.writing())
    @rule(pick=picks)
    def scribble(self, pick: int) -> None:
        self.world.scribble(*self.writing()[pick % len(self.writing())])

    @rule(who=who, path=paths, depth=depths)
    def acquire(self, who: str, path: int, depth: int) -> None:
        self.world.acquire(who, path, depth)

    @rule(who=who, path=paths, depth=depths, budget_seconds=st.sampled_from([0.0, 1e-4, 10.0]))
    def queue(self, who: str, path: int, depth: int, budget_seconds: float) -> None:
        self.world.queue(who, path, depth, budget_seconds)

    @rule(switch=st.sampled_from(Switch), who=st.sampled_from(["", *sorted(SPECS)]), on=st.integers(0, 2))
    def switch(self, switch: Switch, who: str, on: int) -> None:
        self.world.switch(switch, who, on=on > 0)  # more often on: else all ends up off

    @rule(who=who, path=paths, depth=st.integers(0, DEPTH))
    def evict(self, who: str, path: int, depth: int) -> None:
        self.world.evict(who, path, depth)

    @rule(who=who, path=paths, depth=st.integers(0, DEPTH), seconds=st.sampled_from([1.0, 30.0]))
    def pin(self, who: str, path: int, depth: int, seconds: float) -> None:
        """The operator pins a path, or all of an engine's namespace (no depth)."""
        client, keys = self.world.attach(who), keys_of(path, depth)
        with suppress(NotFound):
            self.world.rig.depot.pins.pin(client.namespace, keys[-1] if keys else b"", seconds)
        sweep(self.world.rig.depot)

    @rule(who=who, path=paths, depth=st.integers(0, DEPTH))
    def unpin(self, who: str, path: int, depth: int) -> None:
        client, keys = self.world.attach(who), keys_of(path, depth)
        with suppress(NotFound):
            self.world.rig.depot.pins.unpin(client.namespace, keys[-1] if keys else b"")
        sweep(self.world.rig.depot)

    @rule(who=who, path=paths, depth=st.integers(0, DEPTH))
    def verify(self, who: str, path: int, depth: int) -> None:
        world, namespace_id = self.world, self.world.attach(who).namespace
        self.operator.verify(world.rig.depot, namespace_id, keys_of(path, depth))

    @rule(who=who, path=paths, depth=st.integers(0, DEPTH))
    def warm(self, who: str, path: int, depth: int) -> None:
        world, namespace_id = self.world, self.world.attach(who).namespace
        self.operator.warm(world.rig.depot, namespace_id, keys_of(path, depth))

    @rule(count=st.integers(1, 4))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.operator.go_on(self.world.rig.depot)

    @rule(draining=st.booleans())
    def drain(self, draining: bool) -> None:
        self.world.drain(draining=draining)
        self.world.drain(draining=False)  # all the rest would do nothing

    @rule(who=who, path=paths)
    def leave_queue(self, who: str, path: int) -> None:
        self.world.leave_queue(who, path)

    @precondition(lambda self: self.reading())
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.world.release(*self.reading()[pick % len(self.reading())])

    @rule(who=who, path=paths)
    def end_request(self, who: str, path: int) -> None:
        self.world.end_request(who, path)

    @rule(who=who)
    def die(self, who: str) -> None:
        self.world.die(who)

    @rule(who=who)
    def disconnect(self, who: str) -> None:
        self.world.disconnect(who)

    @rule(count=st.integers(1, 20))
    def sum(self, count: int) -> None:
        self.world.sum(count)

    @rule(seconds=st.sampled_from([0.1, 6.0, 40.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(lines=st.integers(0, 200), who=who, path=paths, depth=depths)
    def kill_in_reserve(self, lines: int, who: str, path: int, depth: int) -> None:
        self.world.attach(who)
        self.world.killed(lines, lambda: self.world.reserve(who, path, 0, depth, ALL))

    @precondition(lambda self: self.writing())
    @rule(lines=st.integers(0, 60), pick=picks)
    def kill_in_commit(self, lines: int, pick: int) -> None:
        name, lease = self.writing()[pick % len(self.writing())]
        self.world.attach(name)
        held = list(self.world.engines[name].writes[lease])
        self.world.killed(lines, lambda: self.world.commit(name, lease, held))

    @rule(lines=st.integers(0, 30))
    def kill_in_sum(self, lines: int) -> None:
        self.world.killed(lines, lambda: self.world.sum(3))

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        depot = self.world.rig.depot
        for pin in depot.pins.statuses():
            depot.pins.unpin(pin.namespace_id, pin.key)
        sweep(depot)
        self.operator.cancel(self.world.rig.depot)
        self.world.finish()


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
@pytest.mark.parametrize("seed", drawn(range(12)))
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


SCENES = (_reserve, _commit, _abandon, _abandon_expired, _evict, _die, _crash, _audit, _audited, _drift)


@pytest.mark.requirement("I1a", "T1")
@pytest.mark.parametrize("scene", SCENES)
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
