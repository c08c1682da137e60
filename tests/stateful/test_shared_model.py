"""Two nodes over one shared medium, whose files come and go at any time, against the model."""

from __future__ import annotations

from random import Random

import pytest
from kvdepot.core.calls import Kind
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.seeds import drawn, one_in, steps_until
from tests.stateful.engine_world import DEPTH, SPECS, World
from tests.stateful.tier_model import act


@pytest.mark.requirement("T3", "I1", "I6", "I7")
@pytest.mark.parametrize("policy", one_in(2, WritePolicy, 2))
@pytest.mark.parametrize("beside_a_disk", [False, True])
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1], [pytest.mark.long(seconds=6)])])
def test_two_nodes_on_one_directory_never_get_wrong_bytes(seed: int, beside_a_disk: bool, policy: WritePolicy) -> None:
    """Look-ups, hangs, vanished and damaged files, kills and reboots on both."""
    random = Random(seed)
    disk = TierConfig(WritePolicy.SECOND_USE) if beside_a_disk else None
    one = World(shared=TierConfig(policy), tier=disk)
    two = World(shared=TierConfig(policy), neighbour=one)

    def enough() -> bool:
        if policy is not WritePolicy.COMMIT:  # it depends on chance how much is published
            return True
        return sum(world.promoted + world.read_ahead for world in (one, two)) >= 2 <= one.received + two.received

    for _ in steps_until(enough, 700):
        world = random.choice((one, two))
        if random.random() < 0.3:
            _share(world, random)
        else:
            act(world, random)
        one.check()
        two.check()
    one.finish()
    two.finish()


def _share(world: World, random: Random) -> None:
    who, path, pick = random.choice(sorted(SPECS)), random.randrange(3), random.randrange(1 << 16)
    match random.randrange(20):
        case 0:
            world.vanish(pick)
        case 1 | 2:
            world.appear(pick)
        case 3:
            world.reboot()
        case 4 | 5 | 6 | 7 | 8:
            world.acquire(who, path, DEPTH)
            world.run()
        case 9 | 10 | 11 | 12:
            world.reserve(who, path, 0, DEPTH, tuple(Kind))
            for lease, objects in list(world.engines[who].writes.items()):
                world.commit(who, lease, sorted(objects))
            world.run()
        case 13:
            world.tick(0.1)
        case _:
            world.search_step(pick, answered=random.random() < 0.9)
