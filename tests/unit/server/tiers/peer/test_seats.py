"""The list, the scout and the group of a tier together: who joins, who is watched, and when nobody is (ADR 85)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
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
        self.wanted: list[Sequence[str]] = []
        self.finds: list[tuple[Sequence[str], Callable[[Sequence[Useful]], None]]] = []
        self.closed = 0
        self.arenas: dict[int, Place] = {}

    def place_of(self, arena_id: int) -> Place | None:
        return self.arenas.get(arena_id)

    def watch(self, places: Sequence[Place], members: Sequence[Place]) -> None:
        self.watches.append((places, members))

    def want(self, files: Sequence[str]) -> None:
        self.wanted.append(files)

    def find(self, files: Sequence[str], found: Callable[[Sequence[Useful]], None]) -> None:
        self.finds.append((files, found))

    def finds_at(self, *places: Place) -> None:
        self.finds.pop(0)[1]([Useful(At(*place), 7) for place in places])

    def close(self) -> None:
        self.closed += 1


class Group:
    def __init__(self) -> None:
        self.why: Mapping[Place, str] = {}
        self.members: set[Place] = set()
        self.spare = False
        self.expected: list[tuple[Place, int]] = []

    def expect(self, place: Place, source_id: int) -> bool:
        assert place in self.members
        self.expected.append((place, source_id))
        return True

    def has_spare(self) -> bool:
        return self.spare

    def use(self, places: Iterable[Place], why: Mapping[Place, str], *, spare: bool) -> bool:
        new = set(places) - self.members
        self.members, self.why, self.spare = set(places), why, spare
        return bool(new)


class World:
    """A choice by the number of the node, with seats for two."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.joined = 0
        self.found: list[Place | None] = []
        self.busy: set[Place] = set()
        self.counts: Counter[str] = Counter()
        self.group = Group()
        group: Any = self.group
        choice = Choice(
            2, order=lambda place: place[0].encode(), busy=self.busy.__contains__, clock=loop.time,
            exchange_seconds=0.05,
        )  # fmt: skip
        made: Any = Scout
        self.seats = Seats(
            choice, group, made, most=2, loop=loop, joined=self._joined, count=self._count,
            guard=Guard(lambda _: None, logging.getLogger("tests.seats")),
        )  # fmt: skip
        self.scout: Any = self.seats.scout

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)

    def _joined(self) -> None:
        self.joined += 1

    def seek(self) -> None:
        self.seats.seek(["x"], self.found.append)

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


def test_a_place_that_may_have_what_is_missing_joins_at_once_and_has_a_seat_if_it_has_it() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        joined = world.joined
        world.seek()
        world.scout.finds_at(NODES[5], NODES[6])
        assert world.found == [NODES[5]] and world.group.members == {*NODES[:2], NODES[5]}
        assert world.group.why[NODES[5]] == "by lookup: 7 names"
        assert world.scout.watches[-1] == (tuple(NODES), (*NODES[:2], NODES[5]))
        assert world.joined == joined, "it is not known yet what it has"
        world.seats.judge(NODES[5], useful=True)
        world.seats.judge(NODES[5], useful=False)
        assert world.group.members == {NODES[0], NODES[5]} and world.joined == joined + 1, "it is known already"
        assert world.counts == {"peer_guests.useful": 1}

    in_loop(test)


def test_a_guest_that_has_nothing_leaves_and_the_next_best_is_asked_instead() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        joined = world.joined
        world.seek()
        world.scout.finds_at(NODES[5], NODES[6])
        world.seats.judge(NODES[5], useful=False)
        assert world.group.members == set(NODES[:2]) and world.joined == joined
        assert world.counts == {"peer_guests.useless": 1}
        world.seek()
        world.scout.finds_at(NODES[5], NODES[6])
        assert world.found == [NODES[5], NODES[6]]
        world.seek()
        world.scout.finds_at()
        assert world.found[-1] is None

    in_loop(test)


def test_the_scout_is_not_asked_while_nobody_could_join() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        for guest in NODES[5:8]:
            world.busy.add(guest)
            world.seek()
            world.scout.finds_at(guest)
            world.seats.judge(guest, useful=True)
        assert world.group.members == set(NODES[5:8])
        world.seek()
        assert world.found == [*NODES[5:8], None] and not world.scout.finds

    in_loop(test)


def test_a_spare_is_kept_while_another_peer_could_join() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES[:2])
        assert not world.group.has_spare(), "all listed peers have joined"
        world.seats.list(NODES)
        assert world.group.has_spare()
        world.seek()
        world.scout.finds_at(NODES[5])
        assert not world.group.has_spare()
        world.seats.judge(NODES[5], useful=True)
        assert world.group.has_spare()

    in_loop(test)


def test_a_place_that_a_request_names_joins_and_stays_although_it_has_nothing_yet() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        world.scout.arenas = {57: NODES[6], 58: NODES[0], 59: ("10.9.9.9", 7448)}
        joined = world.joined
        assert not world.seats.named(56), "nobody has it"
        assert not world.seats.named(59), "it is not listed"
        assert world.seats.named(57) and world.group.expected == [(NODES[6], 57)]
        assert NODES[6] in world.group.members and len(world.group.members) == 2, "a useless one has left"
        assert world.group.why[NODES[6]] == "by name"
        assert world.joined == joined + 1 and world.counts == {"peer_guests.named": 1}
        world.seats.judge(NODES[6], useful=False)
        assert NODES[6] in world.group.members, "the engine there may still be storing"
        assert world.seats.named(57) and world.seats.named(58) and world.joined == joined + 1, "they are members"

    in_loop(test)


def test_no_place_joins_by_name_while_all_seats_are_useful() -> None:
    async def test(world: World) -> None:
        world.seats.list(NODES)
        world.rank(NODES[0], NODES[1])
        world.scout.arenas = {57: NODES[6], 58: NODES[7]}
        assert world.seats.named(57) and len(world.group.members) == 3
        assert not world.seats.named(58) and NODES[7] not in world.group.members

    in_loop(test)


def test_the_scout_is_told_of_each_lookup() -> None:
    async def test(world: World) -> None:
        world.seats.asked(["x"])
        assert world.scout.wanted == [["x"]]

    in_loop(test)
