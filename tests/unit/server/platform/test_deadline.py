"""Deadlines of other processes, where this one stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.server.platform import deadline
from kvdepot.server.platform.deadline import Deadline

from tests.rigs.patience import until

STILL = deadline.STILL_SECONDS + 1.0


def _stand_still() -> None:
    time.sleep(STILL)


def test_a_deadline_is_missed_once_with_its_arguments() -> None:
    async def run() -> None:
        missed: list[tuple[str, int]] = []
        Deadline(asyncio.get_running_loop(), 0.01, lambda name, number: missed.append((name, number)), "job", 1)
        await until(lambda: bool(missed), "it is missed")
        assert missed == [("job", 1)]

    asyncio.run(run())


def test_a_cancelled_deadline_is_not_missed_also_after_a_stop() -> None:
    async def run() -> None:
        missed: list[int] = []
        one = Deadline(asyncio.get_running_loop(), 0.01, missed.append, 1)
        _stand_still()
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.sleep(0.1)
        assert not missed

    asyncio.run(run())


def test_an_answer_counts_that_comes_when_the_process_continues() -> None:
    """What is waited for was stopped as well, and had no time to answer."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        missed: list[int] = []
        one = Deadline(loop, 0.5, missed.append, 1)
        _stand_still()
        await asyncio.sleep(0.05)
        assert not missed
        began = one.began_at
        await until(lambda: bool(missed), "it never comes")
        assert loop.time() - began > STILL + 0.4
        assert missed == [1]

    asyncio.run(run())


class _LateLoop:
    """A loop on which every timer is late by as much."""

    def __init__(self, late_seconds: float) -> None:
        self.now = 0.0
        self._late_seconds = late_seconds
        self._when: float | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self._when, self._call = self.now + seconds, call
        return self

    def when(self) -> float:
        assert self._when is not None
        return self._when

    def turn(self) -> None:
        self.now = self.when() + self._late_seconds
        self._call()


@pytest.mark.requirement("I4")
def test_a_loop_that_is_always_late_misses_its_deadlines_all_the_same() -> None:
    loop: Any = _LateLoop(STILL)
    missed: list[float] = []
    Deadline(loop, 10.0, lambda: missed.append(loop.now))
    for _ in range(20):
        if not missed:
            loop.turn()
    assert missed and missed[0] < 3 * 10.0
