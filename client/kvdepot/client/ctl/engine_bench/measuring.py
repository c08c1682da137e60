"""What a prompt's first token takes: computed, with the engine's own cache, and with kvdepot after that is lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.client.ctl.engine_bench.server import Counters, EngineBenchError, EngineServer
from kvdepot.client.ctl.engine_bench.workloads import Item, random_prompts
from kvdepot.core.units import percent_text

COLD, OWN, DEPOT = "cold", "engine cache", "kvdepot"
WAYS: Final = (COLD, OWN, DEPOT)
GAIN_MIN: Final = 0.05
"""A median gain below it is no gain."""
AGREE: Final = 0.8
"""Of the prompts have to say the same, else the machine is too noisy."""
HIT_MIN: Final = 0.2
"""Of the tokens of prompts: with fewer loaded tokens there is nothing to judge."""
OWN_MAX: Final = 0.05
"""Of the tokens of prompts: with more that the engine still had itself, its own cache makes the times."""
_FILLER_TOKENS: Final = 8_000
_FILLED: Final = 1.2
"""As many tokens as the engine's cache holds, and a fifth more."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, by way: seconds until its first token."""

    tokens: int
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        """Return the time with kvdepot by the time of computing."""
        return self.seconds[DEPOT] / self.seconds[COLD]


@dataclass(frozen=True, slots=True)
class Way:
    """All prompts, one way. `saved`: of the prompts' tokens, the part that was not computed."""

    name: str
    p50_seconds: float
    p90_seconds: float
    saved: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether kvdepot is worth it, in one line."""

    worth: bool | None  # None: it cannot be told
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """A whole measurement. `loaded`: of the prompts' tokens, the part that came from kvdepot, as vLLM counts it."""

    asked: list[Asked]
    ways: list[Way]
    loaded: float

    @property
    def verdict(self) -> Verdict:
        if self.loaded < HIT_MIN:
            return Verdict(
                None,
                f"NOTHING TO JUDGE: {percent_text(self.loaded)} of the tokens came from kvdepot;"
                " see kvdepotctl requests",
            )
        own = self.ways[2].saved - self.loaded
        if own > OWN_MAX:
            return Verdict(
                None,
                f"NOTHING TO JUDGE: the engine's own cache still had {percent_text(own)} of the tokens;"
                " use VLLM_SERVER_DEV_MODE=1, and no other load",
            )
        faster = sum(one.ratio < 1 for one in self.asked) / len(self.asked)
        cold, depot = self.ways[0].p50_seconds, self.ways[2].p50_seconds
        gain = 1 - depot / cold
        if gain >= GAIN_MIN and faster >= AGREE:
            return Verdict(True, f"WORTH IT: TTFT p50 falls by {percent_text(gain)}; {self._break_even()}")
        if gain <= 0 and faster <= 1 - AGREE:
            return Verdict(False, f"NOT WORTH IT: TTFT p50 rises by {percent_text(-gain)}; {self._break_even()}")
        return Verdict(
            None, f"TOO CLOSE, or this machine is too noisy to tell: {percent_text(faster)} of prompts were faster"
        )

    @property
    def break_even_tokens(self) -> float | None:
        """Return from how many tokens on kvdepot is faster, by a line through either way; None: not by any line."""
        if len({one.tokens for one in self.asked}) < 2:
            return 0.0 if self.asked[0].ratio < 1 else None
        tokens = [one.tokens for one in self.asked]
        cold, depot = (statistics.linear_regression(tokens, [one.seconds[way] for one in self.asked])
                       for way in (COLD, DEPOT))  # fmt: skip
        if cold.slope <= depot.slope:  # what kvdepot gains shrinks with the length
            longest = max(tokens)
            faster = depot.intercept + depot.slope * longest < cold.intercept + cold.slope * longest
            return 0.0 if faster else None
        return max((depot.intercept - cold.intercept) / (cold.slope - depot.slope), 0.0)

    def _break_even(self) -> str:
        tokens = self.break_even_tokens
        if tokens is None:
            return "no length of a prompt gains"
        shortest = min(one.tokens for one in self.asked)
        return "every length gains" if tokens <= shortest else f"break-even at {tokens:.0f} tokens"


class Measuring:
    """Sends each prompt once cold, once with the engine's own cache, and once when only kvdepot has it."""

    def __init__(
        self, server: EngineServer, model: str, stored: Callable[[], None], say: Say, fill: Sequence[list[int]] = ()
    ) -> None:
        """Prepare. `stored` returns when the daemon has what was sent. `fill`: prompts that push out everything else.

        Without them the server has to offer `/reset_prefix_cache`.
        """
        self._server = server
        self._model = model
        self._stored = stored
        self._say = say
        self._fill = fill

    def run(self, prompts: Sequence[Item]) -> Found:
        seconds: list[dict[str, float]] = [{} for _ in prompts]
        counted = dict.fromkeys(WAYS, Counters())
        longest = max(prompts, key=lambda item: item.tokens)
        self._say(f"a prompt that does not count: {longest.tokens} tokens")
        self._server.ask(self._model, longest.prompt(0)[::-1])  # the first one of a server pays for what it compiles
        for number, item in enumerate(prompts):
            self._say(f"prompt {number + 1} of {len(prompts)}: {item.tokens} tokens, cold and with the engine's cache")
            for time, way in enumerate((COLD, OWN)):
                seconds[number][way] = self._ask(item.prompt(time), way, counted)
        self._stored()
        self._forget()
        for number, item in enumerate(prompts):
            self._say(f"prompt {number + 1} of {len(prompts)}: {item.tokens} tokens, with kvdepot")
            seconds[number][DEPOT] = self._ask(item.prompt(2), DEPOT, counted)
        asked = [Asked(item.tokens, one) for item, one in zip(prompts, seconds, strict=True)]
        total = sum(one.tokens for one in asked)
        return Found(asked, [_way(way, asked, counted[way], total) for way in WAYS], counted[DEPOT].external / total)

    def _ask(self, prompt: list[int], way: str, counted: dict[str, Counters]) -> float:
        before = self._server.counters()
        seconds = self._server.ask(self._model, prompt)
        counted[way] += self._server.counters() - before
        return seconds

    def _forget(self) -> None:
        """Have the engine lose its own cache."""
        if self._fill:
            self._say(f"sending {sum(map(len, self._fill))} other tokens, so that the engine's own cache has nothing")
            for prompt in self._fill:
                self._server.ask(self._model, prompt)
        elif not self._server.reset_own_cache():
            raise EngineBenchError(
                "the server has no /reset_prefix_cache",
                advice="start it with VLLM_SERVER_DEV_MODE=1, or add --fill: it sends prompts that fill its cache",
            )


def _way(name: str, asked: Sequence[Asked], counted: Counters, total: int) -> Way:
    seconds = sorted(one.seconds[name] for one in asked)
    ninth = seconds[min(int(0.9 * len(seconds)), len(seconds) - 1)]
    return Way(name, statistics.median(seconds), ninth, (counted.own + counted.external) / total)


def fillers(server: EngineServer, tokens_max: int, seed: int) -> list[list[int]]:
    """Return prompts of more tokens than the engine's own cache holds."""
    held = server.own_cache_tokens()
    if not held:
        raise EngineBenchError("the server does not say how large its cache is", advice="set VLLM_SERVER_DEV_MODE=1")
    length = min(_FILLER_TOKENS, tokens_max)
    return list(random_prompts(int(_FILLED * held / length) + 1, length, seed))
