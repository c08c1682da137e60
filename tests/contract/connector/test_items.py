"""Pictures and videos whose KV depends on the steps that compute it: no hash covers that, so none of it is stored.

vLLM's own cache serves it within one engine. What is stored would be everybody's.
"""

from __future__ import annotations

import pytest
from kvdepot.client.vllm.identity import items

from tests.fakes.item_engine import BOTH_WAYS, PRUNED, ItemEngine, picture
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Gate, Make, prompt, step_until

CHUNK = 4 * BLOCK
STEP = 70
BEGIN, LENGTH = 100, 64
"""Of a picture, which begins in the second chunk and ends in the third."""
SHARED = prompt(13)
COMMON = {BOTH_WAYS: SHARED[: BEGIN + LENGTH + 3], PRUNED: SHARED[: 3 * CHUNK + 8]}
"""What another prompt begins with: for the one model the last common block ends within the picture."""
MODELS = pytest.mark.parametrize("model", [BOTH_WAYS, PRUNED])


@pytest.fixture(autouse=True)
def depends_on_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "items_depend_on_steps", lambda _: True)


def start(make: Make, model: str) -> ItemEngine:
    engine = make(ItemEngine, model=model, blocks=256, step_tokens=STEP, settings={"chunk_tokens": CHUNK})
    assert isinstance(engine, ItemEngine)
    return engine


def add(engine: ItemEngine, tokens: list[int]) -> str:
    return engine.add(tokens, mm_features=[picture(BEGIN, LENGTH)])


def ask(engine: ItemEngine, tokens: list[int]) -> int:
    request = add(engine, tokens)
    engine.run()
    return engine.hits[request]


def add_another(engine: ItemEngine, left: int) -> None:
    """It takes all of each step but its last one, and leaves so many tokens of that."""
    engine.add([5] * (20 * STEP - left), max_tokens=1)
    engine.step()


@MODELS
def test_a_cold_prompt_is_computed_rightly(make: Make, model: str) -> None:
    engine = start(make, model)
    add_another(engine, left=10)
    assert ask(engine, SHARED) == 0
    assert not engine.wrong
    engine.assert_clean()


@pytest.mark.requirement("I1", "P2")
@MODELS
def test_a_request_is_loaded_up_to_the_first_item(make: Make, gate: Gate, model: str) -> None:
    ask(start(make, model), SHARED)
    engine = start(make, model)
    gate.close()
    request = add(engine, [*COMMON[model], *prompt(5, seed=3)])
    step_until(engine, "it loads", lambda: engine.side.loads.active)
    add_another(engine, left=10)
    gate.open()
    engine.run()
    assert engine.hits[request] == CHUNK
    assert not engine.wrong
    engine.assert_clean()


@pytest.mark.requirement("I1", "P2")
@MODELS
def test_what_is_computed_on_the_engine_s_own_hit_is_not_stored(make: Make, model: str) -> None:
    engine = start(make, model)
    ask(engine, SHARED)
    other = [*COMMON[model], *prompt(9, seed=3)]
    add_another(engine, left=2)
    assert ask(engine, other) > BEGIN, "vLLM's own cache"
    assert engine.wrong, "that is vLLM's"
    fresh = start(make, model)
    assert ask(fresh, other) == CHUNK
    assert not fresh.wrong
