"""How much longer things may take on a machine that does other things as well.

No test fails because its machine is busy. Whatever a test waits for, it waits for with one of these.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

_LOAD_PER_CPU: Final = 5.0
"""What a run makes by itself, and room: up to it everything has the time that it is given."""
_TIMES_MAX: Final = 10.0
WAIT_SECONDS: Final = 60.0
"""For what takes milliseconds, or at most a few seconds, on a quiet machine."""


def patience() -> float:
    """How many times as long things may take now: at least 1. By the load of the last minute.

    A wait that lasts asks again and again (`Deadline`).
    """
    try:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 1.0
    return min(max(1.0, load / _LOAD_PER_CPU), _TIMES_MAX)


def patient(seconds: float) -> float:
    """For the wait of one call, which cannot look again: by the load at its beginning."""
    return seconds * patience()


class Deadline:
    """So many seconds of a machine that does nothing else. On a busy one they pass as much slower as the load says."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen_at = time.monotonic()

    def left(self) -> float:
        """In seconds of the wall clock, at the load of this moment. It may be negative."""
        now, times = time.monotonic(), patience()
        self._left -= (now - self._seen_at) / times
        self._seen_at = now
        return self._left * times

    def is_over(self) -> bool:
        return self.left() <= 0


def wait_until(
    condition: Callable[..., object], what: object = "", seconds: float = WAIT_SECONDS, *, pause_seconds: float = 0.01
) -> None:
    """Returns when the condition is true. Raises AssertionError that says `what` is awaited, when time is up.

    `what` may be a function: it is called only when the time is up.
    """
    for _ in _looks(condition, what, seconds):
        time.sleep(pause_seconds)


async def until(
    condition: Callable[..., object], what: object = "", seconds: float = WAIT_SECONDS, *, pause_seconds: float = 0.01
) -> None:
    """As `wait_until`, while other tasks of the loop go on."""
    for _ in _looks(condition, what, seconds):
        await asyncio.sleep(pause_seconds)


def _looks(condition: Callable[..., object], what: object, seconds: float) -> Iterator[None]:
    deadline = Deadline(seconds)
    while not condition():
        if deadline.is_over():
            raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        yield
