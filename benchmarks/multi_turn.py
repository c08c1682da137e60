"""Time to first token of conversations whose turns go to two engines in turns: sharing a daemon, and not (row B4).

As a router without affinity sends them: turn n to one engine, turn n+1 to the other, at once, with the
`kv_transfer_params` of the answer before. Two engines without kvdepot are asked the same, in turns with the others
(two conversations here, the same two there), each engine's model on a core of its own. Every answer must have the
same tokens with and without, but for ties. Once with the engines' own prefix caching, which makes a not sharing engine
compute what was said since its own last turn, and once without, where it computes all.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from benchmarks.report import Report, arguments
from demo.daemon import Daemon
from demo.engine import ROOT, Completion, Engine, EngineOptions, depot_connector
from demo.scenarios import await_lookups
from demo.toys import DENSE, make_toy, prompt

CONTEXT_TOKENS_MAX = 16384
MODEL = replace(
    DENSE,
    name="talker",
    config=DENSE.config
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
    },
    engine={"max_model_len": CONTEXT_TOKENS_MAX, "max_num_batched_tokens": CONTEXT_TOKENS_MAX},
)
"""28 million parameters: a core computes some 1,000 tokens of a prompt a second, as far from the time that a load takes
as the models are that are served. The other toys compute faster than their engines schedule."""
CLIENTS = 2
TURNS = (12, 18)  # from, to
FIRST_TOKENS = (512, 1024)  # of what is said first, a system prompt with it
SAID_TOKENS = (64, 256)  # of what is said later
DAEMON = 'capacity = "2GiB"\n'
CONNECTOR = {"lookup_timeout_seconds": 2.0, "lookup_min_seconds": 2.0}
"""On two cores the default would now and then turn a hit into a miss; what a lookup takes is in the figures."""
TIE = 1e-4
"""Two next tokens so close together are as good as each other to float32, which rounds otherwise in each batch: one in
some tens of thousands, with random weights. What is said after it differs, too."""
RATIO_MAX = {True: 1 - 0.286, False: 0.5}
"""Of sharing by not sharing, with the engines' own prefix caching and without."""
ASKED = {"do_remote_decode": True}

Said = tuple[tuple[int, ...], ...]
"""By turn, what the user says."""


@dataclass
class Conversation:
    """One client's, under way."""

    said: Said
    engines: Sequence[Engine]
    answer_tokens: int
    tokens: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None
    answers: list[Completion] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)  # by turn

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self.said)

    @property
    def _engine(self) -> Engine:
        return self.engines[len(self.answers) % len(self.engines)]

    def begin(self) -> Future[Any]:
        self.tokens += self.said[len(self.answers)]
        self.prompt_tokens.append(len(self.tokens))
        return self._engine.begin([self.tokens], self.answer_tokens, params=self.params)

    def take(self, begun: Future[Any]) -> None:
        (done,) = self._engine.finish(begun)
        if done.error:
            raise SystemExit(done.error)
        self.answers.append(done)
        self.tokens += done.tokens
        self.params = done.params


@dataclass
class Turns:
    """What the turns from the second one on took."""

    milliseconds: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, talk: Conversation) -> None:
        for answer, tokens in list(zip(talk.answers, talk.prompt_tokens, strict=True))[1:]:
            self.milliseconds.append(1000 * answer.first_token_seconds)
            self.cached_tokens += answer.cached_tokens
            self.prompt_tokens += tokens

    def percentile(self, percent: int) -> float:
        return float(np.percentile(self.milliseconds, percent))


def script(number: int) -> Said:
    """The user's part of a conversation, the same in every run."""
    numbers = random.Random(number)
    turns = numbers.randint(*TURNS)
    lengths = [numbers.randint(*FIRST_TOKENS), *(numbers.randint(*SAID_TOKENS) for _ in range(turns - 1))]
    return tuple(tuple(prompt(tokens, f"turn-{number}-{turn}")) for turn, tokens in enumerate(lengths))


def talk_through(
    scripts: Sequence[Said], engines: Sequence[Engine], answer_tokens: int, params: Any
) -> list[Conversation]:
    """One client each, all at once; each waits for its answer and goes on."""
    talks = [Conversation(said, engines, answer_tokens, params=params) for said in scripts]
    waiting = {talk.begin(): talk for talk in talks}
    while waiting:
        for begun in wait(waiting, return_when=FIRST_COMPLETED).done:
            talk = waiting.pop(begun)
            talk.take(begun)
            if not talk.over:
                waiting[talk.begin()] = talk
    return talks


def measure(
    conversations: int, answer_tokens: int, chunk_tokens: int, directory: Path, *, local: bool
) -> dict[str, Turns]:
    """With the engines' own prefix caching, or without."""
    model = make_toy(MODEL, ROOT / "build" / "toys")
    turns, ties = {"apart": Turns(), "shared": Turns()}, 0
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(DAEMON))
        engines: dict[str, list[Engine]] = {}
        starting = []
        sharing = depot_connector(daemon.endpoint, **CONNECTOR, chunk_tokens=chunk_tokens)
        for name, connector in {"apart": None, "shared": sharing}.items():
            for number in range(2):
                environment = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
                options = EngineOptions(MODEL, model, connector, {"enable_prefix_caching": local}, environment)
                engine = Engine(options, directory / f"{name}-{number}.log")
                engines.setdefault(name, []).append(engine)
                stack.callback(engine.close)
                starting.append((engine, engine.launch()))
        for engine, ready in starting:
            engine.wait_ready(ready)
        daemon.wait_attached(2)
        for engine in engines["shared"]:
            await_lookups(engine, daemon)
        for engine in engines["apart"]:
            engine.ask(prompt(FIRST_TOKENS[0], "warm-up"), 1)
        for first in range(0, conversations, CLIENTS):
            scripts = [script(number) for number in range(first, min(first + CLIENTS, conversations))]
            talks = {
                name: talk_through(scripts, engines[name], answer_tokens, ASKED if name == "shared" else None)
                for name in (turns if first // CLIENTS % 2 else reversed(turns))
            }
            ties += check(model, talks["apart"], talks["shared"])
            for name, some in talks.items():
                for talk in some:
                    turns[name].add(talk)
            daemon.settle()
    if ties:
        print(f"{ties} conversations went apart at a token that another one equals to what float32 rounds")
    return turns


def check(model: Path, apart: Sequence[Conversation], shared: Sequence[Conversation]) -> int:
    """Raises SystemExit where what was loaded has changed a token; how many conversations went apart at a tie."""
    ties = 0
    for one, other in zip(apart, shared, strict=True):
        if one.tokens == other.tokens:
            continue
        at = next(at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b)
        gap = gap_of(model, one.tokens[:at], one.tokens[at], other.tokens[at])
        if gap > TIE:
            raise SystemExit(f"{other.tokens[at]} with sharing, {one.tokens[at]} without: {gap:.1e} behind {at} tokens")
        ties += 1
    return ties


def gap_of(model: Path, tokens: Sequence[int], one: int, other: int) -> float:
    """How far the logits of two next tokens lie apart in float64, in standard deviations of all."""
    import torch
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = exact(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]
    return float((logits[one] - logits[other]).abs() / logits.std())


def tabulate(turns: dict[str, Turns], report: Report, *, local: bool) -> None:
    caching = "local" if local else "no_local"
    print(f"\nown prefix caching {'on' if local else 'off'}: milliseconds to the first token, from turn 2 on")
    print(f"{'':>10}{'turns':>8}{'p50':>10}{'p75':>10}{'p99':>10}{'not computed':>14}")
    for name, some in turns.items():
        figures = [some.percentile(percent) for percent in (50, 75, 99)]
        share = some.cached_tokens / some.prompt_tokens
        print(f"{name:>10}{len(some.milliseconds):>8}" + "".join(f"{ms:>10.1f}" for ms in figures) + f"{share:>14.1%}")
        for percent, ms in zip((50, 75), figures, strict=False):
            report.figure(f"{caching}_{name}_p{percent}_ms", ms, "ms")
    for percent in (50, 75):
        ratio = turns["shared"].percentile(percent) / turns["apart"].percentile(percent)
        report.figure(f"{caching}_p{percent}_ratio", ratio, "", at_most=RATIO_MAX[local])


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=24, help="(default %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=192, help="of every answer (default %(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="the connector's (default %(default)s)")
    parser.add_argument("--local", nargs="+", choices=("on", "off"), default=["on", "off"], help="own prefix caching")
    options = parser.parse_args()
    longest = FIRST_TOKENS[1] + TURNS[1] * (SAID_TOKENS[1] + options.answer_tokens)
    if longest > CONTEXT_TOKENS_MAX:
        parser.error(f"a conversation may have {longest} tokens, the model takes {CONTEXT_TOKENS_MAX}")
    directory = Path(tempfile.mkdtemp(prefix="kvd-multi-turn-"))
    report = Report("multi_turn: two engines, sharing a daemon and apart")
    for local in (caching == "on" for caching in options.local):
        turns = measure(options.conversations, options.answer_tokens, options.chunk_tokens, directory, local=local)
        tabulate(turns, report, local=local)
    report.note("model", f"Qwen3, 28 million parameters of random weights, {MODEL.dtype}, an engine on each core")
    report.note("conversations", f"{options.conversations} of {TURNS[0]} to {TURNS[1]} turns, {CLIENTS} at a time")
    report.note("tokens", f"said {FIRST_TOKENS}, then {SAID_TOKENS}; answered {options.answer_tokens}")
    report.note("chunks", f"{options.chunk_tokens} tokens")
    report.note("load", f"{os.getloadavg()[2]:.1f} in the last 15 minutes")
    report.finish(options.json)


if __name__ == "__main__":
    main()
