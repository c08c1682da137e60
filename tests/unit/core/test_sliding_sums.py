"""Sums over a window: what came before it counts no more, and nothing is subtracted twice."""

from __future__ import annotations

from random import Random

from kvdepot.core.sliding_sums import SlidingSums


def test_sums_are_of_the_window() -> None:
    sums = SlidingSums(120.0, 0.0)
    sums.add(0.0, seen=1, used=1)
    sums.add(60.0, seen=10)
    assert dict(sums.sums(60.0)) == {"seen": 11, "used": 1}
    assert sums.sums(60.0)["never"] == 0
    assert dict(sums.sums(135.0)) == {"seen": 10}
    assert sums.sums(1e6)["seen"] == 0
    sums.add(1e6, seen=3)
    assert sums.sums(1e6)["seen"] == 3


def test_the_seconds_are_those_since_the_start_up_to_the_window() -> None:
    sums = SlidingSums(120.0, 50.0)
    assert sums.seconds(80.0) == 30.0
    sums.add(169.0, seen=1)
    assert sums.seconds(10_000.0) <= 120.0


def test_sums_are_right_whenever_they_are_asked_for() -> None:
    """What is counted late, with an earlier time, counts in the present part: nothing is lost and nothing negative."""
    random, sums, now = Random(1), SlidingSums(120.0, 0.0), 0.0
    added: list[tuple[float, int]] = []
    for _ in range(3000):
        now += random.expovariate(0.5)
        at, amount = now - random.random() * 30, random.randrange(5)
        sums.add(at, seen=amount)
        added.append((at, amount))
        least = sum(amount for at, amount in added if at > now - 120.0)
        most = sum(amount for at, amount in added if at > now - 160.0)
        assert least <= sums.sums(now)["seen"] <= most
