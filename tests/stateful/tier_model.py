"""Random histories of engines over a tier, as rules of a state machine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from kvdepot.core.calls import Kind
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.storage.base import IoOutcome

from tests.stateful.contradicting import contradict
from tests.stateful.engine_model import EngineModel
from tests.stateful.engine_world import DEPTH, SPECS, World

FAILURES = (IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.CORRUPT, IoOutcome.NO_SPACE, IoOutcome.UNREADABLE)
ACTIONS = (
    "reserve", "commit", "commit", "acquire", "acquire", "release", "step", "step", "step", "run", "run", "tick", "sum",
    "late", "scribble", "rare", "queue", "contradict",
)  # fmt: skip
QUEUE_ACTIONS = (
    *["queue"] * 5, "acquire", "acquire", "release", "step", "step", "step", "run", "reserve", "commit", "commit",
    "tick", "late", "scribble", "rare",
)  # fmt: skip
PLACE_ACTIONS = (*ACTIONS, "place", "place", "place", "acquire", "acquire")
picks = st.integers(0, 1 << 16)


class TierModel(EngineModel):
    """Rows P5, P6, P11, I1, I1a, I1c, I6 and I7, through the tier interface."""

    tier = TierConfig(WritePolicy.COMMIT)

    @precondition(lambda self: self.world.rig.tier.jobs)
    @rule(pick=picks, outcome=st.sampled_from([None, None, None, *FAILURES]))
    def tier_step(self, pick: int, outcome: IoOutcome | None) -> None:
        self.world.tier_step(pick, outcome)

    @precondition(lambda self: self.world.rig.tier.jobs)
    @rule(pick=picks)
    def tier_begin(self, pick: int) -> None:
        self.world.tier_step(pick, None, begin_only=True)

    @rule()
    def tier_run(self) -> None:
        self.world.run()

    @rule(pick=picks)
    def damage(self, pick: int) -> None:
        self.world.damage(pick)

    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.world.lose(pick)

    @rule(pick=picks)
    def contradict(self, pick: int) -> None:
        contradict(self.world, pick)

    @precondition(lambda self: self.world.rig.tier.opened)
    @rule(readable=st.booleans(), writable=st.booleans())
    def breaker(self, readable: bool, writable: bool) -> None:
        self.world.rig.tier.readable, self.world.rig.tier.writable = readable, writable

    @rule(pick=picks)
    def raise_next(self, pick: int) -> None:
        self.world.raise_next(pick)

    @rule()
    def scribble_late(self) -> None:
        self.world.scribble_late()

    @rule()
    def late_end(self) -> None:
        self.world.late_end()

    @rule()
    def crash_with_worker(self) -> None:
        self.world.crash(worker_lives=False)

    @rule()
    def crash_and_open_late(self) -> None:
        self.world.crash(opens=False)

    @rule()
    def open(self) -> None:
        self.world.open()

    @rule()
    def reboot(self) -> None:
        self.world.reboot()

    @precondition(lambda self: self.world.rig.tier.jobs)
    @rule(lines=st.integers(0, 40), pick=picks)
    def kill_in_tier_step(self, lines: int, pick: int) -> None:
        self.world.killed(lines, lambda: self.world.tier_step(pick, None))


def act(world: World, random: Random, actions: Sequence[str] = ACTIONS) -> None:
    who, pick = random.choice(sorted(SPECS)), random.randrange(1 << 16)
    engine = world.engines[who]
    action = random.choice(actions)
    if action == "reserve":
        world.reserve(who, random.randrange(3), 0, random.randint(1, DEPTH), (Kind.ATTENTION, Kind.WINDOW, Kind.STATE))
    elif action == "commit" and engine.writes:
        lease = random.choice(sorted(engine.writes))
        world.commit(who, lease, sorted(engine.writes[lease]))
    elif action in ("acquire", "queue"):
        _ask(world, random, who, acquire=action == "acquire")
    elif action == "release" and engine.reads:
        world.release(who, random.choice(sorted(engine.reads)))
    elif action == "step":
        failure = random.choice(FAILURES) if random.random() < 0.15 else None
        world.tier_step(pick, failure, begin_only=random.random() < 0.3)
    elif action in ("run", "place", "scribble"):
        {"run": world.run, "place": world.place, "scribble": world.scribble_late}[action]()
    elif action == "tick":
        world.tick(random.choice([0.1, 0.1, 4.0]))
    elif action == "sum":
        world.sum(8)
    elif action == "contradict":
        contradict(world, pick)
    elif action == "late" and random.random() < 0.5:
        world.late_end()
    elif action == "rare":
        _rare(world, random, who, pick)


def _ask(world: World, random: Random, who: str, *, acquire: bool) -> None:
    path = random.randrange(3)
    if acquire:
        world.acquire(who, path, DEPTH)
    elif random.random() < 0.8:
        world.queue(who, path, DEPTH, random.choice([0.0, 0.0, 1e-4, 10.0]))
    else:
        world.leave_queue(who, path)


def _rare(world: World, random: Random, who: str, pick: int) -> None:
    match random.randrange(12):
        case 0:
            world.crash(worker_lives=random.random() < 0.5, opens=random.random() < 0.5)
        case 1:
            world.reboot()
        case 2:
            world.damage(pick)
        case 3:
            world.lose(pick)
        case 4:
            world.die(who)
        case 5:
            world.disconnect(who)
        case 6:
            world.killed(random.randrange(40), lambda: world.tier_step(pick, None))
        case 7:
            tier = random.choice(world.tiers)
            tier.readable = tier.opened and not tier.readable
        case 8:
            world.raise_next(pick)
        case _:
            world.open()
