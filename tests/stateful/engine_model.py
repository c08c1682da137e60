"""Random histories of one engine, as rules of a state machine."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvdepot.core.calls import Kind
from kvdepot.core.control import Switch
from kvdepot.core.errors import NotFound
from kvdepot.server.depot.types import Quota, TierConfig

from tests.rigs.pin_audit import sweep
from tests.stateful.engine_world import DEPTH, SPECS, World, keys_of
from tests.stateful.operator_world import Operator
from tests.stateful.reloads import changes_of

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
        self.world = self.new_world()
        self.operator = Operator()

    def new_world(self) -> World:
        return World(tier=self.tier, quotas=self.quotas)

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

    @rule(data=st.data(), times=st.integers(1, 3))
    def reload(self, data: st.DataObject, times: int) -> None:
        """Several in a row, too: operators who try."""
        for _ in range(times):
            depot, tier = (data.draw(changes_of(values)) for values in self.world.settings)
            self.world.reloads.reload(depot, tier)

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
