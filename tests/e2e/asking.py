"""Asking an engine of several ranks until it loads."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS

from demo.engine import Engine
from tests.e2e.fleet import TRIES, Fleet, Loaded

LOOKUP_TIMEOUT_SECONDS = 5.0
"""Two ranks wait for each other in every layer: on shared cores a step can take seconds."""


def warm_up(fleet: Fleet, name: str) -> None:
    """What an engine compiles at its first prompts takes longer than a reservation lasts here, and all the cores."""
    engine = fleet.engine(name)
    for tokens in (808, 1960, 1000, 1500):
        ids = fleet.prompt(tokens)
        engine.ask(ids)
        engine.ask(ids)  # resumed


def ask_until(fleet: Fleet, engine: Engine, ids: list[int], enough: Callable[[Loaded], bool]) -> Loaded:
    """Two ranks that wait for each other can take all cores for seconds: then a lookup or a load is late."""
    for _ in range(TRIES):
        answer = fleet.ask(engine, ids)
        if enough(answer):
            return answer
        assert answer.external_tokens == 0
        fleet.forget(engine)
        engine.pause(NEGATIVE_SECONDS)  # what was late is offered to nobody for so long
    raise AssertionError(f"not in {TRIES} tries:\n{fleet.told()}")


def ask_until_loaded(fleet: Fleet, engine: Engine, ids: list[int]) -> Loaded:
    return ask_until(fleet, engine, ids, lambda answer: answer.external_tokens > 0)
