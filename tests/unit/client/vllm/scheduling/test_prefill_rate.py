"""How fast the engine computes a prompt, as its connector measures it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.prefill_rate import REQUESTS_MIN, TOKEN_SECONDS_GUESS, TOKENS_MIN, PrefillRate
from kvdepot.client.vllm.scheduling.requests import RequestState, load_tokens_max


class Engine:
    """Steps with a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requests: dict[str, RequestState] = {}
        self.prefill_rate = PrefillRate(lambda: self.now)

    def request(self, tokens: int, **state: Any) -> Any:
        request: Any = SimpleNamespace(
            request_id=f"r{len(self.requests)}", num_prompt_tokens=tokens, num_tokens=tokens, num_preemptions=0
        )
        self.requests[request.request_id] = RequestState(request, 0.0, **state)
        return request

    def step(self, seconds: float, *new: Any, computed: int = 0) -> None:
        """One that begins these requests, and takes so long."""
        begun = [SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed) for request in new]
        self.prefill_rate.step(begun, self.requests)
        self.now += seconds

    def compute(self, tokens: int, seconds: float, computed: int = 0) -> None:
        """A request to its first token, and its end."""
        request = self.request(tokens)
        self.step(seconds, request, computed=computed)
        request.num_tokens += 1
        self.prefill_rate.finished(request)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_nothing_is_said_before_some_requests_were_seen(engine: Engine) -> None:
    for seen in range(REQUESTS_MIN):
        assert engine.prefill_rate.token_seconds == 0.0, seen
        engine.compute(1000, 0.5)
    assert engine.prefill_rate.token_seconds == pytest.approx(0.5e-3)


def test_time_runs_from_the_first_step_to_the_one_that_knows_the_first_token(engine: Engine) -> None:
    for _ in range(REQUESTS_MIN):
        request = engine.request(3000)
        engine.step(0.2, request)
        engine.step(0.2)  # the rest of its prompt
        request.num_tokens += 1
        engine.step(5.0)  # what it generates then says nothing
        engine.prefill_rate.finished(request)
    assert engine.prefill_rate.token_seconds == pytest.approx(0.4 / 3000)


def test_an_idle_engine_does_not_become_slow(engine: Engine) -> None:
    for _ in range(REQUESTS_MIN):
        engine.compute(1000, 0.1)
        engine.now += 60.0
    assert engine.prefill_rate.token_seconds == pytest.approx(1e-4)


def test_only_what_was_computed_counts_and_only_of_prompts_that_are_long_enough(engine: Engine) -> None:
    for _ in range(REQUESTS_MIN):
        engine.compute(5000, 0.1, computed=4000)
    assert engine.prefill_rate.token_seconds == pytest.approx(1e-4)
    for _ in range(100):
        engine.compute(5000, 0.1, computed=5000 - TOKENS_MIN + 1)
    assert engine.prefill_rate.token_seconds == pytest.approx(1e-4)


def test_a_step_that_takes_long_moves_nothing_and_a_change_that_lasts_does(engine: Engine) -> None:
    for _ in range(20):
        engine.compute(1000, 0.1)
    engine.compute(1000, 60.0)
    assert engine.prefill_rate.token_seconds == pytest.approx(1e-4)
    for _ in range(20):
        engine.compute(1000, 0.4)
    assert engine.prefill_rate.token_seconds == pytest.approx(4e-4)


def test_long_prompts_say_more_than_many_short_ones(engine: Engine) -> None:
    for _ in range(8):
        engine.compute(300, 0.3)
    engine.compute(20_000, 2.0)
    assert engine.prefill_rate.token_seconds == pytest.approx(1e-4)


def test_a_request_without_a_first_token_says_nothing(engine: Engine) -> None:
    for _ in range(2 * REQUESTS_MIN):
        aborted, preempted = engine.request(1000), engine.request(1000)
        engine.step(9.0, aborted, preempted, engine.request(1000, excluded="streaming_input"))
        engine.prefill_rate.finished(aborted)
        preempted.num_preemptions += 1
        engine.step(1.0)
        preempted.num_tokens += 1
        engine.prefill_rate.finished(preempted)
    for state in engine.requests.values():
        state.request.num_tokens += 1  # type: ignore[misc]
    engine.step(0.0)
    assert engine.prefill_rate.token_seconds == 0.0
    assert not engine.prefill_rate._begun, "and nothing of it is kept"


@pytest.mark.requirement("I3")
@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (None, None), ({}, None), ({"max_load_tokens": 0}, 0), ({"max_load_tokens": 4096}, 4096),
        ({"max_load_tokens": -1}, None), ({"max_load_tokens": True}, None), ({"max_load_tokens": "many"}, None),
        ({"max_load_tokens": 1.5}, None), ([], None),
    ],
)  # fmt: skip
def test_max_load_tokens_that_is_no_number_of_tokens_is_as_none(params: Any, tokens: int | None) -> None:
    request: Any = SimpleNamespace(kv_transfer_params=params)
    assert load_tokens_max(request) == tokens


def test_a_request_that_goes_on_behind_its_prompt_says_nothing() -> None:
    """vLLM's second runner tells of those that were preempted as of new ones: a step of theirs is not their prompt."""
    engine = Engine()
    for _ in range(REQUESTS_MIN):
        request = engine.request(64 * TOKENS_MIN)
        request.num_tokens += 100
        engine.step(0.2, request)
    engine.step(0.2)
    assert engine.prefill_rate.token_seconds == 0


def test_what_is_likely_follows_the_first_measurement(engine: Engine) -> None:
    assert engine.prefill_rate.likely_seconds(2000) == pytest.approx(2000 * TOKEN_SECONDS_GUESS)
    engine.compute(1000, 0.5)
    assert engine.prefill_rate.token_seconds == 0.0, "too little to judge a load by"
    assert engine.prefill_rate.likely_seconds(2000) == pytest.approx(1.0)
    for _ in range(REQUESTS_MIN):
        engine.compute(1000, 2.0)
    assert engine.prefill_rate.likely_seconds(1000) == pytest.approx(1000 * engine.prefill_rate.token_seconds)
