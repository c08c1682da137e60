"""KV that another connector of the engine supplies never enters the depot, nor what is computed on it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.fakes.sibling import SiblingEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt


def stored(engine: ScriptedEngine) -> int:
    return int(engine.depot.engine.counters.get("committed_objects.committed"))


def sibling(make: Make, **options: Any) -> SiblingEngine:
    engine = make(kind=SiblingEngine, **options)
    assert isinstance(engine, SiblingEngine)
    return engine


def hit(make: Make, tokens: list[int]) -> int:
    """Return what a new engine is served of a prompt, in blocks."""
    engine = make()
    assert engine.generate(tokens) == cold(tokens)
    return next(iter(engine.hits.values())) // BLOCK


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
def test_a_load_of_another_connector_that_fails_within_a_step_is_not_stored(make: Make, runs_ahead: bool) -> None:
    tokens = prompt(20.5)
    engine = sibling(make, step_tokens=64, runs_ahead=runs_ahead)
    engine.sibling_tokens, engine.sibling_fails = 8 * BLOCK, True
    request_id = engine.add(tokens)
    while engine.scheduler.has_requests():
        engine.step()
        engine.sibling_tokens = 0
        time.sleep(0.02)  # copies of one step end before the next one does
    engine.settle()
    assert engine.outputs[request_id] == cold(tokens)
    assert hit(make, tokens) == 0
    engine.assert_clean()


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("loads_async", [False, True], ids=["within the step", "asynchronously"])
@pytest.mark.parametrize("windows", [(), (33,)], ids=["dense", "windows"])
def test_what_another_connector_loads_is_not_stored_until_it_is_computed(
    make: Make, windows: tuple[int, ...], loads_async: bool
) -> None:
    tokens = prompt(8.5)
    engine = sibling(make, windows=windows)
    engine.sibling_tokens, engine.sibling_async = 5 * BLOCK, loads_async
    assert engine.generate(tokens) == cold(tokens)
    longer = [*tokens, *prompt(3, seed=4)]
    assert engine.generate(longer) == cold(longer), "a local hit on blocks that the other one loaded"
    assert list(engine.hits.values()) == [5 * BLOCK, 8 * BLOCK]
    assert stored(engine) == 0
    engine.sibling_tokens = 0
    engine.reset()
    assert engine.generate(tokens) == cold(tokens), "in blocks that were foreign"
    assert stored(engine)
    assert engine.generate(longer) == cold(longer)
    engine.settle()
    engine.reset()
    assert engine.generate(longer) == cold(longer)
    assert list(engine.hits.values())[-1] == 11 * BLOCK
    engine.assert_clean()


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("loads_async", [False, True], ids=["within the step", "asynchronously"])
def test_requests_of_one_step_that_share_foreign_blocks_store_nothing(make: Make, loads_async: bool) -> None:
    engine = sibling(make)
    engine.sibling_tokens, engine.sibling_async = 5 * BLOCK, loads_async
    prompts = [prompt(8.5), [*prompt(8), *prompt(2.5, seed=3)]]
    ids = [engine.add(tokens) for tokens in prompts]
    engine.run()
    engine.settle()
    assert [engine.outputs[one] for one in ids] == [cold(tokens) for tokens in prompts]
    assert stored(engine) == 0
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_blocks_that_were_computed_before_another_connector_continued_them_still_count(make: Make) -> None:
    shared = prompt(4)
    first, second, third = ([*shared, *prompt(4.5, seed=seed)] for seed in (3, 5, 7))
    engine = sibling(make)
    assert engine.generate(first) == cold(first)
    before = stored(engine)
    engine.sibling_tokens = 8 * BLOCK
    assert engine.generate(second) == cold(second)
    assert stored(engine) == before
    engine.sibling_tokens = 0
    assert engine.generate(third) == cold(third)
    assert list(engine.hits.values()) == [0, 8 * BLOCK, 4 * BLOCK]
    assert stored(engine) == before + 4
    engine.assert_clean()


@pytest.mark.requirement("P9")
def test_what_another_kvdepot_of_the_engine_loads_is_stored(make: Make) -> None:
    tokens = prompt(8.5)
    engine = sibling(make)
    engine.sibling_tokens, engine.sibling_async, engine.sibling_is_kvdepot = 5 * BLOCK, True, True
    assert engine.generate(tokens) == cold(tokens)
    assert hit(make, tokens) == 8
    engine.assert_clean()


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("dispatched", [False, True])
def test_a_request_whose_computed_tokens_go_back_publishes_nothing_more(
    make: Make, gate: Gate, dispatched: bool
) -> None:
    """A connector that nobody foresaw reports blocks that were computed as failed."""
    tokens = prompt(20.5)
    engine = sibling(make, step_tokens=64)
    gate.close(direction=Direction.STORE)
    request_id = engine.add(tokens)
    for _ in range(3 if dispatched else 1):
        engine.step()
    assert bool(engine.side.holds.pinned_blocks) == dispatched
    engine.fail_blocks(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0][1:2])
    engine.step()
    gate.open()
    engine.run()
    engine.settle()
    assert engine.outputs[request_id] == cold(tokens)
    assert stored(engine) == 0
    assert engine.side.counters["store_stopped_rolled_back"] == 1
    engine.assert_clean()
