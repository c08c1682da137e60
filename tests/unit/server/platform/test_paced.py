"""Calls that take a share of the loop's time: in order, at once while there are few, and never more than the share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kvdepot.server.platform.paced import BURST_SECONDS, Paced

SHARE = 0.25
CALL_SECONDS = 0.01


class Loop:
    """A loop whose time passes while calls compute, and until the next timer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Loop:
        self.timer = self.now + seconds, call
        return self

    def cancel(self) -> None:
        self.timer = None

    def pass_seconds(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timer is not None and self.timer[0] <= until:
            at, call = self.timer
            self.timer = None
            self.now = max(self.now, at)
            call()
        self.now = max(self.now, until)


class World:
    def __init__(self) -> None:
        self.loop = Loop()
        self.paced = Paced(SHARE, cast("Any", self.loop), cpu_clock=lambda: self.loop.cpu)
        self.done: list[int] = []

    def ask(self, *numbers: int, waits_seconds: float = 0.0) -> None:
        for number in numbers:
            self.paced.call(lambda number=number: self._work(number, waits_seconds))  # type: ignore[misc]

    def _work(self, number: int, waits_seconds: float) -> None:
        self.done.append(number)
        self.loop.cpu += CALL_SECONDS
        self.loop.now += CALL_SECONDS + waits_seconds


def test_a_few_calls_are_done_at_once() -> None:
    world = World()
    world.ask(*range(5))
    assert world.done == [0, 1, 2, 3, 4] and world.loop.timer is None


def test_many_calls_take_their_share_and_keep_their_order() -> None:
    world = World()
    world.ask(*range(1000))
    world.loop.pass_seconds(10.0)
    assert world.done == list(range(len(world.done)))
    assert 0.9 * SHARE * 10.0 <= len(world.done) * CALL_SECONDS <= SHARE * 10.0 + BURST_SECONDS + 2 * CALL_SECONDS
    world.loop.pass_seconds(100.0)
    assert len(world.done) == 1000
    world.ask(-1)
    assert world.done[-1] == -1, "after a while without calls"


def test_time_in_which_others_had_the_processor_is_not_counted() -> None:
    world = World()
    world.ask(*range(5), waits_seconds=1.0)
    assert len(world.done) == 5


def test_calls_that_were_cleared_are_never_made() -> None:
    world = World()
    world.ask(*range(100))
    done = len(world.done)
    world.paced.clear()
    world.loop.pass_seconds(100.0)
    assert len(world.done) == done < 100
    world.ask(7)
    assert world.done[-1] == 7
