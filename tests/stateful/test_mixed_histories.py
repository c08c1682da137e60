"""Random histories of requests that differ in salt, adapter, pictures and priority, checked byte by byte.

Two engines on one depot take turns of prompts with equal beginnings. What is drawn: salts; adapters, of which one is
loaded again from another path; pictures and their places; priorities; budgets of a step, blocks, chunks and ranks;
preemptions by a small pool; aborts, resets and sleeps; loads that fail, before or after they wrote; evictions; restarts
of an engine, and of the daemon. Every byte that a rank loads or stores is compared as it is copied, and every byte that
a forward reads (tests/rigs/byte_audit.py, tests/fakes/mixed_engine.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from _pytest.mark import ParameterSet

from tests.rigs.connector_mutants import MUTANTS
from tests.rigs.mixed_histories import MODELS, run_mixed
from tests.rigs.seeds import RUN_SEED, drawn

HISTORIES_MAX = 200
"""One mutant, whose fault needs a small pool and a late answer, is found by one history in about 20."""


def cases() -> Iterator[ParameterSet]:
    """Every model, with and without priorities, of which each run has one seed."""
    for model, priorities in itertools.product(MODELS, (False, True)):
        for number, seed in enumerate(drawn(range(30))):
            marks = [pytest.mark.long(seconds=1)] if number else []
            name = f"{model}-{'priorities' if priorities else 'fcfs'}-{number}"
            yield pytest.param(model, priorities, *seed.values, id=name, marks=marks)


@pytest.mark.requirement("I1", "I3", "I5", "I6", "P2")
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.parametrize(("model", "priorities", "seed"), list(cases()))
def test_no_request_is_served_what_another_prefix_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, priorities: bool, seed: int
) -> None:
    random = Random(f"{model} {priorities} {seed}")
    run_mixed(tmp_path, monkeypatch, random, model=model, priorities=priorities)


@pytest.mark.long(seconds=10)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_control_each_mutant_of_the_connector_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    mutate, model = MUTANTS[mutant]
    for number in range(HISTORIES_MAX):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            mutate(patch)
            try:
                run_mixed(folder, patch, Random(f"{RUN_SEED} {mutant} {number}"), model=model, priorities=False)
            except AssertionError as found:
                if "has not met" in str(found):
                    continue
                print(f"{mutant}: history {number + 1}: {found}")
                return
    pytest.fail(f"{HISTORIES_MAX} histories did not find it")
