"""Copies on a device whose engine is late too: each begins behind the step that it belongs to, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.worker import rank as rank_module

from tests.fakes.call_orders import V1, V2
from tests.fakes.late_engine import LateEngine, LateRank, Timeline
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt
from tests.rigs.seeds import one_in

Engines = Callable[..., ScriptedEngine]


@pytest.fixture
def timelines() -> list[Timeline]:
    """Of all ranks, in the order in which they start."""
    return []


@pytest.fixture
def engines(make: Make, timelines: list[Timeline], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Makes engines each of whose ranks has a timeline."""
    started = count()

    def copier(views: Sequence[torch.Tensor], *_: Any) -> DeviceCopier:
        return DeviceCopier(views, LateRank(timelines[next(started)]))

    def made(*, ranks: int = 1, early: int = 0, seed: int = 0, **options: Any) -> ScriptedEngine:
        own = [Timeline(seed + rank, early) for rank in range(ranks)]
        timelines.extend(own)
        return make(LateEngine, ranks=ranks, timelines=own, **options)

    monkeypatch.setattr(rank_module, "_copier", copier)
    yield made
    for timeline in timelines:
        timeline.until(len(timeline.steps))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"hybrid": True},
    {"windows": [3 * BLOCK]},
    {"ranks": 2},
    {"hybrid": True, "ranks": 2},
]


def work(engine: ScriptedEngine, other: ScriptedEngine, first: int = 0) -> None:
    """Stores, loads, and more requests together than there is memory for. `first`: of the prompts."""
    for seed in range(first, first + 3):
        tokens = prompt(5.5, seed)
        assert engine.generate(tokens) == cold(tokens)
        assert other.generate(tokens) == cold(tokens)
    prompts = [prompt(4.5, first + number % 4) for number in range(8)]
    ids = [engine.add(tokens, max_tokens=12) for tokens in prompts]
    engine.run()
    for tokens, request_id in zip(prompts, ids, strict=True):
        assert engine.outputs[request_id] == cold(tokens, 12)


@pytest.mark.requirement("I1", "P5")
@pytest.mark.parametrize("order", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("options", one_in(2, OPTIONS, 1), ids=lambda options: "-".join(options) or "dense")
def test_what_is_copied_is_what_the_engine_has_computed_by_then(
    engines: Engines, timelines: list[Timeline], options: dict[str, Any], runs_ahead: bool, order: tuple[str, ...]
) -> None:
    options = {**options, "runs_ahead": runs_ahead, "order": order, "blocks": 64}
    engine, other = engines(**options), engines(**options)
    work(engine, other)
    assert any(other.hits.values()), "nothing was loaded"
    engine.assert_clean()
    other.assert_clean()
    for timeline in timelines:
        timeline.until(len(timeline.steps))
        timeline.check()


def test_copies_that_wait_for_no_step_are_noticed(engines: Engines, timelines: list[Timeline]) -> None:
    """The test above can fail. On one rank it could not: the host reads each step before the copy begins."""
    options: dict[str, Any] = {"ranks": 2, "early": 1000, "runs_ahead": True, "blocks": 64}
    engine, other = engines(**options), engines(**options)
    with pytest.raises(AssertionError, match="reads wrong bytes"):
        for first in range(0, 400, 4):
            work(engine, other, first)
    for timeline in timelines:
        timeline.failed.clear()
