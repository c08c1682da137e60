"""Percentiles of what a histogram has counted, and its growth."""

from __future__ import annotations

import pytest
from kvdepot.client.ctl.durations import Durations
from kvdepot.core.report import HistogramStatus

BOUNDS = (0.01, 0.1, 1.0)


@pytest.mark.parametrize(
    ("counts", "percent", "seconds"),
    [
        ((10, 10, 10, 10), 50, 0.005),
        ((0, 10, 10, 10), 50, 0.055),
        ((0, 0, 0, 4), 99, 1.0),
        ((99, 99, 100, 100), 99, 0.01),
        ((90, 90, 100, 100), 95, 0.55),
        ((0, 0, 0, 0), 50, 0.0),
    ],
)
def test_a_percentile_is_interpolated_between_the_bounds(
    counts: tuple[int, ...], percent: float, seconds: float
) -> None:
    assert Durations(BOUNDS, counts).percentile(percent) == pytest.approx(seconds)


def test_growth_is_between_two_looks_and_adds_up() -> None:
    first, second = HistogramStatus("h", BOUNDS, (1, 2, 3, 4)), HistogramStatus("h", BOUNDS, (2, 4, 6, 9))
    begun, grown = Durations.between(None, first), Durations.between(first, second)
    assert (begun.counts, grown.counts, (begun + grown).counts) == ((1, 2, 3, 4), (1, 2, 3, 5), (2, 4, 6, 9))
    assert (begun.count, grown.count) == (4, 5)


def test_a_version_with_other_bounds_is_not_added() -> None:
    now, before = Durations(BOUNDS, (1, 1, 1, 1)), Durations((5.0,), (7, 7))
    assert now + before == now
