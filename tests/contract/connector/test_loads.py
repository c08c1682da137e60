"""The connector against vLLM's real scheduler: what is loaded is right, or is recomputed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.namespaces import REPORT_SECONDS
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.calls import AcquireCall, LocateCall

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import TRANSPORTS, Gate, Make, cold, prompt
from tests.rigs.patience import Deadline


@pytest.mark.requirement("P4")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_a_second_engine_loads_what_the_first_stored(make: Make, hybrid: bool) -> None:
    tokens = prompt(10.5)
    first, second = make(hybrid=hybrid), make(hybrid=hybrid)
    assert first.generate(tokens) == cold(tokens)
    assert second.generate(tokens) == cold(tokens)
    assert list(first.hits.values()) == [0]
    assert list(second.hits.values()) == [10 * BLOCK]
    assert second.side.counters["stored_objects"] == 0, "what was loaded is not stored again (A3)"
    for engine in (first, second):
        engine.assert_clean()


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize(
    ("ranks", "streams"), [(1, False), (2, False), (2, True)], ids=["one rank", "two ranks", "two by streams"]
)
def test_it_loads_after_its_own_cache_was_reset(make: Make, hybrid: bool, ranks: int, streams: bool) -> None:
    engine = make(hybrid=hybrid, ranks=ranks, streams=streams)
    tokens = prompt(7.25)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 7 * BLOCK]
    assert len(engine.loaded_reports) == 1
    assert not engine.failed_reports
    engine.assert_clean()


@pytest.mark.requirement("C2")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_prompt_of_exactly_whole_chunks_computes_its_last_block(make: Make, hybrid: bool, blocks: int) -> None:
    engine = make(hybrid=hybrid, retention=BLOCK, step_tokens=BLOCK)
    tokens = prompt(blocks)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, (blocks - 1) * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("local", range(1, 7))
def test_a_local_hit_and_a_deeper_external_tail_are_one_hit(make: Make, hybrid: bool, local: int) -> None:
    engine = make(hybrid=hybrid, retention=BLOCK, step_tokens=BLOCK)
    tokens = prompt(7.5)
    engine.generate(tokens)
    engine.reset()
    # Fill the engine's own cache to the split without help from the depot.
    engine.depot.present = False
    engine.generate(tokens[: local * BLOCK + 1], max_tokens=1)
    engine.depot.present = True
    engine.settle()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0, 7 * BLOCK]
    loaded = [call for call in engine.depot.calls if isinstance(call, AcquireCall)][-1]
    assert loaded.kinds.count(1) == 7 - local, "only what the engine lacks is loaded"
    engine.assert_clean()


@pytest.mark.requirement("D4")
def test_a_full_local_hit_moves_nothing(make: Make) -> None:
    engine = make()
    tokens = prompt(6.5)
    engine.generate(tokens)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 6 * BLOCK]
    assert engine.depot.count(AcquireCall) == 0


@pytest.mark.requirement("B2")
def test_a_hit_shorter_than_min_load_tokens_is_not_loaded(make: Make) -> None:
    tokens = prompt(3.5)
    make().generate(tokens)
    second = make(settings={"min_load_tokens": 4 * BLOCK})
    assert second.generate(tokens) == cold(tokens)
    assert list(second.hits.values()) == [0]
    assert second.depot.count(AcquireCall) == 0


@pytest.mark.requirement("P8")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("how", ["refused", "lost", "late"])
def test_a_load_that_failed_is_recomputed_and_not_offered_again(make: Make, hybrid: bool, how: str) -> None:
    tokens = prompt(9.5)
    make(hybrid=hybrid).generate(tokens)
    engine = make(hybrid=hybrid, settings={"load_timeout_seconds": 0.2})
    if how == "refused":
        _vanish_before_acquire(engine)
    elif how == "lost":
        engine.depot.lost.add(AcquireCall)
    else:
        engine.depot.held.add(AcquireCall)
    request_id = engine.add(tokens)
    limit = Deadline(10)
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert not limit.is_over()
    assert engine.failed_reports == [request_id], "reported once"
    assert engine.depot.count(AcquireCall) == 1, "and not tried again"
    assert engine.hits[request_id] == 0
    engine.session.let_go()
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("P8")
def test_a_boundary_whose_load_failed_is_offered_to_nobody_for_a_while(make: Make) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make()
    now = 0.0
    engine.side.loads._negative._clock = lambda: now
    engine.depot.lost.add(AcquireCall)
    first = engine.add(tokens)
    engine.run()
    engine.depot.lost.clear()
    engine.reset()
    second = engine.add(tokens)
    engine.run()
    assert engine.depot.count(AcquireCall) == 1
    assert engine.hits[second] == 0
    assert engine.side.counters["offers_withheld_negative"] >= 1
    engine.reset()
    now += NEGATIVE_SECONDS
    third = engine.add(tokens)
    engine.run()
    assert engine.hits[third] > 0, "and then again"
    assert engine.outputs[first] == engine.outputs[second] == engine.outputs[third] == cold(tokens)


def _vanish_before_acquire(engine: ScriptedEngine) -> None:
    """The depot answers the lookup and then forgets everything."""
    serve = engine.session._serve

    def forget_first(call: Any) -> Any:
        if isinstance(call, AcquireCall):
            call = AcquireCall(b"", call.lease_id, call.namespace_id, b"\1" * len(call.keys), call.kinds)
        return serve(call)

    engine.session._serve = forget_first  # type: ignore[method-assign]


@pytest.mark.requirement("P5")
def test_an_unanswered_lookup_costs_no_more_than_its_timeout(make: Make) -> None:
    tokens = prompt(4.5)
    make().generate(tokens)
    engine = make(settings={"lookup_timeout_seconds": 0.05})
    engine.depot.held.add(LocateCall)
    request_id = engine.add(tokens)
    limit = Deadline(10)
    while not engine.outputs[request_id]:
        engine.step()
    assert not limit.is_over()
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    engine.assert_clean()


def test_an_absent_depot_delays_nothing(make: Make) -> None:
    engine = make()
    engine.depot.present = False
    tokens = prompt(4.5)
    request_id = engine.add(tokens)
    engine.step()
    assert engine.outputs[request_id], "the first step already computes it"
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert not engine.depot.calls


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_first_request_behind_a_daemons_return_is_served(make: Make, ranks: int, runs_ahead: bool) -> None:
    """Although the ranks, which say what they are attached to with their steps, had nothing when last asked."""
    tokens = prompt(9.5)
    engine = make(ranks=ranks, runs_ahead=runs_ahead)
    engine.generate(tokens)
    engine.depot.present = False
    engine.generate(prompt(4.5, seed=1))
    engine.reset()
    engine.depot.present = True
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0, 9 * BLOCK]
    engine.assert_clean()


def pass_time(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much that what a rank said is old."""
    clock = engine.side.namespaces._clock
    monkeypatch.setattr(engine.side.namespaces, "_clock", lambda: clock() + 2 * REPORT_SECONDS)


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_first_request_behind_a_ranks_return_is_served(
    make: Make, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It attaches by itself: later than the scheduler side, or after it alone was away, while the engine is idle."""
    tokens = prompt(9.5)
    engine = make(ranks=2, runs_ahead=runs_ahead)
    engine.generate(tokens)
    engine.attachments[1].gone = True
    engine.generate(prompt(4.5, seed=1))
    assert not engine.side.namespaces.ranks_ready
    engine.reset()
    engine.attachments[1].gone = False
    pass_time(engine, monkeypatch)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0, 9 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("P9")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_rank_that_stays_away_delays_a_request_by_its_word_at_most(
    make: Make, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, new = prompt(4.5), prompt(4.5, seed=1)
    make(ranks=2, runs_ahead=runs_ahead).generate(tokens)
    engine = make(ranks=2, runs_ahead=runs_ahead)
    engine.attachments[1].gone = True
    engine.step()
    # In steps: until the answer to the lookup is there, and the word that its first step asked for.
    unheard = 2 + runs_ahead

    def steps_of(tokens: list[int]) -> int:
        request_id = engine.add(tokens, max_tokens=1)
        steps = 0
        while not engine.outputs[request_id]:
            engine.step()
            steps += 1
        engine.run()
        engine.reset()
        return steps

    assert steps_of(new) <= unheard
    for _ in range(2):
        pass_time(engine, monkeypatch)
        assert steps_of(tokens) <= unheard + 1
        assert steps_of(tokens) <= unheard, "it was asked a moment ago"
    engine.depot.present = False
    engine.step()
    engine.depot.present = True
    assert steps_of(tokens) <= unheard + 1
    assert set(engine.hits.values()) == {0}
    assert engine.side.counters["misses.not_ready"] == 5
    engine.assert_clean()


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("step", ["located", "acquiring", "granted", "dispatched"])
def test_a_request_aborted_at_any_step_of_a_load_is_reported_once(
    make: Make, hybrid: bool, step: str, gate: Gate
) -> None:
    tokens = prompt(9.5)
    make(hybrid=hybrid).generate(tokens)
    engine = make(hybrid=hybrid)
    gate.close()
    if step == "located":
        engine.depot.held.add(LocateCall)
    if step in ("acquiring", "granted"):
        engine.depot.held.add(AcquireCall)
    request_id = engine.add(tokens)
    engine.step()
    if step == "granted":
        engine.session.let_go()
        engine.session.poll()
    if step == "dispatched":
        engine.step()
        assert gate.reached()
    engine.abort(request_id)
    engine.depot.held.clear()
    engine.step()
    gate.open()
    engine.session.let_go()
    engine.settle()
    engine.run()
    assert request_id not in engine.scheduler.requests
    assert (engine.loaded_reports + engine.failed_reports).count(request_id) == (step != "located")
    engine.assert_clean()
    assert engine.generate(tokens) == cold(tokens)


@pytest.mark.requirement("I1b")
@TRANSPORTS
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_generation_that_changes_during_the_copy_fails_the_load(
    make: Make, when: str, gate: Gate, streams: bool
) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make(streams=streams)
    gate.close(batch_bytes=2048)
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    generations = engine.depot.tables.extents["generation"]
    saved = generations.copy()
    if when == "between":
        gate.let_through(3)
    generations[:] += 2
    gate.open()
    if when == "before":
        engine.step()
    deadline = Deadline(10)
    while not engine.failed_reports and not deadline.is_over():
        engine.step()
    generations[:] = saved
    engine.run()
    assert engine.failed_reports == [request_id]
    assert engine.outputs[request_id] == cold(tokens)


@pytest.mark.requirement("P5")
@TRANSPORTS
def test_nothing_is_written_after_a_stalled_load_was_given_up(make: Make, gate: Gate, streams: bool) -> None:
    """The deadline passes in the middle of a copy: the copying thread stops, then reports, and never writes again."""
    tokens = prompt(12.5)
    make().generate(tokens)
    engine = make(settings={"load_timeout_seconds": 3.0}, streams=streams)
    gate.close(batch_bytes=2048)
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    time.sleep(max(engine.side.loads._active[request_id].deadline - time.monotonic(), 0))
    gate.open()
    deadline = Deadline(10)
    while not engine.failed_reports and not deadline.is_over():
        engine.step()
    engine.run()  # the forward checks that the recomputed bytes stay
    assert engine.failed_reports == [request_id]
    assert engine.outputs[request_id] == cold(tokens)
    assert gate.copied < 12
    engine.assert_clean()


def test_two_requests_with_the_same_prefix_at_once(make: Make) -> None:
    tokens = prompt(8.5)
    engine = make()
    ids = [engine.add(tokens), engine.add([*tokens, 5, 6, 7])]
    engine.run()
    assert engine.outputs[ids[0]] == cold(tokens)
    assert engine.outputs[ids[1]] == cold([*tokens, 5, 6, 7])
    engine.assert_clean()
    other = make()
    ids = [other.add(tokens), other.add([*tokens, 5, 6, 7])]
    other.run()
    assert [other.outputs[i] for i in ids] == [cold(tokens), cold([*tokens, 5, 6, 7])]
    assert set(other.hits.values()) == {8 * BLOCK}
    other.assert_clean()


def test_a_policy_other_than_recompute_stores_and_never_loads(make: Make) -> None:
    tokens = prompt(6.5)
    engine = make(policy="fail")
    engine.generate(tokens)
    assert engine.side.counters["stored_objects"] == 6
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0]
    assert engine.depot.count(LocateCall) == 0


def test_a_request_that_skips_the_prefix_cache_is_offered_nothing(make: Make) -> None:
    tokens = prompt(6.5)
    make().generate(tokens)
    engine = make()
    request_id = engine.add(tokens, params={"skip_reading_prefix_cache": True})
    engine.run()
    assert engine.hits[request_id] == 0
    assert engine.depot.count(AcquireCall) == 0


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_a_small_pool_with_preemptions_stays_right(make: Make, hybrid: bool) -> None:
    tokens = [prompt(6.5, seed) for seed in range(4)]
    make(hybrid=hybrid).generate(tokens[0])
    engine = make(hybrid=hybrid, blocks=26 if hybrid else 18)
    ids = [engine.add(each, max_tokens=40) for each in tokens]
    engine.run()
    assert [engine.outputs[i] for i in ids] == [cold(each, 40) for each in tokens]
    engine.assert_clean()
