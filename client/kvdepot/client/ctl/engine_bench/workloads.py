"""Prompts as users of a kind of service send them: how long, and how much of one the service has seen before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN_MIN, _TOKEN_MAX = 50, 250
"""Token ids that every model has. A larger id than the model has ends a vLLM that runs without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of the part that comes again, from and to, and of the part that is new."""

    known_min: int
    known_max: int
    new: int
    about: str


WORKLOADS: Final = {
    "chat": Workload(1_000, 8_000, 200, "a conversation, and the next message"),
    "docs": Workload(4_000, 32_000, 100, "a document, and a question about it"),
    "agents": Workload(2_000, 24_000, 1_000, "the steps of an agent, and the answer of a tool"),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt's known part, and one new part for each time that it is sent."""

    known: list[int]
    new: tuple[list[int], ...]

    def prompt(self, time: int) -> list[int]:
        return self.known + self.new[time]

    @property
    def tokens(self) -> int:
        return len(self.known) + len(self.new[0])


def items(workload: Workload, count: int, *, tokens_max: int, times: int, seed: int) -> Iterator[Item]:
    """Yield prompts whose lengths spread evenly over the workload's, the order drawn.

    Args:
        workload: Its lengths. They shrink together if the longest prompt would be longer than the engine takes.
        count: Of prompts.
        tokens_max: Tokens of the longest prompt that the engine takes.
        times: How often each is sent.
        seed: Another one makes prompts that nobody has seen.
    """
    rng = random.Random(seed)  # noqa: S311 - prompts are no secret
    factor = min(1.0, tokens_max / (workload.known_max + workload.new))
    low, high, new = (max(int(factor * one), 1) for one in (workload.known_min, workload.known_max, workload.new))
    lengths = [low + (high - low) * number // max(count - 1, 1) for number in range(count)]
    rng.shuffle(lengths)
    for length in lengths:
        yield Item(_tokens(rng, length), tuple(_tokens(rng, new) for _ in range(times)))


def random_prompts(count: int, length: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts of so many tokens, which have nothing in common."""
    rng = random.Random(seed)  # noqa: S311 - prompts are no secret
    for _ in range(count):
        yield _tokens(rng, length)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_TOKEN_MIN, _TOKEN_MAX) for _ in range(count)]
