"""LoRA adapters that are read while the scheduler side is replaced, or while there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vllm.lora.request import LoRARequest

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.adapter_requests import PROMPT, in_place, known, loaded
from tests.rigs.connector_rig import Gate, Make, prompt
from tests.rigs.layout_turns import turn_layout
from tests.rigs.under_way import let_go, under_way

LONGER = [*PROMPT[: 5 * BLOCK], *prompt(3.5, seed=3)]


def compute(engine: ScriptedEngine, adapter: LoRARequest, tokens: list[int]) -> None:
    """Nobody waits for what is under way besides."""
    assert engine.adapters
    request = engine.add(tokens, max_tokens=1, lora_request=adapter)
    while request in engine.scheduler.requests:
        engine.step()


def read_before_the_change(engine: ScriptedEngine, path: Path) -> LoRARequest:
    """The engine has other bytes than those that the files have when they are digested."""
    in_place(path, b"1")
    adapter = loaded(path)
    engine.adapters[0].add(adapter)
    engine.step()  # in which the rank says it
    in_place(path, b"2")
    return adapter


def broken(engine: ScriptedEngine) -> None:
    facts = {place: replace(found, problem="broken") for place, found in engine.facts().items()}
    engine.connector.set_xfer_handshake_metadata_pp_aware(facts)
    assert engine.side is None


def stored(engine: ScriptedEngine) -> int:
    engine.settle()
    return int(engine.side.counters["stored_objects"])


def test_what_is_read_again_while_a_former_side_ends_is_heard_by_the_present_one(
    make: Make, depot: DirectDepot, gate: Gate, tmp_path: Path
) -> None:
    engine = make(max_cpu_loras=1)
    engine.abort(under_way(engine, depot, gate, "reserving"))
    turn_layout(engine)
    engine.shake_hands()
    in_place(tmp_path / "y", b"1")
    x, y = read_before_the_change(engine, tmp_path / "x"), loaded(tmp_path / "y")
    compute(engine, x, PROMPT)
    compute(engine, y, prompt(1.5))  # vLLM drops x
    compute(engine, x, prompt(1.5, seed=9))  # and reads it again
    assert engine.connector.sides.former
    let_go(engine, depot, gate)
    engine.run()
    assert known(engine, x)
    before = stored(engine)
    compute(engine, x, LONGER)
    engine.run()
    assert stored(engine) == before, "its own cache has the former content's"


def test_what_is_read_while_there_is_no_side_is_known_to_the_next_one(make: Make, tmp_path: Path) -> None:
    engine = make()
    broken(engine)
    x = read_before_the_change(engine, tmp_path / "x")
    engine.shake_hands()
    engine.wait_attached()
    compute(engine, x, prompt(1.5, seed=9))
    assert not known(engine, x, 0.2)
    compute(engine, x, PROMPT)
    assert stored(engine) == 0
    engine.assert_clean()


def test_what_was_computed_before_the_first_side_is_not_stored_by_it(make: Make, tmp_path: Path) -> None:
    """Of two ranks one is heard at the start, and the other at the first wake-up."""
    engine = make(ranks=2, heard=1, max_cpu_loras=1, wait=False)
    assert engine.side is None
    in_place(tmp_path / "x", b"1")
    in_place(tmp_path / "y", b"1")
    x, y = loaded(tmp_path / "x"), loaded(tmp_path / "y")
    compute(engine, x, PROMPT)
    in_place(tmp_path / "x", b"2")
    compute(engine, y, prompt(1.5))
    compute(engine, x, prompt(1.5, seed=9))
    engine.shake_hands()
    engine.wait_attached()
    assert known(engine, x)
    before = stored(engine)
    compute(engine, x, LONGER)
    engine.run()
    assert stored(engine) == before
    engine.assert_clean()
