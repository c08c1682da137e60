"""The real connector with engines that speculate, in every runner's call order: drafts, states and loads together.

Two engines on one depot take random turns of conversations, which begin where others ended or parted, and one is
started again. In each step the target's and the drafter's forward check every byte that they read
(tests/fakes/drafting_engine.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from kvdepot.client.vllm.scheduling import sides

from tests.fakes.call_orders import ORDERS
from tests.fakes.direct_session import DirectDepot
from tests.fakes.drafting_engine import DraftingEngine
from tests.fakes.scripted_engine import BLOCK, model_folder
from tests.rigs.connector_histories import Watch
from tests.rigs.seeds import drawn
from tests.rigs.turns import run_turns

METHODS = ("mtp", "mtp", "eagle3", "draft_model", "ngram")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"blocks": 50},
    "windows": {"windows": (40,), "blocks": 80},
    "hybrid": {"hybrid": True, "blocks": 120},
}


def draw_engine(random: Random, model: str, order: str, *, runs_ahead: bool) -> dict[str, Any]:
    """Options of an engine, of which the same ones give engines that share."""
    options = {"method": random.choice(METHODS), "draft_tokens": random.randint(1, 7), "order": ORDERS[order]}
    options |= {"runs_ahead": runs_ahead, "ranks": random.randint(1, 2), "step_tokens": random.choice((64, 128))}
    options |= MODELS[model]
    if model == "hybrid":
        block = random.choice((BLOCK, BLOCK, 2 * BLOCK))
        options |= {"state_block": block, "retention": block}
    return options


@pytest.fixture
def depot() -> DirectDepot:
    return DirectDepot()


@pytest.fixture
def start(depot: DirectDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DraftingEngine]:
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    folder = model_folder(tmp_path / "model")
    return lambda **options: DraftingEngine(depot, folder, monkeypatch, **options)


def cases() -> Iterator[ParameterSet]:
    """Every order, model and seed that is served. The quick ones are of models with states, and one without."""
    for order, runs_ahead, model in itertools.product(ORDERS, (False, True), MODELS):
        v1_ahead = order.startswith("v1") and runs_ahead
        if v1_ahead and model == "hybrid":
            continue  # refused
        quick = model == "hybrid" or (model == "dense" and v1_ahead and order != "v1")
        for number, seed in enumerate(drawn(range(11))):
            marks = [] if quick and not number else [pytest.mark.long(seconds=3)]
            name = f"{order}-{'async' if runs_ahead else 'sync'}-{model}-{number}"
            yield pytest.param(order, runs_ahead, model, *seed.values, id=name, marks=marks)


@pytest.mark.requirement("I1", "I3", "I5", "I6", "C6", "C7")
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize(("order", "runs_ahead", "model", "seed"), list(cases()))
def test_random_turns_with_drafts_in_every_call_order(
    start: Callable[..., DraftingEngine], depot: DirectDepot, order: str, runs_ahead: bool, model: str, seed: int
) -> None:
    random = Random(f"{order} {runs_ahead} {model} {seed}")
    options = draw_engine(random, model, order, runs_ahead=runs_ahead)

    def begin() -> Watch:
        acceptance = random.choice((0.0, 0.5, 0.5, 1.0))
        engine = start(acceptance=acceptance, seed=random.randrange(1 << 30), **options)
        return Watch(engine, engine.lookahead_tokens)

    run_turns(begin, depot, random)
