"""LoRA adapters that are replaced while the engine runs (row P2): the connector on vLLM's scheduler and block pool.

vLLM's block hashes have an adapter's name and path, so that its own cache serves what the former content computed.
Whose tokens that makes wrong ends with that cache; what is stored of it would be everybody's.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, prompt
from tests.rigs.local_eviction import CHUNKS, evict
from tests.rigs.patience import Deadline

SHAPES = pytest.mark.parametrize("options", [{}, {"hybrid": True}], ids=["dense", "hybrid"])
PROMPT = prompt(5.5)
HIT = 5 * BLOCK


class Adapter:
    _ids = itertools.count(1)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.load = 0
        path.mkdir()

    def loaded(self, content: bytes, *, in_place: bool = False) -> LoRARequest:
        """As vLLM's API does: another id, of no other adapter, but in place."""
        (self.path / "adapter").write_bytes(content)
        if not in_place:
            self.load = next(self._ids)
        return LoRARequest("adapter", self.load, str(self.path), load_inplace=in_place)


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    return Adapter(tmp_path / "adapter")


def digested(engine: ScriptedEngine, adapter: LoRARequest) -> None:
    until = Deadline(5)
    while engine.side._adapters.salt(adapter) is None:
        assert not until.is_over()
        time.sleep(0.005)


def ask(engine: ScriptedEngine, adapter: LoRARequest | None, tokens: list[int] = PROMPT, *, known: bool = True) -> int:
    """The tokens that the engine had or loaded of it."""
    engine.scheduler.lora_config = None  # how many at once is not the point
    if adapter is not None and known:
        digested(engine, adapter)
    request = engine.add(tokens, lora_request=adapter)
    engine.run()
    return engine.hits[request]


@pytest.mark.requirement("P2")
@SHAPES
@pytest.mark.parametrize("known", [True, False], ids=["digested", "not digested"])
def test_what_a_former_content_computed_is_not_stored_as_the_new_one(
    make: Make, adapter: Adapter, options: dict[str, Any], known: bool
) -> None:
    engine = make(**options)
    assert ask(engine, adapter.loaded(b"former")) == 0
    new = adapter.loaded(b"new")
    begun = prompt(3.5, seed=9)
    if not known:
        assert ask(engine, new, begun, known=False) == 0
    assert ask(engine, new) > 0, "vLLM's own cache"
    assert ask(make(**options), new) == 0

    other = prompt(5.5, seed=3)
    assert ask(engine, new, other) == 0, "and is stored"
    assert ask(engine, new, [*other, *prompt(3, seed=4)]) > 0, "on what the new content computed"
    assert ask(make(**options), new, [*other, *prompt(3, seed=4)]) == 8 * BLOCK
    if not known:
        assert ask(engine, new, [*begun, *prompt(3, seed=4)]) > 0, "on what was computed before it was digested"
        assert ask(make(**options), new, [*begun, *prompt(3, seed=4)]) == 6 * BLOCK
    engine.assert_clean()


@pytest.mark.requirement("P2")
@SHAPES
def test_a_request_of_a_content_that_is_not_digested_makes_nothing_of_the_former_one_sound(
    make: Make, adapter: Adapter, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It is not stored itself, and is computed on what the engine's cache has of the former content."""
    engine = make(**options)
    longer = [*PROMPT, *prompt(3, seed=4)]
    ask(engine, adapter.loaded(b"former"))
    new = adapter.loaded(b"new")
    with monkeypatch.context() as patch:
        patch.setattr(engine.side._adapters, "salt", lambda _: None)
        assert ask(engine, new, longer, known=False) > 0, "vLLM's own cache"
    assert ask(engine, new, longer) > 0
    assert ask(make(**options), new, longer) == 0
    engine.assert_clean()


@pytest.mark.requirement("P2")
def test_attention_of_a_former_content_is_not_used_beside_a_state_of_the_new_one(make: Make, adapter: Adapter) -> None:
    engine = make(hybrid=True, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    ask(engine, adapter.loaded(b"former"), tokens)
    evict(engine)
    new = adapter.loaded(b"new")
    ask(make(hybrid=True, blocks=128), new, tokens)
    assert ask(engine, new, tokens) == CHUNKS * BLOCK, "all of it loaded"
    assert engine.side.counters["local_reuse_tokens"] == 0
    engine.assert_clean()


@pytest.mark.requirement("P2")
@SHAPES
def test_other_adapters_and_requests_without_one_go_on_storing_what_they_continue(
    make: Make, adapter: Adapter, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = make(**options)
    third = Adapter(tmp_path / "third").loaded(b"third")
    third.lora_name = "third"
    for one in (None, third, adapter.loaded(b"former")):
        ask(engine, one)
    ask(engine, adapter.loaded(b"new"))
    longer = [*PROMPT, *prompt(3, seed=4)]
    for one in (None, third):
        assert ask(engine, one, longer) > 0
        assert ask(make(**options), one, longer) == 8 * BLOCK


@pytest.mark.requirement("P2")
def test_of_an_adapter_that_was_replaced_in_place_nothing_is_stored_until_it_is_loaded_anew(
    make: Make, adapter: Adapter
) -> None:
    engine = make()
    plain = adapter.loaded(b"former")
    ask(engine, plain)
    ask(engine, adapter.loaded(b"new", in_place=True), known=False)
    other = prompt(5.5, seed=3)
    ask(engine, plain, other, known=False)  # the same id, whose former content was digested
    assert engine.side.counters["excluded_adapter_unknown"] == 2
    again = adapter.loaded(b"former")
    assert ask(engine, again, other) > 0, "vLLM's own cache, of the new content"
    assert ask(make(), again, other) == 0


@pytest.mark.requirement("P2")
def test_an_adapter_that_is_replaced_costs_another_one_nothing_that_was_replaced_before(
    make: Make, adapter: Adapter, tmp_path: Path
) -> None:
    engine = make()
    third = Adapter(tmp_path / "third")
    for one in (adapter, third):
        ask(engine, one.loaded(b"former"))
    new = adapter.loaded(b"new")
    other = prompt(5.5, seed=3)
    ask(engine, new, other)
    ask(engine, third.loaded(b"new"))
    ask(engine, new, [*other, *prompt(3, seed=4)])
    assert ask(make(), new, [*other, *prompt(3, seed=4)]) == 8 * BLOCK


@pytest.mark.requirement("P2")
def test_a_load_in_place_from_another_path_ends_the_stores_of_requests_with_the_former_one(
    make: Make, adapter: Adapter, tmp_path: Path
) -> None:
    """vLLM keeps the id: they are computed with the new content from then on."""
    engine = make()
    former = adapter.loaded(b"former")
    ask(engine, former, prompt(1.5, seed=9))
    request = engine.add(PROMPT, max_tokens=5 * BLOCK, lora_request=former)
    for _ in range(8):
        engine.step()
    elsewhere = Adapter(tmp_path / "elsewhere")
    (elsewhere.path / "adapter").write_bytes(b"new")
    replaced = LoRARequest("adapter", former.lora_int_id, str(elsewhere.path), load_inplace=True)
    engine.add(prompt(1.5, seed=8), lora_request=replaced)
    engine.run()
    assert ask(make(), former, engine.tokens[request]) <= HIT


@pytest.mark.requirement("P2")
def test_what_becomes_of_its_stores_makes_no_request_sound(
    make: Make, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's refusal arrives after the adapter was replaced, and before the step is noted."""
    engine = make()
    former = adapter.loaded(b"former")
    ask(engine, former, prompt(1.5, seed=9))
    running = engine.add(PROMPT, max_tokens=6 * BLOCK, lora_request=former)
    for _ in range(8):
        engine.step()
    new = adapter.loaded(b"new")
    digested(engine, new)
    engine.add(prompt(1.5, seed=8), lora_request=new)
    engine.side._requests[running].store_stopped = "no_room"
    engine.run()
    assert ask(engine, new, engine.tokens[running]) > 0, "vLLM's own cache"
    assert ask(make(), new, engine.tokens[running]) == 0


@pytest.mark.requirement("P2")
def test_a_request_that_runs_while_its_adapter_is_replaced_stores_no_more(make: Make, adapter: Adapter) -> None:
    engine = make()
    former = adapter.loaded(b"former")
    ask(engine, former, prompt(1.5, seed=9))
    engine.add(PROMPT, max_tokens=3 * BLOCK, lora_request=former)
    for _ in range(8):
        engine.step()
    new = adapter.loaded(b"new")
    engine.add(prompt(1.5, seed=8), lora_request=new)
    engine.run()
    stored = engine.side.counters["stored_objects"]
    fresh = make()
    answered = next(tokens for tokens in engine.tokens.values() if tokens[: len(PROMPT)] == PROMPT)
    (adapter.path / "adapter").write_bytes(b"former")
    assert ask(fresh, LoRARequest("adapter", 1, str(adapter.path)), answered) <= HIT, stored
