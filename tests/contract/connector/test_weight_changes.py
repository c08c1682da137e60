"""Weights that the engine changes in place: no rank copies before the scheduler side knows of a later reset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base.compat import CHANGE_WEIGHTS
from kvdepot.client.vllm.base.metadata import StepMeta
from kvdepot.client.vllm.worker import weight_changes
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.worker import WorkerSide
from kvdepot.core.errors import ConfigError

from tests.fakes.idle_attachment import IdleAttachment


class Copies:
    """What a rank tells its copying thread."""

    def __init__(self) -> None:
        self.allowed = True

    def suspend(self) -> bool:
        self.allowed = False
        return True

    def resume(self) -> None:
        self.allowed = True


class Rank:
    def __init__(self) -> None:
        self.copies = Copies()
        copies: Any = self.copies
        self.side = WorkerSide(0, IdleAttachment(), copies, RankLayers((), ()))
        self._number = 0

    def step(self, resets: int, *, computes: bool = True) -> bool:
        """Return whether it copies then."""
        self._number += 1
        self.side.start_loads(StepMeta(number=self._number, resets=resets, computes=computes))
        return self.copies.allowed


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine's worker, as its module has it."""
    made = type("Worker", (), {name: lambda self, *arguments: arguments for name in CHANGE_WEIGHTS})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=made))
    yield made


@pytest.mark.requirement("I1")
def test_after_a_change_a_later_reset_lets_it_copy_and_nothing_else_does(rank: Rank) -> None:
    assert rank.step(resets=1)
    rank.side.weights_change()
    assert not rank.step(resets=1)
    rank.side.resume()  # KV memory is there; what may be copied is another question
    assert not rank.step(resets=0), "a step without a scheduler side"
    assert not rank.step(resets=1)
    assert rank.step(resets=2)


def test_a_reset_just_before_the_change_is_a_later_one(rank: Rank) -> None:
    """No step computed in between, so no KV of the new epoch is of the former weights."""
    rank.step(resets=1)
    rank.step(resets=2, computes=False)
    rank.side.weights_change()
    assert rank.step(resets=2, computes=False)
    assert rank.step(resets=2)
    rank.side.weights_change()
    assert not rank.step(resets=2)


def test_memory_that_is_away_stays_so_after_a_reset(rank: Rank) -> None:
    rank.side.suspend()
    rank.side.weights_change()
    assert not rank.step(resets=1)
    rank.side.resume()
    assert rank.copies.allowed


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("name", CHANGE_WEIGHTS)
def test_each_way_to_change_weights_is_seen_once_it_begins(rank: Rank, worker: Any, name: str) -> None:
    weight_changes.watch()
    weight_changes.watch()
    weight_changes.tell(rank.side)
    assert getattr(worker(), name)("path") == ("path",)
    assert not rank.copies.allowed


def test_an_engine_that_changes_weights_in_another_way_is_refused(worker: Any) -> None:
    del worker.reload_weights
    with pytest.raises(ConfigError, match="reload_weights"):
        weight_changes.watch()
