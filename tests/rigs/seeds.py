"""The seed of a run of tests. It is drawn anew for each run and printed; `KVDEPOT_SEED` repeats it."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import pytest
from _pytest.mark import MarkDecorator, ParameterSet

RUN_SEED: Final = int(os.environ.get("KVDEPOT_SEED") or random.SystemRandom().randrange(2**32))
os.environ["KVDEPOT_SEED"] = str(RUN_SEED)  # for the processes of this run that run tests, too


def drawn(numbers: Iterable[int], marks: Collection[MarkDecorator] = ()) -> list[ParameterSet]:
    """Parameters of a test: a seed of this run for each number. A test has the same names in all runs."""
    return [
        pytest.param(random.Random(f"{RUN_SEED} {number}").randrange(2**32), id=str(number), marks=marks)
        for number in numbers
    ]


def one_in(number: int, values: Iterable[object], seconds: float) -> list[ParameterSet]:
    """Parameters of a test: this run draws one of each `number`, and the others are long. All runs have the same names.

    Args:
        seconds: that one case of the test takes.
    """
    every, params = list(values), list[ParameterSet]()
    for first in range(0, len(every), number):
        group = every[first : first + number]
        chosen = random.Random(f"{RUN_SEED} {first} of {len(every)}").randrange(len(group))
        for place, value in enumerate(group):
            params.append(pytest.param(value, marks=[] if place == chosen else [pytest.mark.long(seconds=seconds)]))
    return params


def steps_until(enough: Callable[[], object], steps: int) -> Iterator[int]:
    """Numbers of the steps of a random history: at least so many, and on until it has met what the test is about.

    Raises AssertionError when ten times as many steps have not.
    """
    for number in itertools.count():
        if number >= steps and enough():
            return
        assert number < 10 * steps, "the history has not met what the test is about"
        yield number
