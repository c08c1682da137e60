"""How long to wait before a process that failed is started again."""

from __future__ import annotations

from typing import Final

SECONDS_MIN: Final = 0.1
SECONDS_MAX: Final = 30.0
STABLE_SECONDS: Final = 10.0
"""A process that has run for longer was no failed start: the next pause is short again."""


class Backoff:
    """Pauses that double from SECONDS_MIN to SECONDS_MAX."""

    def __init__(self) -> None:
        self._seconds = SECONDS_MIN

    def ran(self, seconds: float) -> None:
        """Note how long a process ran that has ended."""
        if seconds > STABLE_SECONDS:
            self._seconds = SECONDS_MIN

    def next_seconds(self) -> float:
        """Return the pause from now. The one after it is twice as long."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, SECONDS_MAX)
        return seconds
