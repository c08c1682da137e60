"""How long to wait before a start, or a lane to a peer, that failed is tried again."""

from __future__ import annotations

from typing import Final

SECONDS_MIN: Final = 0.1
SECONDS_MAX: Final = 30.0
STABLE_SECONDS: Final = 10.0
"""A process that has run for longer was no failed start: the next pause is short again."""


class Backoff:
    """Pauses that double from the least to the most."""

    def __init__(self, seconds_min: float = SECONDS_MIN, seconds_max: float = SECONDS_MAX) -> None:
        self._seconds_min = seconds_min
        self._seconds_max = seconds_max
        self._seconds = seconds_min

    def ran(self, seconds: float) -> None:
        """Note how long a process ran that has ended."""
        if seconds > STABLE_SECONDS:
            self._seconds = self._seconds_min

    def next_seconds(self) -> float:
        """Return the pause from now. The one after it is twice as long."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, self._seconds_max)
        return seconds
