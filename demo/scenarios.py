"""The rows of the demo: what is done to engines and daemon before a prompt is sent again, and what must come back."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.daemon import Daemon
from demo.engine import LOAD_ALWAYS, Answer, Engine, EngineOptions, EngineProcessError, depot_connector
from demo.toys import Toy, make_toy, prompt

PROMPTS = 3
PROMPT_TOKENS = 3000
OUTPUT_TOKENS = 16
LOOKUP_TIMEOUT_SECONDS = 2.0  # a demo may run on a busy machine, whose delays would be misses
TIER_TIMEOUT_SECONDS = 60.0
DISK = BUCKET = PEER = 1  # of the daemon's tiers; 0 is RAM
PUBLISHED = "shared_publications.bucket/written"
Say = Callable[[str], None]
Tokens = dict[str, list[tuple[int, ...]]]
"""Generated token ids, by model and prompt."""
_WARM_UPS = itertools.count()  # prompts that nobody has seen


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario of one model. Token counts are sums over its prompts."""

    model: str
    scenario: str
    prompts: int
    prompt_tokens: int
    local_tokens: int  # from the engine's own cache
    kvdepot_tokens: int  # from kvdepot, as vLLM counts it
    served_tokens: int  # the same, as the daemon counts it
    expected_tokens: int  # what kvdepot has to supply
    first_token_seconds: float  # median over the prompts
    tokens_equal: bool  # to the reference run

    @property
    def hit_as_expected(self) -> bool:
        return self.kvdepot_tokens == self.served_tokens == self.expected_tokens

    @property
    def passed(self) -> bool:
        return self.tokens_equal and self.hit_as_expected

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_as_expected": self.hit_as_expected, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class ToyRun:
    """One model, its prompts and where its requests can resume."""

    toy: Toy
    options: EngineOptions
    boundary_tokens: int
    prompts: list[list[int]]
    objects: int  # that the daemon must hold once all prompts are stored

    @staticmethod
    def make(toy: Toy, models: Path, endpoint: str) -> ToyRun:
        options = EngineOptions(
            toy,
            make_toy(toy, models),
            depot_connector(
                endpoint,
                lookup_timeout_seconds=LOOKUP_TIMEOUT_SECONDS,
                lookup_min_seconds=LOOKUP_TIMEOUT_SECONDS,
                load_weight=LOAD_ALWAYS,
            ),
        )
        chunk_tokens = toy.chunk_tokens
        boundary = (PROMPT_TOKENS - 1) // chunk_tokens * chunk_tokens
        prompts = [prompt(PROMPT_TOKENS, f"demo-{toy.name}-{number}") for number in range(PROMPTS)]
        objects = PROMPTS * (boundary // chunk_tokens + toy.checkpoints_per_prompt)
        return ToyRun(toy, options, boundary, prompts, objects)


class Demo:
    """Engines of all models side by side on one daemon; `rows` fills up as scenarios run."""

    def __init__(
        self, daemon: Daemon, runs: Sequence[ToyRun], logs: Path, say: Say,
        reference: Tokens | None = None,
    ) -> None:  # fmt: skip
        """`reference`: tokens of a run that was measured on another node."""
        self.rows: list[Row] = []
        self.reference = reference or {}
        self._daemon = daemon
        self._runs = runs
        self._logs = logs
        self._say = say
        self._engines: dict[tuple[str, str], Engine] = {}
        self._objects = 0  # that the daemon holds beside those of the prompts

    def run(self) -> None:
        self._start("A")
        self._objects = self._daemon.settle().tiers[0].objects
        self._measure("A", "cold", expect_hits=False, is_reference=True)
        self._settle()
        self._measure("A", "warm (the engine's own cache)", expect_hits=False)
        self._reset("A")
        self._measure("A", "after a cache reset", expect_hits=True)
        self._settle()
        self._say("stopping the engines and starting them again")
        self._stop("A")
        self._start("A")
        self._measure("A", "after an engine restart", expect_hits=True)
        self._settle()
        self._start("B")
        self._measure("B", "from a second engine", expect_hits=True)
        self._settle()
        self._say(f"killing kvdepotd (pid {self._daemon.pid}, SIGKILL) and starting it again on its arena")
        self._daemon.kill()
        self._daemon.start()
        self._daemon.wait_attached(len(self._engines))
        self._settle()
        self._reset("A")
        self._measure("A", "after kvdepotd's SIGKILL and restart", expect_hits=True)
        self._settle_on_disk()
        self._say("stopping kvdepotd, removing its arena, and starting it again: all it has now is on its disk")
        self._daemon.stop()
        self._restart_without_arena()
        self._daemon.wait_attached(len(self._engines))
        self._reset("A")
        self._measure("A", "after kvdepotd's restart, RAM off", expect_hits=True)
        self._daemon.settle()
        self._say("as after a reboot: ending engines and kvdepotd (SIGKILL), removing the arena, starting all again")
        self._daemon.kill()
        for name in ("A", "B"):
            self._stop(name)
        self._restart_without_arena()
        self._start("A")
        self._measure("A", "after a reboot", expect_hits=True)

    def fill_bucket(self) -> None:
        """Store the prompts in the daemon's bucket, and end the engine."""
        self._start("C")
        for run in self._runs:
            self._say(f"{run.toy.name}: the prompts on a node with a bucket")
            for ids in run.prompts:
                self._engines[run.toy.name, "C"].ask(ids, OUTPUT_TOKENS)
        objects = sum(run.objects for run in self._runs)
        self._say(f"waiting until {objects} objects are in the bucket")
        self._daemon.wait(
            lambda status: status.counters.get(PUBLISHED, 0) >= objects and not status.tiers[BUCKET].queued_objects,
            TIER_TIMEOUT_SECONDS,
            f"done writing {objects} objects to the bucket",
        )
        self._stop("C")

    def load_from_bucket(self) -> None:
        """Ask a new engine of a node that has nothing but the bucket."""
        self._start("D")
        self._measure("D", "from a bucket, on a new node", expect_hits=True)

    def load_from_peer(self) -> None:
        """Ask a new engine of a node whose daemon has nothing but a peer."""
        self._daemon.wait(lambda status: status.tiers[PEER].state == "ready", TIER_TIMEOUT_SECONDS, "sees its peer")
        self._start("E")
        self._measure("E", "from the RAM of another node", expect_hits=True)

    def _restart_without_arena(self) -> None:
        self._daemon.arena.unlink()
        self._daemon.start()
        self._daemon.wait(lambda status: status.tiers[DISK].state == "ready", TIER_TIMEOUT_SECONDS, "back on its disk")

    def _settle_on_disk(self) -> None:
        """Objects go to disk at their second use, behind everything else."""
        self._say("waiting until the prompts are on disk")
        objects = sum(run.objects for run in self._runs)
        self._daemon.wait(
            lambda status: status.tiers[DISK].objects >= objects and not status.tiers[DISK].queued_objects,
            TIER_TIMEOUT_SECONDS,
            f"done writing {objects} objects to disk",
        )

    def _start(self, name: str) -> None:
        self._say(
            f"starting engine {name} of {' and '.join(run.toy.name for run in self._runs)} (half a minute or more)"
        )
        starting = []
        for run in self._runs:
            engine = Engine(run.options, self._logs / f"engine-{run.toy.name}-{name}.log")
            self._engines[run.toy.name, name] = engine
            starting.append((engine, engine.launch()))
        for engine, ready in starting:
            engine.wait_ready(ready)
        self._daemon.wait_attached(len(self._engines))
        for engine, _ in starting:
            await_lookups(engine, self._daemon)

    def _stop(self, name: str) -> None:
        for run in self._runs:
            self._engines.pop((run.toy.name, name)).close()

    def _reset(self, name: str) -> None:
        for run in self._runs:
            self._engines[run.toy.name, name].reset_prefix_cache()

    def _settle(self) -> None:
        self._say("waiting until everything is committed and summed")
        self._daemon.settle(self._objects + sum(run.objects for run in self._runs), summed=True)

    def _measure(self, name: str, scenario: str, *, expect_hits: bool, is_reference: bool = False) -> None:
        for run in self._runs:
            self._say(f"{run.toy.name}: {scenario}")
            before = self._daemon.served()
            answers = [self._engines[run.toy.name, name].ask(ids, OUTPUT_TOKENS) for ids in run.prompts]
            served = self._daemon.served().since(before)
            tokens = [answer.tokens for answer in answers]
            if is_reference:
                self.reference[run.toy.name] = tokens
            expected = run.boundary_tokens * PROMPTS if expect_hits else 0
            self.rows.append(self._row(run, scenario, answers, served.tokens, expected))

    def _row(self, run: ToyRun, scenario: str, answers: list[Answer], served_tokens: int, expected_tokens: int) -> Row:
        return Row(
            model=run.toy.name,
            scenario=scenario,
            prompts=len(answers),
            prompt_tokens=sum(answer.prompt.prompt_tokens for answer in answers),
            local_tokens=sum(answer.local_tokens for answer in answers),
            kvdepot_tokens=sum(answer.external_tokens for answer in answers),
            served_tokens=served_tokens,
            expected_tokens=expected_tokens,
            first_token_seconds=statistics.median(answer.completion.first_token_seconds for answer in answers),
            tokens_equal=[answer.tokens for answer in answers] == self.reference[run.toy.name],
        )

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def await_lookups(
    engine: Engine, daemon: Daemon, timeout_seconds: float = 60.0,
    counters: tuple[str, ...] = ("locates", "granted_write_bytes"),
) -> None:  # fmt: skip
    """Warm an engine up with fresh prompts until it asks the daemon about one (it has hashed its weights by then).

    Of a prompt without a whole chunk it never asks, and one that loads nothing asks for room to store it. `counters`:
    the daemon's, of which one has to grow.
    """

    def asked() -> float:
        found = daemon.status().counters
        return sum(found.get(name, 0) for name in counters)

    tokens = engine.options.toy.chunk_tokens + 16
    before = asked()
    until = time.monotonic() + timeout_seconds
    while True:
        engine.ask(prompt(tokens, f"warm-up-{os.getpid()}-{next(_WARM_UPS)}"), 1)
        if asked() > before:
            return
        if time.monotonic() > until:
            raise EngineProcessError(
                f"the engine asks the daemon nothing after {timeout_seconds} s (log: {engine.log})"
            )
