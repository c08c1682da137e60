"""Counters, which never decrease, by name and label."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from kvdepot.core.report import HistogramStatus

BUCKETS_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """A histogram of durations: the buckets of `BUCKETS_SECONDS`, and one more for what took longer."""

    __slots__ = ("_counts", "sum_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count an observation. A value below 0 s counts as 0 s."""
        self._counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += max(seconds, 0.0)

    def cumulative(self) -> list[int]:
        """Return how many took at most each bound. The last number is without a bound."""
        return list(accumulate(self._counts))


class Counters:
    """Monotonic figures; names are `family`, `family.label` or `family.first/second` (a tier, and a reason or outcome).

    `kvdepot.server.observe.metric_families` says what each is, and with which labels it is shown.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Increase a counter. Raise ValueError when `amount` is negative: a counter never decreases (row P10)."""
        if amount < 0:
            raise ValueError(f"counter {name}: {amount} would make it decrease")
        self._values[name] = self._values.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Count an observation in the histogram of this name."""
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = Histogram()
        histogram.observe(seconds)

    def get(self, name: str) -> float:
        return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        return dict(self._values)

    def histograms(self) -> Mapping[str, Histogram]:
        return self._histograms

    def histogram_statuses(self) -> tuple[HistogramStatus, ...]:
        """Return all histograms as operators see them."""
        return tuple(
            HistogramStatus(name, BUCKETS_SECONDS, tuple(histogram.cumulative()))
            for name, histogram in self._histograms.items()
        )
