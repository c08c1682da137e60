"""P5, I6: wherever in its copy a load is given up, its blocks are free only after the last byte was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome

from tests.fakes.scripted_engine import ScriptedEngine
from tests.rigs.connector_rig import PATIENCE_SECONDS, Gate, Make, cold, prompt, step_until
from tests.rigs.patience import Deadline, patient

PATTERN = 0x5A
BLOCKS = 12
BATCH_BYTES = 1024
"""A layer's part of a block, so that a load is at least 24 copies."""


def given_up(engine: ScriptedEngine, request_id: str, how: str) -> None:
    if how == "abort":
        engine.abort(request_id)
    elif how == "epoch":
        engine.connector.reset_cache()
    elif how == "generation":
        engine.depot.tables.extents["generation"][:] += 2
    else:
        deadline = engine.side.loads._active[request_id].deadline
        time.sleep(max(deadline - time.monotonic(), 0))
    engine.step()


def reported(engine: ScriptedEngine) -> list[str]:
    return engine.failed_reports + engine.loaded_reports


def loading(engine: ScriptedEngine, gate: Gate, tokens: list[int], copies: int) -> str:
    """A load that stands still after so many copies."""
    gate.close(batch_bytes=BATCH_BYTES)
    request_id = engine.add(tokens)
    step_until(engine, "copying", lambda: gate.reached(0))
    gate.let_through(copies)
    return request_id


def fill(engine: ScriptedEngine) -> Callable[[], int]:
    """Fill all blocks with a pattern; what it returns counts the bytes that somebody has written since."""
    filled = [memory.fill(PATTERN) for memory in engine.memories]
    return lambda: sum(int((m.raw != was).sum()) for m, was in zip(engine.memories, filled, strict=True))


@pytest.mark.requirement("P5", "I6")
@pytest.mark.parametrize("how", ["deadline", "abort", "epoch", "generation"])
@pytest.mark.parametrize(
    "options", [{}, {"hybrid": True}, {"ranks": 2}, {"streams": True}], ids=["dense", "hybrid", "two ranks", "stream"]
)
def test_blocks_of_a_load_given_up_anywhere_are_free_only_after_its_last_byte(
    make: Make, gate: Gate, options: dict[str, Any], how: str
) -> None:
    tokens = prompt(BLOCKS + 0.5)
    make(**options | {"streams": False}).generate(tokens)
    engine = make(**options, settings={"load_timeout_seconds": patient(4.0) if how == "deadline" else 60.0})
    copies = Random(f"{sorted(options)}-{how}").randrange(2 * BLOCKS - 1)
    request_id = loading(engine, gate, tokens, copies)
    generations = engine.depot.tables.extents["generation"].copy()
    given_up(engine, request_id, how)
    for _ in range(5):
        engine.step()
    assert not reported(engine), "a copy is in progress"
    assert engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1
    gate.open()
    step_until(engine, "reported", lambda: reported(engine))
    engine.abort(request_id)  # nobody computes it: from here on these blocks are free
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    written = fill(engine)
    engine.settle()
    assert written() == 0
    assert reported(engine) == [request_id]
    engine.depot.tables.extents["generation"][:] = generations
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    engine.run()
    engine.assert_clean()


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("how", ["deadline", "cancelled"])
@pytest.mark.parametrize("options", [{}, {"ranks": 2}], ids=["dense", "two ranks"])
def test_between_two_batches_a_load_that_is_given_up_stops_writing(
    make: Make, gate: Gate, options: dict[str, Any], how: str
) -> None:
    tokens = prompt(BLOCKS + 0.5)
    make(**options).generate(tokens)
    engine = make(**options)
    request_id = loading(engine, gate, tokens, 3)
    for copies in engine.copies:
        if how == "deadline":
            copies._clock = lambda: time.monotonic() + 3600
        else:
            copies.submit((), (), [engine.side.loads._active[request_id].op_id])
    gate.open()
    step_until(engine, "reported", lambda: reported(engine))
    assert engine.failed_reports == [request_id]
    assert gate.copied <= 3 + len(engine.copies), "more than the batches that had begun"
    for copies in engine.copies:
        copies._clock = time.monotonic
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    engine.assert_clean()


@pytest.mark.requirement("P5")
def test_control_a_rank_that_reports_before_its_last_byte_is_found_out(make: Make, gate: Gate) -> None:
    tokens = prompt(BLOCKS + 0.5)
    make().generate(tokens)
    engine = make()
    (copies,) = engine.copies
    begin = copies._do
    copies._do = lambda op, mark: (copies._done.append(CopyOutcome.all_failed(op)), begin(op, mark))
    request_id = loading(engine, gate, tokens, 5)
    step_until(engine, "reported", lambda: reported(engine))
    engine.abort(request_id)
    written = fill(engine)
    gate.open()
    until = Deadline(PATIENCE_SECONDS)
    while gate.copied < 2 * BLOCKS and not until.is_over():
        time.sleep(0.01)
    assert written() >= (2 * BLOCKS - 6) * BATCH_BYTES // 2
