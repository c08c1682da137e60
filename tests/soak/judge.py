"""What a soak is judged by: tokens of a cold run, digests of what was loaded, memory that stays flat."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from demo.engine import Completion
from demo.toys import prompt
from tests.e2e.hybrid import Digests, digests_by_place, wrong

OUTPUT_TOKENS = 40
LEAD_MIN = 1e-3
"""Of a token's log probability over the next likely one's, so that rounding cannot choose the other: docs/soak.md."""
MIB = 1 << 20


@dataclass
class Prompts:
    """Documents that many prompts begin with, and what is asked about each.

    `cold`: of each prompt the tokens of a cold run that must come again.
    """

    prompts: list[list[int]]
    cold: list[tuple[int, ...]] = field(default_factory=list)

    @staticmethod
    def make(seed: int, name: str, documents: int, questions: int) -> Prompts:
        draw = Random(f"{seed}-{name}")
        lengths = [draw.randrange(300, 2200) for _ in range(documents)]
        return Prompts(
            [
                prompt(length, f"soak-{seed}-{name}-{document}")
                + prompt(draw.randrange(20, 600), f"soak-{seed}-{name}-{document}-{question}")
                for document, length in enumerate(lengths)
                for question in range(questions)
            ]
        )

    def pick(self, draw: Random) -> int:
        """Low numbers far more often."""
        return min(int(draw.expovariate(3.0) * len(self.prompts)), len(self.prompts) - 1)


def sure_tokens(cold: Completion) -> tuple[int, ...]:
    """Those before the first that rounding may have chosen: from there on, another cut of a batch has others."""
    close = (place for place, lead in enumerate(cold.leads) if lead < LEAD_MIN)
    return cold.tokens[: next(close, len(cold.leads))]


def token_trouble(done: Completion, cold: tuple[int, ...]) -> str:
    """Why these do not begin with `cold`, or with as much of it as an aborted request got; empty if they do."""
    if done.error:
        return f"{done.name} failed: {done.error}"
    if done.finish_reason != "abort" and len(done.tokens) != OUTPUT_TOKENS:
        return f"{done.name} has {len(done.tokens)} tokens, not {OUTPUT_TOKENS}"
    expected = cold[: len(done.tokens)]
    return "" if done.tokens[: len(cold)] == expected else f"{done.name} has the tokens {done.tokens}, cold {expected}"


@dataclass(frozen=True, slots=True)
class Audited:
    """What the ranks of some engines say of their own blocks."""

    loaded_blocks: int
    loaded_by_kind: dict[str, int]
    wrong: Digests


def audited(directory: Path, names: Iterable[str]) -> Audited:
    """Engines of one namespace: a block is right if some rank stored it so."""
    lines: list[dict[str, Any]] = []
    for name in names:
        for file in sorted(directory.glob(f"audit-{name}.*.jsonl")):
            whole, _, _ = file.read_text().rpartition("\n")  # an engine was killed while it wrote the last line
            lines += [json.loads(line) for line in whole.splitlines()]
    digests = digests_by_place(lines)
    kinds: dict[str, int] = defaultdict(int)
    for line in lines:
        kinds[line["kind"]] += len(line["blocks"]) * (line["event"] == "loaded")
    return Audited(sum(kinds.values()), dict(kinds), wrong(digests))


class Memory:
    """Private memory of processes over their lives."""

    RISE_MIB_MAX = 160.0
    """The largest pool and batch: their pages are first touched late in a life where others were busy (131, seen)."""
    LIFE_SECONDS_MIN = 180.0
    """An engine touches its pool's pages, and its largest batches, for the first time: 130 MiB in two minutes, seen."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, what: str, pids: Sequence[int], now: float) -> None:
        """Of each process by itself: an engine makes further ones when it compiles something."""
        for pid in pids:
            if mib := _private_mib(pid):
                self._samples[what, pid].append((now, mib))

    def rises(self) -> dict[str, float]:
        """MiB by life, from its third quarter to its last, in medians; lives that were long enough."""
        found = {}
        for (what, pid), samples in self._samples.items():
            if samples[-1][0] - samples[0][0] < self.LIFE_SECONDS_MIN:
                continue
            quarter = len(samples) // 4
            early = statistics.median(mib for _, mib in samples[2 * quarter : 3 * quarter])
            late = statistics.median(mib for _, mib in samples[3 * quarter :])
            found[f"{what}/{pid}"] = round(late - early, 1)
        return found


def _private_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    lines = [line for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) / 1024 if lines else 0.0
