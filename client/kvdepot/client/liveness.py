"""Disables an unresponsive daemon: one that is stopped or hung, while its sockets still accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class LivenessBreaker:
    """Opens when several calls in a row, over some time, were not answered; any answer closes it.

    While open, calls fail at once instead of each waiting for its deadline; its owner probes.
    """

    def __init__(self, failures_max: int, seconds_min: float, clock: Callable[[], float]) -> None:
        """`seconds_min`: a burst of short deadlines on a busy machine is no silence."""
        self._failures_max = failures_max
        self._seconds_min = seconds_min
        self._clock = clock
        self._failures = 0
        self._since = 0.0
        self.open = False

    def unanswered(self) -> bool:
        """Note a call that ran into its deadline. Return True if it opened the breaker."""
        if not self._failures:
            self._since = self._clock()
        self._failures += 1
        silent = self._failures >= self._failures_max and self._clock() - self._since >= self._seconds_min
        opened = silent and not self.open
        self.open = self.open or silent
        return opened

    def answered(self) -> None:
        self._failures = 0
        self.open = False
