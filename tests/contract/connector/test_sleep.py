"""Sleep, new weights, wake-up, in vLLM 0.33's order of calls (row I1), on vLLM's scheduler and block pool.

In every step the forward compares each byte that it reads with what the present weights compute.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from kvdepot.core.calls import CommitCall

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Gate, Make, cold, prompt
from tests.rigs.under_way import PHASES, belongings, let_go, under_way

CYCLES = 20


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    ("how", "streams", "options"),
    [
        pytest.param("sleep", False, {}, id="dense"),
        pytest.param("sleep", False, {"hybrid": True}, id="hybrid"),
        pytest.param("sleep", False, {"ranks": 2}, id="two ranks"),
        pytest.param("sleep", True, {}, id="stream"),
        pytest.param("release", False, {}, id="release"),
        pytest.param(
            "sleep", True, {"hybrid": True, "ranks": 2}, id="stream to two ranks", marks=pytest.mark.long(seconds=3)
        ),
        pytest.param("release", True, {"hybrid": True}, id="release by stream", marks=pytest.mark.long(seconds=3)),
        pytest.param("sleep", False, {"windows": [3 * BLOCK]}, id="windows", marks=pytest.mark.long(seconds=3)),
    ],
)
def test_twenty_cycles_serve_nothing_of_before_and_keep_nothing(
    make: Make, how: str, streams: bool, options: dict[str, Any]
) -> None:
    engine = make(streams=streams, **options)
    tokens = prompt(5.5)
    engine.generate(tokens)
    before = belongings(engine)
    epochs = [engine.session.specs[-1].epoch]
    for _ in range(CYCLES):
        engine.sleep() if how == "sleep" else engine.release_kv_cache_memory()
        engine.change_weights()
        engine.wake_up()
        assert engine.generate(tokens) == cold(tokens), "computed: the forward checks that nothing of before is read"
        assert list(engine.hits.values())[-1] == 0
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == 5 * BLOCK, "hits return with the first request that can have one"
        assert belongings(engine) == before
        epochs.append(engine.session.specs[-1].epoch)
    assert len(set(epochs)) == CYCLES + 1
    engine.assert_clean()


@pytest.mark.parametrize("settings", [{"keep_across_sleep": True}, {"weights_version": "7"}])
def test_what_the_user_says_stays_right_is_served_with_the_first_request_after_the_wake(
    make: Make, settings: dict[str, Any]
) -> None:
    engine = make(settings=settings)
    tokens = prompt(5.5)
    engine.generate(tokens)
    for _ in range(3):
        engine.sleep()
        engine.wake_up()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == 5 * BLOCK
    assert len(engine.session.specs) == 1
    engine.assert_clean()


def test_a_wake_up_in_parts_copies_again_only_with_kv_memory(make: Make) -> None:
    """As trainers do it: weights first, then KV memory."""
    engine = make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    engine.sleep(level=2)
    engine.change_weights()
    engine.wake_up(["weights"])
    engine.wake_up(["kv_cache"])
    engine.generate(tokens)
    engine.reset()
    engine.generate(tokens)
    assert list(engine.hits.values()) == [0, 0, 5 * BLOCK]


@pytest.mark.parametrize("phase", PHASES)
def test_the_same_facts_change_nothing_whatever_is_under_way(
    make: Make, depot: DirectDepot, gate: Gate, phase: str
) -> None:
    make().generate(prompt(9.5))
    engine = make()
    request_id = under_way(engine, depot, gate, phase)
    before, counted = belongings(engine), engine.side.counters.copy()
    for _ in range(3):
        engine.shake_hands()
        for worker, memory in zip(engine.workers, engine.memories, strict=True):
            worker.register_kv_caches(dict(memory.caches))
        engine.connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)
        engine.connector.on_new_request(engine.requests[request_id])
    assert belongings(engine) == before
    assert engine.side.counters == counted
    let_go(engine, depot, gate)
    engine.run()
    assert engine.outputs[request_id] == cold(engine.requests[request_id].prompt_token_ids, 2 * BLOCK)
    assert not engine.failed_reports
    assert depot.count(CommitCall)
    assert engine.loaded_reports == ([request_id] if engine.hits[request_id] else [])
    engine.assert_clean()


@pytest.mark.parametrize("transport", ["shm", "stream"])
@pytest.mark.parametrize("phase", PHASES)
def test_kv_memory_is_not_touched_once_it_is_taken_away(
    make: Make, depot: DirectDepot, gate: Gate, phase: str, transport: str
) -> None:
    """Whatever is under way: a load is reported once, what was not stored is given up, then both work again."""
    make().generate(prompt(9.5))
    engine = make(settings={"keep_across_sleep": True}, streams=transport == "stream")
    request_id = under_way(engine, depot, gate, phase)
    if phase in ("reserving", "storing"):
        engine.abort(request_id)  # a pause has ended what computes, and what is cached is forgotten
        assert engine.scheduler.reset_prefix_cache() is (phase == "reserving"), (
            "blocks are pinned while they are copied"
        )
    opener = threading.Timer(0.1, gate.open)
    opener.start()
    engine.discard()
    opener.join()
    engine.restore()  # which looks whether anything was written meanwhile
    depot.held.clear()
    engine.session.let_go()
    engine.run()
    if phase == "loading":
        assert (engine.failed_reports, engine.loaded_reports) == ([request_id], [])
    if phase not in ("reserving", "storing"):
        assert engine.outputs[request_id] == cold(prompt(9.5), 2 * BLOCK)
        assert Counter(engine.failed_reports + engine.loaded_reports).most_common(1) in ([(request_id, 1)], [])
    engine.reset()
    for tokens in (prompt(9.5), prompt(5.5, seed=3)):
        engine.generate(tokens)
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == len(tokens) // BLOCK * BLOCK, "it loads and stores again"
        engine.reset()
    assert engine.side.counters["misses.failed_lately"] == 0
    engine.assert_clean()
