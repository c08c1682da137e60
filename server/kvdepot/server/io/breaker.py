"""What takes a path out of use after failures in a row, and lets it back after a probe that worked."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"  # in use
    OPEN = "open"  # out of use, waiting for the next probe
    PROBING = "probing"  # out of use, one probe under way


class Breaker:
    """One path's. The clock is injected; who owns the path asks `probe_in_seconds` and runs the probes.

    Only a probe closes an open breaker: what had been sent before it opened may still be answered, and proves nothing.
    """

    def __init__(self, *, failures_max: int, probe_every_seconds: float, clock: Callable[[], float]) -> None:
        if failures_max < 1 or probe_every_seconds <= 0:
            raise ValueError(f"breaker of {failures_max} failures, a probe every {probe_every_seconds} s")
        self._failures_max = failures_max
        self._probe_every_seconds = probe_every_seconds
        self._clock = clock
        self._failures = 0
        self._probe_at = 0.0
        self.probed = 0
        """Probes that worked."""
        self.state = BreakerState.CLOSED
        self.reason = ""
        """Of the last failure, while the breaker is not closed."""

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def probe_in_seconds(self) -> float:
        """How long until the next probe of an open breaker; 0 when it is due."""
        return max(self._probe_at - self._clock(), 0.0)

    def failed(self, reason: str) -> bool:
        """An operation failed. True when this opened the breaker."""
        self._failures += 1
        if not self.closed or self._failures < self._failures_max:
            return False
        self._open(reason)
        return True

    def worked(self) -> None:
        """An operation worked: the failures before it were not in a row."""
        if self.closed:
            self._failures = 0

    def start_probe(self) -> None:
        assert self.state is BreakerState.OPEN
        self.state = BreakerState.PROBING

    def probe_worked(self) -> None:
        assert self.state is BreakerState.PROBING
        self.state = BreakerState.CLOSED
        self.probed += 1
        self.reason = ""
        self._failures = 0

    def probe_failed(self, reason: str) -> None:
        assert self.state is BreakerState.PROBING
        self._open(reason)

    def _open(self, reason: str) -> None:
        self.state = BreakerState.OPEN
        self.reason = reason
        self._probe_at = self._clock() + self._probe_every_seconds
