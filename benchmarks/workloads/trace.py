"""Prompts as segments of tokens, and sessions that issue them, as lines of a trace."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that always come together: a system prompt, a document, or a message. Equal names: equal tokens."""

    name: object
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    at_seconds: float
    segments: tuple[Segment, ...]
    output_tokens: int

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, `gap_seconds` after the one before."""

    gap_seconds: float
    segments: tuple[Segment, ...]
    output_tokens: int


Session = Callable[[Random, int], Iterator[Turn]]
"""Draws the turns of the session of this number."""


def lognormal(random: Random, mean: float, sigma: float) -> float:
    """Draw from a log-normal distribution of this mean. `sigma`: of the logarithm."""
    return random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def tokens(random: Random, mean: float, sigma: float, most: int = 1 << 17) -> int:
    """Draw a length of this mean, at least 1 and at most `most`."""
    return max(1, min(round(lognormal(random, mean, sigma)), most))


def poisson(random: Random, session: Session, *, gap_seconds: float) -> Iterator[Prompt]:
    """Yield the prompts of sessions that begin at random, with this mean gap, in the order of their times."""
    ready: list[tuple[float, int, Turn, Iterator[Turn]]] = []
    begin, number = 0.0, 0
    while True:
        begin += random.expovariate(1 / gap_seconds)
        while ready and ready[0][0] <= begin:
            at, of, turn, turns = heapq.heappop(ready)
            yield Prompt(at, turn.segments, turn.output_tokens)
            if (following := next(turns, None)) is not None:
                heapq.heappush(ready, (at + following.gap_seconds, of, following, turns))
        turns = session(random, number)
        turn = next(turns)
        heapq.heappush(ready, (begin + turn.gap_seconds, number, turn, turns))
        number += 1


@dataclass
class Blocks:
    """Numbers of blocks. Two prompts share a number if they are equal up to the end of that block."""

    _numbers: dict[object, int] = field(default_factory=dict)

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, segments: Iterable[Segment]) -> list[int]:
        """Return a number for each block of the prompt, the last one of which may be partial."""
        blocks: list[int] = []
        end = prefix = 0
        for segment in segments:
            prefix = -1 - self._number((prefix, segment.name))
            end += segment.tokens
            while (len(blocks) + 1) * BLOCK_TOKENS <= end:
                blocks.append(self._number((prefix, len(blocks))))
        if len(blocks) * BLOCK_TOKENS < end:
            blocks.append(self._number((prefix, len(blocks), end)))
        return blocks


def lines(prompts: Iterable[Prompt]) -> Iterator[str]:
    """Yield a line for each prompt. Times count from the first one."""
    blocks = Blocks()
    numbers: dict[int, int] = {}
    start = None
    for prompt in prompts:
        start = prompt.at_seconds if start is None else start
        yield json.dumps(
            {
                "timestamp": round(1000 * (prompt.at_seconds - start)),
                "input_length": prompt.tokens,
                "output_length": prompt.output_tokens,
                "hash_ids": [numbers.setdefault(block, len(numbers)) for block in blocks.of(prompt.segments)],
            }
        )
