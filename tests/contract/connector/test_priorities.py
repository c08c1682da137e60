"""Requests with priorities: vLLM preempts one for another one of the same step, and its blocks keep their names.

vLLM 0.32 names blocks when it schedules the step that computes them. So its own cache then has blocks that nobody has
computed, and serves them. What is stored of them would be everybody's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.item_engine import BOTH_WAYS, ItemEngine
from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, prompt, set_priorities, step_until

LONG = prompt(30.5)
FREE = 4
"""Blocks that the last chunk of the long prompt takes, so that none is left."""


def start(make: Make, *, runs_ahead: bool = False) -> ItemEngine:
    engine = make(ItemEngine, model=BOTH_WAYS, step_tokens=80, runs_ahead=runs_ahead)
    assert isinstance(engine, ItemEngine)
    set_priorities(engine, FREE * BLOCK)
    return engine


def preempt_within_a_step(engine: ItemEngine) -> str:
    """A long prompt takes the last blocks, and then a request of more weight needs one."""
    low = engine.add(LONG, priority=9)
    engine.step()
    high = engine.add(prompt(1, seed=3)[:-1], 4 * BLOCK, priority=0)
    step_until(engine, "its next token needs a block", lambda: engine.requests[high].num_computed_tokens == BLOCK)
    assert engine.requests[low].num_computed_tokens < len(LONG) - FREE * BLOCK
    held = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - FREE)
    assert set(engine.step().num_scheduled_tokens) == {high}
    engine.pool.free_blocks(held)
    assert engine.requests[low].num_preemptions == 1
    return low


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
def test_blocks_that_were_named_and_never_computed_are_not_stored(make: Make, runs_ahead: bool) -> None:
    engine = start(make, runs_ahead=runs_ahead)
    preempt_within_a_step(engine)
    engine.add([*LONG, *prompt(2, seed=5)])
    engine.run()
    fresh = start(make)
    request = fresh.add([*LONG, *prompt(2, seed=5)])
    fresh.run()
    assert not fresh.wrong
    assert 0 < fresh.hits[request] < len(LONG), "what was computed before is there"
    engine.assert_clean()


@pytest.mark.requirement("I1")
def test_a_preempted_request_without_such_blocks_is_stored(make: Make) -> None:
    engine = start(make)
    low = engine.add(LONG, priority=9)
    engine.step()
    engine.step()
    engine.scheduler.running.remove(engine.requests[low])
    engine.scheduler._preempt_request(engine.requests[low], 0.0)
    engine.run()
    fresh = start(make)
    request = fresh.add(LONG)
    fresh.run()
    assert fresh.hits[request] == len(LONG) // BLOCK * BLOCK
    assert not engine.wrong + fresh.wrong
    engine.assert_clean()


@pytest.mark.requirement("I1")
def test_named_blocks_of_windows_alone_are_not_stored_although_blocks_before_them_have_no_names(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM retains the windows before a prompt's end alone. Here they are the last two blocks of a chunk of eight."""
    windows: dict[str, Any] = {"windows": (33,), "full": False, "retention": 0}
    tokens = prompt(26.5)
    engine = make(step_tokens=10 * BLOCK, **windows)
    set_priorities(engine, 8 * BLOCK)
    low = engine.add(tokens, priority=9)
    engine.step()
    high = engine.add(prompt(1, seed=3), 8, priority=0)
    engine.step()
    held = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 2)
    assert set(engine.step().num_scheduled_tokens) == {high}
    engine.pool.free_blocks(held)
    assert engine.requests[low].num_preemptions == 1
    make(**windows).generate(tokens[: 24 * BLOCK + 1])  # the chunks before
    engine.add([*tokens, *prompt(2, seed=5)])
    with monkeypatch.context() as patch:
        patch.setattr(RankMemory, "holds", lambda *_, **__: True)  # a model reads what there is
        engine.run()
    fresh = make(**windows)
    assert fresh.generate(tokens) == cold(tokens)
    assert list(fresh.hits.values()) == [24 * BLOCK], "what was computed before is there"
