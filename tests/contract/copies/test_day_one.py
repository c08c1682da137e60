"""The correctness half of the day-one kit, on a stand-in and, with the marker `gpu`, on a CUDA device.

A machine for that may lack vLLM, so nothing here imports it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.runs import Runs

from benchmarks.day_one.byte_steps import copy_layers
from benchmarks.day_one.golden import golden_cases
from benchmarks.day_one.kit import STEPS, run_step
from benchmarks.day_one.machine import Machine, machine_of
from benchmarks.day_one.stand_in import QueuedDevice, StandIn
from benchmarks.day_one.steps import Result, Status, Step
from tests.rigs.patience import patient
from tests.rigs.seeds import RUN_SEED

CORRECTNESS = [step for step in STEPS if 1 <= step.number <= 5]


# The rehearsal (tests/unit/project/test_day_one.py) runs drawn cases of each step on a stand-in in each sample.
@pytest.fixture(params=[pytest.param("stand-in", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = machine_of(stand_in=request.param == "stand-in")
    yield made
    made.close()


def result_of(step: Step, machine: Machine, out: Path) -> Result:
    return run_step(step, machine, out, RUN_SEED, time.monotonic() + patient(110), step.share)


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("step", CORRECTNESS, ids=lambda step: step.title)
def test_a_step_passes(machine: Machine, step: Step, tmp_path: Path) -> None:
    result = result_of(step, machine, tmp_path)
    assert result.status is Status.PASSED, result.reason
    if step.number == 2 and machine.stands_in:
        assert result.report.record()["cases"] == len(Way) * len(golden_cases())


class WrongDevice(QueuedDevice):
    """Does everything but the last byte of each transfer."""

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        lengths = runs.lengths.copy()
        lengths[-1] -= 1
        super().transfer(direction, Runs(runs.sources, runs.targets, lengths), pinned=pinned)


class HastyDevice(QueuedDevice):
    """Copies without waiting for the engine."""

    def run_after(self, mark: object) -> None: ...


class FaultyMachine(StandIn):
    def __init__(self, device: type[QueuedDevice]) -> None:
        super().__init__()
        self._faulty = device

    def copies(self) -> QueuedDevice:
        return self._faulty(self._engine)


@pytest.mark.parametrize(("device", "number"), [(WrongDevice, 1), (WrongDevice, 2), (HastyDevice, 3)])
def test_a_step_finds_the_fault_it_is_for(device: type[QueuedDevice], number: int, tmp_path: Path) -> None:
    machine = FaultyMachine(device)
    result = result_of(STEPS[number], machine, tmp_path)
    machine.close()
    assert result.status is Status.WRONG, result


def test_a_rank_whose_copies_are_wrong_refuses(tmp_path: Path) -> None:
    machine = FaultyMachine(WrongDevice)
    result = result_of(STEPS[4], machine, tmp_path)
    machine.close()
    assert (result.status, "self-test" in result.reason) == (Status.FAILED, True), result


def test_a_step_whose_time_is_over_has_not_passed(tmp_path: Path) -> None:
    machine = StandIn()
    result = run_step(Step(1, "late", 1.0, copy_layers), machine, tmp_path, RUN_SEED, time.monotonic() - 1, 1.0)
    machine.close()
    assert (result.status, "0 of" in result.reason) == (Status.NOT_RUN, True), result
