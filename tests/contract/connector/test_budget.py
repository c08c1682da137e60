"""How long a request waits for the answer to its lookup: a tenth of what it may save, within bounds (ADR 73)."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.prefill_rate import TOKEN_SECONDS_GUESS
from kvdepot.core.calls import LocateCall

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt

DEFAULTS = {"lookup_min_seconds": 0.05, "lookup_timeout_seconds": 1.0}
TOKENS = prompt(20.5)
STAKE = 20 * BLOCK
"""Tokens of it that can be loaded."""
INSTANT = 1e-6


class Clock:
    """Of the connector. It stands still until the test moves it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.now = 100.0
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


@pytest.mark.requirement("P5")
@pytest.mark.parametrize(
    ("token_seconds", "settings", "local_tokens", "expected"),
    [
        pytest.param(INSTANT, {}, 0, 0.05, id="a fast engine waits for the least"),
        pytest.param(0.01, {}, 0, 0.32, id="a tenth of 3.2 s"),
        pytest.param(0.01, {}, STAKE // 2, 0.16, id="what the engine has itself is not at stake"),
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
    if not local_tokens:
        assert call.wait_seconds == pytest.approx(expected, abs=0.002), "the daemon has to answer in this time"
    engine.session.let_go()
    engine.run()
    assert engine.outputs[request.request_id] == cold(TOKENS)


@pytest.mark.requirement("P5")
def test_a_request_waits_for_the_ranks_as_long_as_for_a_lookup(make: Make) -> None:
    engine = make(settings=DEFAULTS)
    engine.side.prefill_rate._likely_token_seconds = 0.01
    clock = Clock(engine)
    engine.session.forget(engine.side.namespaces.registered_id)
    assert waits(engine, clock, engine.requests[engine.add(TOKENS)]) == pytest.approx(0.32, abs=0.002)
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
