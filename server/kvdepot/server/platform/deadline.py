"""A deadline of another process, for which only the time counts in which this one ran.

A daemon that was stopped (SIGSTOP, a cgroup freezer as of `docker pause`) finds all of its timers due when it
continues. What it waits for may have been stopped, too, and has not run since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVarTuple

STILL_SECONDS: Final = 1.0
"""A timer that is later than that was not late for work: the process stood still, or its host did."""
_STOPS_MAX: Final = 3
"""A process that stood still whenever it looked is too busy. What it waits for still has to end."""
Arguments = TypeVarTuple("Arguments")


class Deadline:
    """Calls `missed` once, on the loop's thread, unless it is cancelled before."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, missed: Callable[[*Arguments], object],
        *arguments: *Arguments,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._seconds = seconds
        self._missed: Callable[[], object] = lambda: missed(*arguments)
        self.began_at = loop.time()
        self._stops_left = _STOPS_MAX
        self._timer = loop.call_later(seconds, self._due)

    def cancel(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        """Wait for as long as this process stood still, or for the whole time if that was longer."""
        late_seconds = self._loop.time() - self._timer.when()
        if late_seconds > STILL_SECONDS and self._stops_left:
            self._stops_left -= 1
            self._timer = self._loop.call_later(min(late_seconds, self._seconds), self._due)
        else:
            self._missed()
