"""The breaker: when a path goes out of use, and what brings it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.server.io.breaker import Breaker, BreakerState, Done


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, failures_max: int = 3) -> Breaker:
    return Breaker(failures_max=failures_max, probe_every_seconds=5.0, clock=clock)


def test_it_opens_after_failures_in_a_row_only() -> None:
    one = breaker(Clock())
    assert [one.failed("a"), one.failed("b")] == [False, False]
    one.worked()
    assert [one.failed("c"), one.failed("d"), one.failed("e")] == [False, False, True]
    assert (one.state, one.reason) == (BreakerState.OPEN, "e")
    assert one.failed("late") is False
    assert one.reason == "e"


def test_only_a_probe_closes_it() -> None:
    clock = Clock()
    one = breaker(clock, 1)
    one.failed("hung")
    one.worked()  # an answer to what was sent before
    assert not one.closed
    assert one.probe_in_seconds == 5.0
    clock.now += 4
    assert one.probe_in_seconds == 1.0
    clock.now += 4
    assert one.probe_in_seconds == 0.0
    one.start_probe()
    one.worked()
    assert one.state is BreakerState.PROBING
    one.probe_failed("still hung")
    assert (one.state, one.reason, one.probe_in_seconds) == (BreakerState.OPEN, "still hung", 5.0)
    one.start_probe()
    one.probe_worked()
    assert (one.closed, one.reason) == (True, "")


def test_the_failures_before_it_opened_are_forgotten_when_it_closes() -> None:
    one = breaker(Clock(), 2)
    one.failed("a")
    one.failed("b")
    one.start_probe()
    one.failed("of something sent before")
    one.probe_worked()
    assert one.failed("c") is False
    assert one.failed("d") is True


@pytest.mark.parametrize(("failures", "seconds"), [(0, 5.0), (3, 0.0), (3, -1.0)])
def test_impossible_settings_are_refused(failures: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="breaker"):
        Breaker(failures_max=failures, probe_every_seconds=seconds, clock=Clock())


@given(st.lists(st.sampled_from(["failed", "worked", "probe_ok", "probe_bad"]), max_size=60), st.integers(1, 4))
def test_it_is_closed_exactly_when_no_run_of_failures_went_unprobed(events: list[str], failures_max: int) -> None:
    one = breaker(Clock(), failures_max)
    run, closed = 0, True
    for event in events:
        if event == "failed":
            run += 1
            opened = closed and run >= failures_max
            assert one.failed("x") is opened
            closed = closed and not opened
        elif event == "worked":
            run = 0 if closed else run
            one.worked()
        elif not closed:
            one.start_probe()
            (one.probe_worked if event == "probe_ok" else lambda: one.probe_failed("y"))()
            closed = event == "probe_ok"
            run = 0 if closed else run
        assert one.closed is closed


def reopened(one: Breaker, clock: Clock, times: int, done: Done = Done.WRITE) -> list[float]:
    """Open it so many times, after probes that worked; how long each probe was waited for."""
    waited = []
    for _ in range(times):
        while one.closed:
            one.failed("permission denied", done)
        waited.append(one.probe_in_seconds)
        clock.now += one.probe_in_seconds
        one.start_probe()
        one.probe_worked()
    return waited


def test_a_probe_that_proves_nothing_is_made_less_and_less_often() -> None:
    clock = Clock()
    one = breaker(clock)
    assert reopened(one, clock, 6) == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert one.openings == 6


def test_a_probe_interval_above_the_longest_stays_as_it_is() -> None:
    clock = Clock()
    one = Breaker(failures_max=1, probe_every_seconds=300.0, clock=clock)
    assert reopened(one, clock, 3) == [300.0, 300.0, 300.0]


@pytest.mark.parametrize("done", [Done.READ, Done.WRITE])
def test_it_is_doubted_from_the_second_opening_in_a_row_until_an_operation_of_that_sort_works(done: Done) -> None:
    clock = Clock()
    one = breaker(clock)
    doubts = []
    for _ in range(2):
        reopened(one, clock, 1, done)
        doubts.append((one.closed, one.doubt))
    assert doubts == [(True, ""), (True, "permission denied")]
    one.worked(Done.READ if done is Done.WRITE else Done.WRITE)
    one.worked(Done.OTHER)
    assert (one.doubt, one.openings) == ("permission denied", 2)
    one.worked(done)
    assert (one.doubt, one.openings) == ("", 0)
    assert reopened(one, clock, 1, done) == [5.0]


def test_what_nobody_uses_is_not_doubted_for_ever() -> None:
    clock = Clock()
    one = breaker(clock)
    reopened(one, clock, 3)
    clock.now += 30
    assert one.doubt
    clock.now += 1
    assert not one.doubt
    assert reopened(one, clock, 1) == [40.0], "it is as it was when it fails again"
    assert one.doubt


def test_reads_that_fail_in_a_row_open_it_although_writes_work_in_between() -> None:
    one = breaker(Clock())
    for number in range(3):
        assert one.failed("io_error", Done.READ) is (number == 2)
        one.worked(Done.WRITE)
    assert not one.closed


def test_writes_that_fail_while_reads_work_leave_it_to_reads() -> None:
    one = breaker(Clock())
    for _ in range(10):
        assert not one.failed("io_error", Done.WRITE)
        one.worked(Done.READ)
