"""The list, the scout and the group of a tier together: who joins, who is watched, and when nobody is (ADR 85)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdepot.server.io.scout_wire import At, Ranked, Useful
from kvdepot.server.platform.guard import Guard
from kvdepot.server.tiers.peer.choice import Choice
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.seats import Seats

from tests.rigs.patience import until

NODES = [(f"10.0.0.{number}", 7448) for number in range(1, 10)]


class Scout:
    """Says what the test lets it say."""

    def __init__(self, ranked: Callable[[Ranked], None]) -> None:
        self.ranked = ranked
        self.watches: list[tuple[Sequence[Place], Sequence[Place]]] = []
        self.closed = 0

    def watch(self, places: Sequence[Place], members: Sequence[Place]) -> None:
        self.watches.append((places, members))

    def close(self) -> None:
        self.closed += 1


class Group:
    def __init__(self) -> None:
        self.why: Mapping[Place, str] = {}
        self.members: set[Place] = set()

    def use(self, places: Iterable[Place], why: Mapping[Place, str]) -> bool:
        new = set(places) - self.members
        self.members, self.why = set(places), why
        return bool(new)


class World:
    """A choice by the number of the node, with seats for two."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.joined = 0
        self.group = Group()
        group: Any = self.group
        choice = Choice(
            2, order=lambda place: place[0].encode(), busy=lambda _: False, clock=loop.time, exchange_seconds=0.05
        )
        made: Any = Scout
        self.seats = Seats(
            choice, group, made, most=2, loop=loop, joined=self._joined,
            guard=Guard(lambda _: None, logging.getLogger("tests.seats")),
        )  # fmt: skip
        self.scout: Any = self.seats.scout

    def _joined(self) -> None:
        self.joined += 1

    def rank(self, *useful: Place, itself: Sequence[Place] = ()) -> None:
        named = tuple(Useful(At(*place), 7) for place in useful)
        self.scout.ranked(Ranked(named, tuple(At(*place) for place in itself)))


def in_loop(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await test(world)
        world.seats.close()

    asyncio.run(main())


def test_a_list_that_fits_is_taken_as_it_is_and_nobody_is_watched() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES[:2])
        assert world.group.members == set(NODES[:2]) and not world.group.why
        assert not world.scout.watches
        world.seats.list(NODES)
        assert world.scout.watches == [(tuple(NODES), tuple(NODES[:2]))]
        assert set(world.group.why.values()) == {"by hash"}
        closed = world.scout.closed
        world.seats.list(NODES[:1])
        assert world.scout.closed == closed + 1 and len(world.scout.watches) == 1

    in_loop(test)


def test_useful_places_are_taken_one_after_the_other_without_another_word_of_the_scout() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        assert world.joined == 1
        world.rank(NODES[5], NODES[7])
        assert world.group.members == {NODES[0], NODES[5]}
        assert world.group.why == {NODES[0]: "by hash", NODES[5]: "by summary: 7 names"}
        await until(lambda: world.group.members == {NODES[5], NODES[7]}, "the other one joins in its time")
        assert world.joined == 3, "what was absent is asked for again each time"
        assert world.scout.watches[-1] == (tuple(NODES), (NODES[5], NODES[7]))

    in_loop(test)


def test_what_is_known_of_a_long_list_does_not_count_for_a_short_one() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        world.rank(NODES[5], itself=[NODES[0]])
        assert NODES[0] not in world.group.members
        world.seats.list(NODES[:2])
        assert world.group.members == set(NODES[:2]) and not world.group.why

    in_loop(test)
