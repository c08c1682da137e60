"""The daemon's memory of its counters: growth of the asked time, bounded, and shared while nothing changes."""

from __future__ import annotations

import pytest
from kvdepot.core.health import DAY, HOUR, MINUTES_15
from kvdepot.core.report import DaemonStatus
from kvdepot.core.verdict import Verdict
from kvdepot.server.depot.counters import Counters
from kvdepot.server.observe.verdicts import SAMPLE_SECONDS, History, Verdicts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_growth_is_that_of_the_asked_time_and_of_what_is_asked_for() -> None:
    clock = Clock()
    history = History(["faults"], HOUR, clock)
    figures = {"faults": {"a": 0.0, "b": 5.0}, "others": {"": 1.0}}
    assert history.growth(figures, "faults", MINUTES_15) == {"b": 5.0}, "since the start"
    for minute in range(120):
        clock.now += SAMPLE_SECONDS
        assert history.due
        figures["faults"]["a"] = minute + 1.0
        history.note(figures)
        assert not history.due
    assert history.growth(figures, "faults", MINUTES_15) == {"a": 15.0}
    assert history.growth(figures, "faults", HOUR) == {"a": 60.0}
    assert len(history._samples) <= HOUR / SAMPLE_SECONDS + 2


def test_equal_samples_are_one_object_however_long_they_are_kept() -> None:
    clock = Clock()
    history = History(["faults"], DAY, clock)
    for _ in range(3000):
        clock.now += SAMPLE_SECONDS
        history.note({"faults": {f"tier{number}/corrupt": 1.0 for number in range(9)}})
    assert len({id(sample) for _, sample in history._samples}) == 1
    assert len(history._samples) <= DAY / SAMPLE_SECONDS + 2


@pytest.mark.requirement("O1")
def test_a_fault_is_in_the_verdict_for_its_time_and_then_forgotten() -> None:
    clock, counters = Clock(), Counters()
    verdicts = Verdicts(counters, clock)

    def verdict() -> Verdict:
        status = DaemonStatus("1", 1, 1.0, True, "", 1, 1, counters=counters.snapshot())
        return verdicts.health(status).verdict

    assert verdict() is Verdict.OK
    counters.add("tier_damaged_objects.nvme/corrupt")
    assert verdict() is Verdict.ERR, "at once"
    for minutes, expected in ((50, Verdict.ERR), (15, Verdict.OK)):
        for _ in range(minutes):
            clock.now += SAMPLE_SECONDS
            verdicts.note()
        assert verdict() is expected


@pytest.mark.requirement("O1")
def test_late_ticks_of_the_loop_are_counted_from_its_histogram() -> None:
    clock, counters = Clock(), Counters()
    verdicts = Verdicts(counters, clock)
    for number in range(1000):
        counters.observe("loop_lag_seconds", 0.3 if number % 50 == 0 else 0.001)
    status = DaemonStatus("1", 1, 1.0, True, "", 1, 1, counters=counters.snapshot())
    (problem,) = verdicts.health(status).problems
    assert (problem.code, problem.message[:4]) == ("LOOP_LATE", "2 % ")
