"""LoRA adapters of a real engine: KV of one content never meets the other content of the same name and path."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.vllm.identity.weights import LOOK_AGAIN_SECONDS

from demo.engine import Adapter, Engine
from tests.e2e.fleet import Fleet, Loaded
from tests.rigs.patience import Deadline
from tests.rigs.toy_adapters import write_adapter

ENGINES = ("dense_adapters",)
PROMPT_TOKENS: Final = 1400
HIT_TOKENS: Final = 1280
_DIGEST_SECONDS: Final = 60.0


class Adapters:
    """Adapters of one engine, by name: each has its path, and a new number each time that it is loaded."""

    def __init__(self, fleet: Fleet, engine: Engine, folder: Path) -> None:
        self.fleet, self.engine, self.folder = fleet, engine, folder
        self._numbers = itertools.count(1)

    def write(self, name: str, content: int) -> None:
        write_adapter(self.folder / name, content)

    def load(self, name: str) -> Adapter:
        """Load it, or load it again, and return it once its KV is stored and served."""
        adapter = Adapter(name, next(self._numbers), self.folder / name)
        deadline = Deadline(_DIGEST_SECONDS)
        while True:
            prompt = self.fleet.prompt(600)
            self.ask(prompt, adapter)
            self.fleet.forget(self.engine)
            if self.ask(prompt, adapter).external_tokens:
                return adapter
            assert not deadline.is_over(), f"{name} is not served: {self.fleet.told()}"

    def ask(self, prompt: list[int], adapter: Adapter) -> Loaded:
        return self.fleet.ask(self.engine, prompt, adapter=adapter)

    def alone(self, prompt: list[int], content: int) -> tuple[int, ...]:
        """The tokens that this content computes, by an adapter of a name that nobody uses."""
        name = f"alone-{next(self._numbers)}"
        self.write(name, content)
        computed = self.ask(prompt, Adapter(name, next(self._numbers), self.folder / name))
        assert (computed.external_tokens, computed.local_tokens) == (0, 0)
        return computed.tokens


@pytest.fixture
def make(fleet: Fleet, tmp_path: Path) -> Callable[[], Adapters]:
    return lambda: Adapters(fleet, fleet.engine("dense_adapters"), tmp_path)


@pytest.mark.requirement("I1")
def test_an_adapter_that_is_replaced_by_another_of_its_name_is_served_its_own_kv_alone(
    fleet: Fleet, make: Callable[[], Adapters]
) -> None:
    adapters = make()
    prompt = fleet.prompt(PROMPT_TOKENS)
    first, second = adapters.alone(prompt, 1), adapters.alone(prompt, 2)
    assert first != second != adapters.engine.ask(prompt).tokens, "these adapters change nothing"
    for content, tokens, hit in ((1, first, 0), (2, second, 0), (1, first, HIT_TOKENS), (2, second, HIT_TOKENS)):
        adapters.write("same", content)
        adapter = adapters.load("same")
        fleet.forget(adapters.engine)
        answer = adapters.ask(prompt, adapter)
        assert (answer.external_tokens, answer.tokens) == (hit, tokens), fleet.told()
        fleet.forget(adapters.engine)
        answer = adapters.ask(prompt, adapter)
        assert (answer.external_tokens, answer.tokens) == (HIT_TOKENS, tokens), fleet.told()


@pytest.mark.requirement("I1")
@pytest.mark.long(seconds=90)
def test_files_that_change_under_a_loaded_adapter_neither_get_nor_leave_wrong_kv(
    fleet: Fleet, make: Callable[[], Adapters]
) -> None:
    """vLLM drops the adapter for another one, and reads the path again without a word."""
    adapters = make()
    prompt, later = fleet.prompt(PROMPT_TOKENS), fleet.prompt(PROMPT_TOKENS)
    right = {content: [adapters.alone(ids, content) for ids in (prompt, later)] for content in (1, 5)}
    adapters.write("same", 1)
    adapter = adapters.load("same")
    assert adapters.ask(prompt, adapter).tokens == right[1][0]
    adapters.write("same", 5)
    adapters.alone(fleet.prompt(300), 9)  # evicts it
    time.sleep(2 * LOOK_AGAIN_SECONDS)
    for ids, expected in zip((prompt, later), right[5], strict=True):
        fleet.forget(adapters.engine)
        answer = adapters.ask(ids, adapter)
        assert (answer.external_tokens, answer.tokens) == (0, expected), fleet.told()
    adapters.write("same", 1)
    again = adapters.load("same")
    fleet.forget(adapters.engine)
    answer = adapters.ask(later, again)
    assert (answer.external_tokens, answer.tokens) == (0, right[1][1]), "what it computed was stored"
    fleet.forget(adapters.engine)
    answer = adapters.ask(prompt, again)
    assert (answer.external_tokens, answer.tokens) == (HIT_TOKENS, right[1][0])
