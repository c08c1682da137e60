"""Time limits of tests: they hold, and they know the machine."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_runtest_setup
from tests.rigs import patience
from tests.rigs.patience import Deadline, wait_until


def _at_load(monkeypatch: pytest.MonkeyPatch, load_per_cpu: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load_per_cpu * (os.cpu_count() or 1), 0.0, 0.0))


class _Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_time_passes_as_much_slower_as_the_load_says_at_each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    _at_load(monkeypatch, 1.0)
    deadline = Deadline(10.0)
    clock.now += 4
    assert deadline.left() == 6.0
    _at_load(monkeypatch, 15.0)
    assert deadline.left() == 18.0
    clock.now += 12
    assert deadline.left() == 6.0
    _at_load(monkeypatch, 1.0)  # what has passed beside others stays as it was counted
    assert deadline.left() == 2.0
    clock.now += 2
    assert deadline.is_over()


@pytest.mark.parametrize("load_per_cpu, times", [(0.0, 1.0), (5.0, 1.0), (10.0, 2.0), (500.0, 10.0)])
def test_patience_has_a_floor_and_a_ceiling(load_per_cpu: float, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    _at_load(monkeypatch, load_per_cpu)
    assert patience.patience() == times


def test_a_wait_ends_with_the_first_that_is_true_or_says_what_did_not_come() -> None:
    answers = iter([None, 0, "here"])
    wait_until(lambda: next(answers), "an answer", pause_seconds=0.0)
    assert not list(answers)
    with pytest.raises(AssertionError, match=r"not within 0.01 s: it saw 7"):
        wait_until(lambda: False, lambda: "it saw 7", 0.01, pause_seconds=0.001)


@pytest.mark.timeout(1)
def test_the_limit_of_a_test_is_put_off_while_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    _at_load(monkeypatch, 50.0)
    time.sleep(1.3)


@pytest.mark.timeout(1)
def test_the_limit_of_a_test_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _at_load(monkeypatch, 0.0)
    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        time.sleep(30)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "the one that went off is not set again"


def test_a_sample_whose_time_is_over_begins_no_test_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    config = SimpleNamespace(stash=pytest.Stash(), getoption={"--begin-within": 150.0}.__getitem__)
    item: Any = SimpleNamespace(config=config)
    pytest_runtest_setup(item)
    clock.now += 150
    pytest_runtest_setup(item)
    clock.now += 1
    with pytest.raises(pytest.skip.Exception, match="the sample's 150 s are over"):
        pytest_runtest_setup(item)
