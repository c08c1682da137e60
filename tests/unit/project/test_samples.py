"""Of the long tests, which a sample has, and of a test's cases, which `make test` has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.rigs import seeds
from tests.rigs.seeds import one_in


class Case:
    def __init__(self, name: str, **said: object) -> None:
        self.nodeid = name
        self.get_closest_marker = {"long": pytest.mark.long(**said).mark if said else None}.get


def sample(seconds: float | None, items: list[Any]) -> list[str]:
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(hook=hook, getoption={"--sample-seconds": seconds}.__getitem__)
    names = {item.nodeid for item in items}
    conftest.pytest_collection_modifyitems(config, items)
    assert names == {item.nodeid for item in [*items, *left]}
    return [item.nodeid for item in items]


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_takes_what_it_has_time_for_and_a_case_of_each_test_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "RUN_SEED", seed)
    several = [Case(f"several[{number}]", seconds=10) for number in range(9)]
    taken = sample(40, [*several, Case("one", seconds=20), Case("whole", seconds=41)])
    assert "one" in taken and len(taken) == 3


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_has_what_belongs_to_each(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "RUN_SEED", seed)
    others = [Case(f"other_{number}", seconds=20) for number in range(9)]
    taken = sample(60, [*others, Case("soak[60]", seconds=40, always=True), Case("soak[300]", seconds=300)])
    assert taken[0] == "soak[60]" and len(taken) == 2


def test_samples_of_two_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for seed in range(9):
        monkeypatch.setattr(conftest, "RUN_SEED", seed)
        drawn.update(sample(60, [Case(f"test_{number}") for number in "abc"] + [Case("long", seconds=61)]))
        drawn.update(sample(30, [Case(f"test_{number}", seconds=30) for number in "def"]))
    assert drawn == {f"test_{number}" for number in "abcdef"}


def test_without_a_time_there_is_no_sample() -> None:
    assert sample(None, [Case("one", seconds=1000)]) == ["one"]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_of_each_few_cases_one_is_drawn_and_the_others_are_long(
    number: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = set[object]()
    for seed in range(40):
        monkeypatch.setattr(seeds, "RUN_SEED", seed)
        params = one_in(number, range(count), 7)
        assert [param.values for param in params] == [(value,) for value in range(count)]
        for first in range(0, count, number):
            group = params[first : first + number]
            (one,) = [param for param in group if not param.marks]
            assert all(mark.kwargs == {"seconds": 7} for param in group if param is not one for mark in param.marks)
            drawn.update(one.values)
    assert drawn == set(range(count))
