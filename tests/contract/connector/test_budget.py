"""How long a request waits for the answer to its lookup: a tenth of what it may save, within bounds (ADR 73)."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.prefill_rate import TOKEN_SECONDS_GUESS
from kvdepot.core.calls import LocateCall
from vllm.v1.request import RequestStatus

from tests.fakes.direct_session import ARENA_ID
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt

DEFAULTS = {"lookup_min_seconds": 0.05, "lookup_timeout_seconds": 1.0}
TOKENS = prompt(20.5)
STAKE = 20 * BLOCK
"""Tokens of it that can be loaded."""
INSTANT = 1e-6


class Clock:
    """Of the connector, and of its threads. They stand still until the test moves them."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.now = 100.0
        self.starved = 7.0
        self.ready = False
        threads = engine.side.offers._threads
        threads.starved_seconds, threads.is_ready = lambda: self.starved, lambda: self.ready
        engine.side._clock = engine.side.offers._clock = engine.side.prefill_rate._clock = lambda: self.now


def asked(engine: ScriptedEngine, tokens: list[int] = TOKENS) -> Any:
    """Return a request whose lookup gets no answer."""
    engine.depot.held.add(LocateCall)
    return engine.requests[engine.add(tokens)]


def waits(engine: ScriptedEngine, clock: Clock, request: Any, local_tokens: int = 0) -> float:
    """Return for how many seconds vLLM is told to ask again, to 1 ms."""
    began = clock.now
    for milliseconds in range(6000):
        clock.now = began + milliseconds / 1000
        if engine.side.matched(request, local_tokens)[0] is not None:
            return milliseconds / 1000
    raise AssertionError("it waits without end")


def says(engine: ScriptedEngine, boundary_tokens: int) -> dict[str, Any]:
    """Return what another engine, which stores so many tokens, tells of a prompt."""
    namespace = engine.side.namespaces.registered_id.hex()
    return {f"kvdepot:{ARENA_ID:016x}": {"namespace": namespace, "boundary_tokens": boundary_tokens}}


@pytest.mark.requirement("P5")
@pytest.mark.parametrize(
    ("token_seconds", "settings", "local_tokens", "expected"),
    [
        pytest.param(INSTANT, {}, 0, 0.05, id="a fast engine waits for the least"),
        pytest.param(0.01, {}, 0, 0.32, id="a tenth of 3.2 s"),
        pytest.param(0.01, {}, STAKE // 2, 0.32, id="the daemon does not know what the engine has itself"),
        pytest.param(0.01, {}, STAKE, 0.05, id="nothing is at stake"),
        pytest.param(1.0, {}, 0, 1.0, id="a slow engine waits for the most"),
        pytest.param(1.0, {"lookup_timeout_seconds": 3.0}, 0, 3.0, id="the setting raises the most"),
        pytest.param(1.0, {"lookup_timeout_seconds": 0.02}, 0, 0.02, id="the setting lowers the most"),
        pytest.param(1.0, {"lookup_timeout_seconds": 0.0}, 0, 0.0, id="the setting ends all waits"),
        pytest.param(INSTANT, {"lookup_min_seconds": 0.2}, 0, 0.2, id="the setting raises the least"),
    ],
)
def test_a_request_waits_for_a_tenth_of_what_it_may_save(
    make: Make, token_seconds: float, settings: dict[str, float], local_tokens: int, expected: float
) -> None:
    engine = make(settings=DEFAULTS | settings)
    engine.side.prefill_rate._likely_token_seconds = token_seconds
    clock = Clock(engine)
    request = asked(engine)
    (call,) = (one for one in engine.depot.calls if isinstance(one, LocateCall))
    assert waits(engine, clock, request, local_tokens) == pytest.approx(expected, abs=0.002)
    if local_tokens < STAKE:
        assert call.wait_seconds == pytest.approx(expected, abs=0.002), "the daemon has to answer in this time"
    engine.session.let_go()
    engine.run()
    assert engine.outputs[request.request_id] == cold(TOKENS)


@pytest.mark.requirement("P5")
@pytest.mark.parametrize(("starved", "expected"), [(0.0, 0.05), (0.02, 0.07), (0.05, 0.1), (3.0, 0.1)])
def test_time_without_a_processor_counts_only_after_twice_the_budget(
    make: Make, starved: float, expected: float
) -> None:
    engine = make(settings=DEFAULTS)
    engine.side.prefill_rate._likely_token_seconds = INSTANT
    clock = Clock(engine)
    request = asked(engine)
    clock.starved += starved
    assert waits(engine, clock, request) == pytest.approx(expected, abs=0.002)
    engine.session.let_go()
    engine.run()


@pytest.mark.requirement("P5")
def test_a_wait_for_a_processor_that_is_not_over_does_not_count(make: Make) -> None:
    """The kernel says how long it was when it is over."""
    engine = make(settings=DEFAULTS)
    engine.side.prefill_rate._likely_token_seconds = INSTANT
    clock = Clock(engine)
    request = asked(engine)
    clock.ready = True
    assert waits(engine, clock, request) == pytest.approx(0.1, abs=0.002)
    engine.session.let_go()
    engine.run()


@pytest.mark.requirement("P5")
def test_a_request_waits_for_a_namespace_for_the_least(make: Make) -> None:
    """Until the weights are hashed, which may take minutes."""
    engine = make(settings=DEFAULTS)
    engine.side.prefill_rate._likely_token_seconds = 0.01
    clock = Clock(engine)
    engine.session.forget(engine.side.namespaces.registered_id)
    assert waits(engine, clock, engine.requests[engine.add(TOKENS)]) == pytest.approx(0.05, abs=0.002)
    engine.run()


@pytest.mark.requirement("P5")
def test_before_anything_is_measured_an_engine_counts_as_slow(make: Make) -> None:
    engine = make(settings=DEFAULTS)
    tokens = prompt(60.5)
    expected = 0.1 * 60 * BLOCK * TOKEN_SECONDS_GUESS
    assert 0.05 < expected < 1.0
    assert waits(engine, Clock(engine), asked(engine, tokens)) == pytest.approx(expected, abs=0.002)
    engine.session.let_go()
    engine.run()


@pytest.mark.requirement("P5")
def test_the_second_request_hits_although_a_busy_daemon_answers_late(make: Make) -> None:
    """As in the quick start: one prompt is measured, and the same one is asked for again."""
    engine = make(settings=DEFAULTS)
    clock = Clock(engine)
    first = engine.add(TOKENS)
    while not engine.outputs[first]:
        engine.step()
        clock.now += 4.0
    engine.run()
    engine.settle()
    engine.reset()
    second = asked(engine)
    engine.step()
    clock.now += 0.3  # the answer takes six times the least wait
    engine.step()
    assert not engine.outputs[second.request_id], "it still waits"
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.hits[second.request_id] == STAKE
    assert engine.outputs[second.request_id] == cold(TOKENS)
    engine.assert_clean()


@pytest.mark.requirement("P5")
def test_other_requests_are_computed_while_one_waits(make: Make) -> None:
    engine = make(settings=DEFAULTS)
    clock = Clock(engine)
    waiting = asked(engine)
    engine.step()
    engine.depot.held.clear()
    other = engine.add(prompt(2.5, seed=7))
    for _ in range(4):
        engine.step()
    assert engine.outputs[other] and not engine.outputs[waiting.request_id]
    clock.now += 1.0
    engine.run()
    assert engine.outputs[waiting.request_id] == cold(TOKENS)
    engine.session.let_go()


@pytest.mark.requirement("P5", "P7")
@pytest.mark.parametrize(("step_seconds", "answer_seconds"), [(0.6, 0.7), (0.35, 0.9), (0.6, 1.1)])
def test_slow_answers_in_slow_steps_are_used(make: Make, step_seconds: float, answer_seconds: float) -> None:
    """Each answer is too old when it is there: it is renewed once, and not without end."""
    engine = make(settings=DEFAULTS)
    engine.add(TOKENS)
    engine.run()
    engine.settle()
    engine.reset()
    engine.side.prefill_rate._likely_token_seconds = 1.0
    clock = Clock(engine)
    request = asked(engine)
    state = engine.side._requests[request.request_id]
    began = clock.now
    while request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert clock.now - began < 5.0, "it is not admitted"
        late = state.lookup is not None and not state.lookup.answered
        if late and clock.now - state.lookup.asked_at >= answer_seconds:
            engine.session.let_go()
        engine.step()
        clock.now += step_seconds
    engine.run()
    assert engine.hits[request.request_id] == STAKE
    assert engine.outputs[request.request_id] == cold(TOKENS)
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()


@pytest.mark.requirement("P7")
def test_a_hit_does_not_wait_behind_misses_that_came_later(make: Make) -> None:
    """One seat, which is free every two seconds: an answer is always too old, and a renewal lets the next one pass."""
    engine = make(settings=DEFAULTS)
    engine.add(TOKENS)
    engine.run()
    engine.settle()
    engine.reset()
    clock = Clock(engine)
    engine.scheduler.max_num_active_reqs = 1
    engine.add(prompt(3.5, seed=50), max_tokens=40)
    engine.step()
    hit = engine.add(TOKENS)
    misses = [engine.add(prompt(3.5, seed=100 + number), max_tokens=40) for number in range(6)]
    begun: list[str] = []
    while engine.scheduler.has_requests():
        begun += [new.req_id for new in engine.step().scheduled_new_reqs if new.req_id not in begun]
        clock.now += 0.05
    assert begun.index(hit) <= 2 < begun.index(misses[-1])


@pytest.mark.requirement("A4", "P7")
def test_a_prompt_that_nobody_stores_does_not_flood_the_daemon(make: Make) -> None:
    engine = make(settings=DEFAULTS)
    engine.side.prefill_rate._likely_token_seconds = 1.0
    clock = Clock(engine)
    params = {"extra_args": {"kv_transfer_params": says(engine, STAKE)}}
    names = [engine.add(prompt(20.5, seed=number), 4, params=params) for number in range(8)]
    while not all(engine.outputs[name] for name in names):
        engine.step()
        clock.now += 0.003
    asked_calls = sum(isinstance(call, LocateCall) for call in engine.depot.calls)
    assert asked_calls <= 13 * len(names)
