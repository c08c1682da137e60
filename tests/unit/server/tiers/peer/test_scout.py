"""The daemon's end of the scout: what it sends, and what it makes of the answers (ADR 85)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.io.scout_wire import (
    FROM_SCOUT,
    NAMES_MAX,
    PLACES_MAX,
    TO_SCOUT,
    Asked,
    At,
    Find,
    Found,
    Ranked,
    Told,
    Useful,
    Want,
)
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer.scout import Scout, summaries_bytes

from tests.rigs.patience import until

PLACES = [(f"10.0.0.{number}", 7448) for number in range(1, 200)]
AT = At(*PLACES[0])


class Stream:
    """The process, as the test plays it."""

    def __init__(self) -> None:
        self.running = False
        self.unsent = False
        self.sent: list[Any] = []
        self.numbers: list[int] = []
        self.starts = 0

    def start(self, module: str, arguments: Callable[[int], Sequence[object]], *, niceness: int) -> None:
        assert all(isinstance(one, str | int | float) for one in arguments(3))
        self.starts += 1
        self.running = True

    def send(self, data: bytes) -> None:
        for number, message in TO_SCOUT.take(bytearray(data)):
            self.sent.append(message)
            self.numbers.append(number)

    def end(self) -> None:
        self.running = False


class World:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ranked: list[Ranked] = []
        self.found: list[Sequence[Useful]] = []
        self.scout = Scout(
            PeerSettings("", 0, "c", "k", "a", ("DNS:a",), 6.0), name="fleet", arena_id=7, seats=4, every_seconds=30.0,
            bytes_max=1 << 20, loop=asyncio.get_running_loop(), log=logging.getLogger("tests.scout"),
            count=self._count, ranked=self.ranked.append,
        )  # fmt: skip
        self.stream = Stream()
        self.scout._stream = self.stream  # type: ignore[assignment]

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)

    def find(self) -> int:
        """Return the number of the question, 0 if there is none."""
        asked = len(self.stream.sent)
        self.scout.find([f"{number}" for number in range(100)], self.found.append)
        return self.stream.numbers[-1] if len(self.stream.sent) > asked else 0

    def says(self, message: Ranked | Told | Found, number: int = 0) -> None:
        frame = FROM_SCOUT.pack(message, number)
        self.scout._on_data(frame[:5])
        self.scout._on_data(frame[5:])

    def dies(self) -> None:
        self.stream.running = False
        self.scout._on_data(b"")


def in_loop(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await test(world)
        world.scout.close()

    asyncio.run(main())


def test_it_is_told_of_places_once_and_of_no_more_than_it_asks() -> None:
    async def test(world: World) -> None:
        world.scout.want(["x"])
        assert world.stream.sent == [], "nobody is to be asked"
        strange = ("x" * 300, 7448)
        for _ in range(2):
            world.scout.watch([strange, *PLACES], [PLACES[1], strange, PLACES[-1]])
        (watch,) = world.stream.sent
        assert watch.places == tuple(At(*place) for place in PLACES[: PLACES_MAX - 1])
        assert watch.members == (At(*PLACES[1]),)
        assert world.stream.starts == 1

    in_loop(test)


def test_a_lookup_costs_it_few_names_and_none_while_it_has_still_to_take_in_others() -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES, [])
        for count in (1, 63, 64, 65, 250, 256):
            files = [object_file(name_of(number)) for number in range(count)]
            world.stream.sent.clear()
            world.scout.want(files)
            ((want),) = world.stream.sent
            assert isinstance(want, Want)
            names = want.names()
            assert min(count, NAMES_MAX // 2) <= len(names) <= NAMES_MAX
            assert names[0] == files[0] and files.index(names[-1]) >= 0.95 * (count - 1), "from all over the prompt"
        world.stream.sent.clear()
        world.stream.unsent = True
        world.scout.want(["x"])
        assert not world.stream.sent

    in_loop(test)


def test_a_place_is_known_by_the_arena_that_answered_there_last_while_it_is_listed() -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES[:3], [])
        world.says(Told(AT, Asked.NEW, arena_id=99))
        world.says(Told(At(*PLACES[1]), Asked.FAILED, "down"))
        assert world.scout.place_of(99) == PLACES[0] and world.scout.place_of(0) is None
        world.says(Told(AT, Asked.FAILED, "down"))
        assert world.scout.place_of(99) == PLACES[0]
        world.says(Told(AT, Asked.UNCHANGED, arena_id=98))
        assert world.scout.place_of(99) is None and world.scout.place_of(98) == PLACES[0]
        world.scout.watch(PLACES[1:3], [])
        assert world.scout.place_of(98) is None

    in_loop(test)


def test_answers_are_counted_and_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES, [])
        for asked in (Asked.NEW, Asked.UNCHANGED, Asked.FAILED):
            world.says(Told(AT, asked, "down"))
        assert not caplog.records
        for _ in range(3):
            world.says(Told(AT, Asked.REFUSED, "full\n\x1b[2J"))
        (record,) = caplog.records
        assert record.message == "tier fleet: summary of 10.0.0.1:7448 is refused: full\\n\\x1b[2J"
        world.says(Told(AT, Asked.NEW))
        world.says(Told(AT, Asked.REFUSED, "full"))
        assert len(caplog.records) == 2
        assert world.counts["peer_summaries.refused"] == 4 and world.counts["peer_summaries.new"] == 2
        world.says(Ranked((), (AT,)))
        assert world.ranked == [Ranked((), (AT,))]

    in_loop(test)


@pytest.mark.parametrize("how", ["dies", "sends garbage"])
def test_another_one_is_started_and_told_where_to_ask(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES[:3], PLACES[:1])
        before = list(world.stream.sent)
        if how == "dies":
            world.dies()
        else:
            world.scout._on_data(b"\xff" * 64)
        assert not world.stream.running
        await until(lambda: world.stream.starts == 2, "another one is started")
        assert world.stream.sent == 2 * before
        assert "the next one starts in" in caplog.text

    in_loop(test)


def test_nobody_is_started_again_after_the_end() -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES[:3], [])
        world.dies()
        world.scout.close()
        await asyncio.sleep(0.3)
        assert world.stream.starts == 1
        world.scout.use_names(("DNS:b",))
        assert world.stream.starts == 1, "nobody is to be asked"

    in_loop(test)


FOUND = (Useful(AT, 5),)


def test_a_lookup_is_told_who_has_the_first_names_of_it() -> None:
    async def test(world: World) -> None:
        assert world.find() == 0 and world.found == [()], "nobody is to be asked"
        world.scout.watch(PLACES, [])
        first, second = world.find(), world.find()
        assert isinstance(find := world.stream.sent[-1], Find)
        assert find.names() == [f"{number}" for number in range(NAMES_MAX)]
        world.says(Found(()), second)
        world.says(Found(FOUND), first)
        assert world.found == [(), (), FOUND]

    in_loop(test)


def test_no_lookup_waits_for_a_scout_that_is_late_or_has_still_to_take_in_others() -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES, [])
        number = world.find()
        await until(lambda: world.found, "it is answered without the scout")
        assert world.found == [()] and not world.find() and world.found == [(), ()]
        world.says(Found(FOUND), number)
        assert world.found == [(), ()], "each is answered once"
        again = world.find()
        world.says(Found(FOUND), again)
        assert world.found == [(), (), FOUND]
        world.stream.unsent = True
        assert not world.find() and world.found[-1] == ()

    in_loop(test)


@pytest.mark.parametrize("how", ["dies", "close"])
def test_a_lookup_does_not_wait_for_a_scout_that_has_ended(how: str) -> None:
    async def test(world: World) -> None:
        world.scout.watch(PLACES, [])
        world.find()
        getattr(world if how == "dies" else world.scout, how)()
        assert world.found == [()]

    in_loop(test)


def test_summaries_have_a_part_of_ram_with_bounds() -> None:
    assert summaries_bytes(1 << 30) == 16 << 20
    assert summaries_bytes(16 << 30) == 64 << 20
    assert summaries_bytes(1 << 40) == 128 << 20
