"""How the source gathers for summaries: in slices, seldom, and for each tenant alone (ADR 85)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from kvdepot.server.daemon.peer_summaries import SLICE, PeerSummaries
from kvdepot.server.io.peer_wire import Gathered, SummaryWords
from kvdepot.server.platform.guard import Guard
from kvdepot.server.platform.paced import Paced

from tests.rigs.patience import until

ARENA = 9


class Chunks:
    """Each row has its number as word. `fails`: the second slice raises."""

    places = 3 * SLICE

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.fails = False

    def chunks(self, tenant: str | None) -> Chunks:
        self.asked.append(tenant)
        return self

    def words(self, start: int, stop: int) -> Any:
        if self.fails and start:
            raise RuntimeError("damaged")
        return np.arange(start, stop, dtype=np.uint64)


class World:
    def __init__(self, every_seconds: float = 600.0) -> None:
        loop = asyncio.get_running_loop()
        self.chunks = Chunks()
        self.sent: list[SummaryWords] = []
        self.gathered: list[Gathered] = []
        self.unsent = False
        guard = Guard(lambda _: None, logging.getLogger("tests.summaries"))
        leases: Any = self.chunks
        self.summaries = PeerSummaries(
            leases, self.sent.append, unsent=lambda: self.unsent, arena_id=ARENA, questions=Paced(0.2, loop),
            loop=loop, guard=guard, every_seconds=every_seconds,
        )  # fmt: skip

    def ask(self, tenant: str | None = None) -> bool:
        return self.summaries.ask(tenant, self.gathered.append)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_the_loop_does_other_things_between_slices() -> None:
    async def test() -> None:
        world = World()
        assert world.ask()
        assert len(world.sent) == 1, "one slice for each turn"
        await asyncio.sleep(0)
        assert len(world.sent) == 2 and not world.gathered
        await until(lambda: world.gathered, "all of it is gathered")
        assert [(one.first, one.last) for one in world.sent] == [(True, False), (False, False), (False, True)]
        words = np.frombuffer(b"".join(one.words for one in world.sent), "<u8")
        assert words.tolist() == list(range(Chunks.places))
        assert world.gathered == [Gathered(0, ARENA)]

    in_loop(test)


def test_the_next_slice_waits_until_the_last_one_is_sent() -> None:
    async def test() -> None:
        world = World()
        world.unsent = True
        world.ask()
        await asyncio.sleep(0.05)
        assert len(world.sent) == 1
        world.unsent = False
        await until(lambda: world.gathered, "it continues")

    in_loop(test)


def test_it_gathers_once_for_all_that_ask_within_a_time_and_for_each_tenant() -> None:
    async def test() -> None:
        world = World()
        assert world.ask("a") and not world.ask("a"), "who asks meanwhile waits for the same"
        assert world.ask("b")
        await until(lambda: len(world.gathered) == 3, "all have an answer")
        assert not world.ask("a")
        assert sorted(one.tenant for one in world.gathered) == [0, 0, 0, 1]
        assert world.chunks.asked == ["a", "b"]
        assert {one.tenant for one in world.sent} == {0, 1}

    in_loop(test)


def test_it_gathers_again_after_that_time() -> None:
    async def test() -> None:
        world = World(every_seconds=0.0)
        for times in (1, 2):
            assert world.ask()
            await until(lambda: len(world.gathered) == times, "it is gathered")  # noqa: B023
        assert world.chunks.asked == [None, None]

    in_loop(test)


def test_the_next_process_gets_all_words_and_none_of_before() -> None:
    async def test() -> None:
        world = World()
        world.ask()
        world.summaries.forget()
        world.sent.clear()
        assert world.ask()
        await until(lambda: world.gathered, "it is gathered")
        assert [one.first for one in world.sent] == [True, False, False]
        assert len(world.gathered) == 1

    in_loop(test)


def test_a_defect_costs_an_answer_and_the_next_question_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = World()
        world.chunks.fails = True
        world.ask()
        await until(lambda: "damaged" in caplog.text, "it is logged")
        assert not world.gathered
        world.chunks.fails = False
        assert world.ask()
        await until(lambda: world.gathered, "it is gathered")

    in_loop(test)
