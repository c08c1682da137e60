"""Disables a path after failures in a row, and re-enables it after a probe that worked."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

_INTERVAL_SECONDS_MAX: Final = 60.0
_OPENINGS_MIN: Final = 2
DOUBT_SECONDS: Final = 30.0
"""How long something that nobody uses is doubted: an idle tier has no job that could prove it well."""


class Done(StrEnum):
    """What an operation was, as far as its end says something of others."""

    READ = "read"
    WRITE = "write"
    OTHER = "other"  # a probe, a stat: it proves nothing of the two


class BreakerState(StrEnum):
    """Whether a path is enabled, and whether a probe is under way."""

    CLOSED = "closed"  # enabled
    OPEN = "open"  # disabled until the next probe
    PROBING = "probing"  # disabled, one probe under way


class Breaker:
    """The breaker of one path. The clock is injected. The path's owner asks `probe_in_seconds` and runs the probes.

    Only a probe closes an open breaker: what had been sent before it opened may still be answered, and proves nothing.
    If operations fail again after a probe, the probe proved nothing either. Each further opening before an operation of
    that sort worked takes twice as long, and `doubt` says that the path is not well.
    """

    def __init__(self, *, failures_max: int, probe_every_seconds: float, clock: Callable[[], float]) -> None:
        if failures_max < 1 or probe_every_seconds <= 0:
            raise ValueError(f"breaker of {failures_max} failures, a probe every {probe_every_seconds} s")
        self._failures_max = failures_max
        self._probe_every_seconds = probe_every_seconds
        self._clock = clock
        self._failures = 0
        self._failed_reads = 0  # in a row of reads: others may work all the while
        self._opened_by = Done.OTHER
        self._opening_reason = ""
        self._probe_at = 0.0
        self._closed_at = clock()
        self.openings = 0
        """In a row, without an operation that worked in between."""
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
        """Return the time until the next probe of an open breaker; 0 when the probe is due."""
        return max(self._probe_at - self._clock(), 0.0)

    @property
    def doubt(self) -> str:
        """Return why the path is not well although a probe worked: what failed after an earlier probe.

        Empty while all is well.
        """
        if self.openings < _OPENINGS_MIN or (self.closed and self._clock() - self._closed_at > DOUBT_SECONDS):
            return ""
        return self._opening_reason

    def failed(self, reason: str, done: Done = Done.OTHER) -> bool:
        """Count a failed operation. Return whether this failure opened the breaker."""
        self._failures += 1
        self._failed_reads += done is Done.READ
        if not self.closed or max(self._failures, self._failed_reads) < self._failures_max:
            return False
        self.openings += 1
        self._opened_by, self._opening_reason = done, reason
        self._open(reason)
        return True

    def worked(self, done: Done = Done.OTHER) -> None:
        """Count an operation that worked: the failures before it were not in a row."""
        if not self.closed:
            return
        self._failures = 0
        if done is Done.READ:
            self._failed_reads = 0
        if done is self._opened_by or (self._opened_by is Done.OTHER and self.openings):
            self.openings = 0

    def start_probe(self) -> None:
        assert self.state is BreakerState.OPEN
        self.state = BreakerState.PROBING

    def probe_worked(self) -> None:
        assert self.state is BreakerState.PROBING
        self.state = BreakerState.CLOSED
        self._closed_at = self._clock()
        self.probed += 1
        self.reason = ""
        self._failures = self._failed_reads = 0

    def probe_failed(self, reason: str) -> None:
        assert self.state is BreakerState.PROBING
        self._open(reason)

    def _open(self, reason: str) -> None:
        self.state = BreakerState.OPEN
        self.reason = reason
        doubled = self._probe_every_seconds * 2.0 ** min(max(self.openings - 1, 0), 16)
        self._probe_at = self._clock() + min(doubled, max(self._probe_every_seconds, _INTERVAL_SECONDS_MAX))
