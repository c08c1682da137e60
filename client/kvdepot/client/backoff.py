"""Waiting times between attempts: exponential, jittered, bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """Yields the seconds to wait before the next attempt; `reset` after a success.

    Full jitter between half and all of the step, so that the engines of a node do not come back together.
    """

    def __init__(self, first_seconds: float, max_seconds: float, random: Callable[[], float]) -> None:
        """`random` answers in [0, 1)."""
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._random = random
        self._step_seconds = first_seconds

    def next_seconds(self) -> float:
        step = self._step_seconds
        self._step_seconds = min(step * 2, self._max_seconds)
        return step * (0.5 + 0.5 * self._random())

    def reset(self) -> None:
        self._step_seconds = self._first_seconds
