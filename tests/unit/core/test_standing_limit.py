"""How long a unit may stay without a use: what moves the limit of the default policy."""

from __future__ import annotations

import pytest
from kvdepot.core.standing_limit import StandingLimit

KEPT = 0.97


def looked(limit: StandingLimit, looks: int, *, old: int, hits: int, returned: int) -> float:
    """At each look eight candidates were seen, `old` of them old, with hits of old units and returns of evictions."""
    for _ in range(looks):
        for number in range(8):
            limit.see(old=number < old)
        for _ in range(hits):
            limit.hit_old()
        for _ in range(returned):
            limit.come_back()
        limit.adapt(KEPT)
    return limit.worths


def test_it_falls_where_old_units_are_not_hit_and_evicted_ones_come_back() -> None:
    limit = StandingLimit()
    start = limit.worths
    assert looked(limit, 4, old=4, hits=0, returned=4) < start
    assert looked(limit, 40, old=4, hits=0, returned=4) == 2.0


def test_it_rises_again_where_old_units_are_hit() -> None:
    limit = StandingLimit()
    start = limit.worths
    looked(limit, 40, old=4, hits=0, returned=4)
    assert looked(limit, 100, old=4, hits=4, returned=1) == start


@pytest.mark.parametrize(("old", "hits", "returned"), [(0, 0, 8), (4, 0, 0), (4, 1, 4)])
def test_it_stays_without_old_units_without_returns_and_where_both_are_worth_the_same(
    old: int, hits: int, returned: int
) -> None:
    limit = StandingLimit()
    assert looked(limit, 60, old=old, hits=hits, returned=returned) == StandingLimit().worths


def test_a_low_limit_calls_old_what_is_close_to_it() -> None:
    limit = StandingLimit()
    assert limit.old_worths == 2.0
    looked(limit, 40, old=4, hits=0, returned=4)
    assert limit.old_worths == pytest.approx(0.6 * limit.worths)
