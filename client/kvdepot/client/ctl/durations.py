"""Durations that a histogram has counted, and their percentiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.core.report import HistogramStatus


@dataclass(frozen=True, slots=True)
class Durations:
    """How many took at most each bound in seconds. The last number of `counts` is without a bound: all."""

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def between(cls, before: HistogramStatus | None, after: HistogramStatus) -> Durations:
        """Return what was counted between two looks at a histogram; None: at its beginning."""
        former = before.counts if before is not None else (0,) * len(after.counts)
        grown = zip(after.counts, former, strict=True)
        return cls(after.bounds_seconds, tuple(max(count - less, 0) for count, less in grown))

    def __add__(self, other: Durations) -> Durations:
        """Return what both have counted; without `other` if it has other bounds, of another version of the daemon."""
        if self.bounds_seconds != other.bounds_seconds:
            return self
        return Durations(self.bounds_seconds, tuple(map(sum, zip(self.counts, other.counts, strict=True))))

    @property
    def count(self) -> int:
        return self.counts[-1] if self.counts else 0

    def percentile(self, percent: float) -> float:
        """Return the seconds that so many percent stayed within, by linear interpolation between two bounds.

        As `histogram_quantile` of Prometheus does: the last bound for what took longer. 0 if nothing was counted.
        """
        if not self.count:
            return 0.0
        rank = self.count * percent / 100
        steps = pairwise(((0.0, 0), *zip(self.bounds_seconds, self.counts, strict=False)))
        for (lower, below), (upper, within) in steps:
            if within >= rank and within > below:
                return lower + (upper - lower) * (rank - below) / (within - below)
        return self.bounds_seconds[-1]
