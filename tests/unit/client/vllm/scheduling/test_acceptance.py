"""Accepted draft tokens, as they follow from what vLLM keeps of a request."""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.acceptance import Acceptance
from kvdepot.client.vllm.scheduling.requests import RequestState

from tests.rigs.seeds import drawn


class Engine:
    """One request, whose outputs are read up to `ahead` steps late, as vLLM counts it."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.request: Any = SimpleNamespace(request_id="a", num_computed_tokens=0, num_in_flight_tokens=0)
        self.state = RequestState(self.request, 0.0)
        self.counters: Counter[str] = Counter()
        self.acceptance = Acceptance(self.counters)
        self.unread: deque[tuple[int, int, int]] = deque()
        self.drafts = self.accepted = 0

    def step(self, tokens: int, drafts: int = 0, rejected: int = 0) -> None:
        self.acceptance.step({"a": self.state}, {"a": tokens}, {"a": [-1] * drafts} if drafts else {})
        self.request.num_computed_tokens += tokens
        self.request.num_in_flight_tokens += tokens
        self.unread.append((tokens, drafts, rejected))
        while len(self.unread) > self.ahead:
            self.read()

    def read(self) -> None:
        tokens, drafts, rejected = self.unread.popleft()
        self.request.num_in_flight_tokens -= tokens
        self.request.num_computed_tokens -= rejected
        self.drafts += drafts
        self.accepted += drafts - rejected

    def finish(self) -> None:
        self.acceptance.finished(self.state)

    def counted(self, kv: str = "computed") -> tuple[int, int]:
        return self.counters[f"draft_tokens.{kv}"], self.counters[f"accepted_tokens.{kv}"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", drawn(range(8)))
def test_what_vllm_accepts_is_counted_however_late_it_reads_outputs(ahead: int, seed: int) -> None:
    random, engine = Random(seed), Engine(ahead)
    for _ in range(3):
        engine.step(random.randrange(1, 100))  # of the prompt
    for _ in range(40):
        drafts = random.randrange(4)
        engine.step(1 + drafts, drafts, random.randrange(drafts + 1))
    engine.finish()  # what is in flight is read by nobody
    assert engine.counted() == (engine.drafts, engine.accepted)
    assert engine.accepted
    assert not engine.acceptance._requests


@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_whose_kv_was_loaded_are_counted_apart(ahead: int) -> None:
    engine = Engine(ahead)
    engine.state.loaded_tokens = 64
    engine.request.num_computed_tokens = 64
    engine.step(4, 3, rejected=2)
    engine.step(1)
    engine.finish()
    assert engine.counted("loaded") == (3, 1)
    assert engine.counted() == (0, 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_preempted_request_goes_on_being_counted(ahead: int) -> None:
    engine = Engine(ahead)
    engine.step(100)
    engine.step(4, 3, rejected=1)
    engine.step(4, 3, rejected=3)
    engine.acceptance.step({"a": engine.state}, {}, {})  # preempted: a step without it
    engine.request.num_computed_tokens = 0
    while engine.unread:  # their outputs come, and change nothing
        engine.request.num_in_flight_tokens -= engine.unread.popleft()[0]
    before = engine.counted()
    engine.step(103)
    engine.step(4, 3, rejected=1)
    engine.step(1)
    engine.finish()
    assert engine.counted() == (before[0] + 3, before[1] + 2)


def test_a_request_that_the_connector_does_not_know_is_not_counted() -> None:
    counters: Counter[str] = Counter()
    Acceptance(counters).step({}, {"b": 4}, {"b": [1, 2, 3]})
    assert not counters
