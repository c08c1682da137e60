"""Rates between two looks at a daemon, over its restart too."""

from __future__ import annotations

from kvdepot.client.ctl.rates import Rates
from kvdepot.core.report import DaemonStatus


def look(uptime_seconds: float, pid: int = 1, **counters: float) -> DaemonStatus:
    found = {name.replace("__", "."): value for name, value in counters.items()}
    return DaemonStatus("0", pid, uptime_seconds, True, "", 7, pid, counters=found)


def test_what_grew_is_told_a_second_the_fastest_first() -> None:
    before = look(10.0, locates=5.0, misses__evicted=1.0)
    rates = Rates.between(before, look(14.0, locates=25.0, misses__evicted=3.0, misses__lost=8.0, acquires=0.0))
    assert (rates.seconds, rates.of("locates"), rates.of("acquires"), rates.of("unheard")) == (4.0, 5.0, 0.0, 0.0)
    assert list(rates.by_label("misses.").items()) == [("lost", 2.0), ("evicted", 0.5)]


def test_a_daemon_that_started_anew_is_counted_from_its_start() -> None:
    rates = Rates.between(look(100.0, locates=1000.0), look(2.0, pid=2, locates=10.0))
    assert (rates.seconds, rates.of("locates")) == (2.0, 5.0)


def test_two_answers_of_one_moment_are_no_rate() -> None:
    assert Rates.between(look(3.0), look(3.0, locates=4.0)).of("locates") == 0.0
