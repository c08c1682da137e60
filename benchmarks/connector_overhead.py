"""What the connector costs on traffic that never hits (row D6): the same engine with and without it.

Two engines of a toy (dense, with sliding windows, or hybrid with MTP) run side by side, one of them works at a time. A
pair is four rounds, A B B A, in alternating roles, with fresh prompts that both get; each round ends with
the last token, and the next begins when the daemon has committed everything. The daemon's
arena is smaller than what is stored, so it evicts all the time.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from benchmarks.report import Report, arguments
from demo.daemon import Daemon
from demo.engine import ROOT, Engine, EngineOptions, depot_connector
from demo.scenarios import await_lookups
from demo.toys import DENSE, GEMMA3, HYBRID, Toy, make_toy, prompt
from tests.e2e.speculation import EXTENSION
from tests.rigs.speculative_toys import make_hybrid_mtp

TOYS = {toy.name: toy for toy in (DENSE, GEMMA3)}
MTP = "hybrid-mtp"
MTP_ALPHA = 0.3
"""About a quarter of the drafts are accepted."""
MTP_ARGUMENTS = {
    "worker_extension_cls": EXTENSION,  # kernels that vLLM's CPU backend lacks
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
}
PAIRS_MIN = 10
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 32
CONFIDENCE_Z = 1.6449  # one-sided 95 %
RATIO_MIN = 0.97
DAEMON = 'capacity = "384MiB"\n'
ARGUMENTS = {"max_num_seqs": 16, "max_num_batched_tokens": 4096}


def student_t(z: float, degrees: int) -> float:
    """The quantile of Student's t that belongs to a normal quantile (Cornish-Fisher; error below 0.3 % from 9 on)."""
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return z + first + second


def lower_bound(ratios: list[float]) -> tuple[float, float]:
    """Geometric mean of paired ratios and its one-sided 95 % lower bound."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - student_t(CONFIDENCE_Z, len(logs) - 1) * error)


class Contest:
    """Rounds of fresh prompts on two engines."""

    def __init__(self, daemon: Daemon, with_connector: Engine, without: Engine, requests: int) -> None:
        self._daemon = daemon
        self._engines = {"with": with_connector, "without": without}
        self._requests = requests
        self._pairs = 0
        self._drawn = 0

    def pair(self) -> dict[str, float]:
        """Tokens per second of each engine, from four rounds A B B A: what drifts, drifts for both."""
        first, second = ("with", "without") if self._pairs % 2 else ("without", "with")
        self._pairs += 1
        tokens, seconds = dict.fromkeys(self._engines, 0), dict.fromkeys(self._engines, 0.0)
        for half in (first, second), (second, first):
            prompts = self._prompts()
            for name in half:
                counted, elapsed = self._round(self._engines[name], prompts)
                tokens[name] += counted
                seconds[name] += elapsed
        return {name: tokens[name] / seconds[name] for name in self._engines}

    def _prompts(self) -> list[list[int]]:
        self._drawn += 1
        return [prompt(PROMPT_TOKENS, f"overhead-{self._drawn}-{number}") for number in range(self._requests)]

    def _round(self, engine: Engine, prompts: list[list[int]]) -> tuple[int, float]:
        """Tokens and seconds. The daemon is idle again when it returns."""
        before = engine.totals()
        started = time.perf_counter()
        done = engine.generate(prompts, OUTPUT_TOKENS)
        seconds = time.perf_counter() - started
        failed = [one.error for one in done if one.error]
        counted = engine.totals().since(before)
        if failed or counted.local_tokens or counted.external_tokens:
            raise SystemExit(f"not traffic that never hits: {failed[:1]} {counted}")
        self._daemon.settle()
        return counted.prompt_tokens + counted.generated_tokens, seconds


def made(name: str) -> tuple[Toy, Path, dict[str, Any]]:
    """Return a toy by its name, its folder, and its engine's arguments."""
    models = ROOT / "build" / "toys"
    if name == MTP:
        return HYBRID, make_hybrid_mtp(MTP_ALPHA, models), ARGUMENTS | MTP_ARGUMENTS
    return TOYS[name], make_toy(TOYS[name], models), ARGUMENTS


def measure(name: str, pairs: int, requests: int, report: Report) -> None:
    logs = Path(tempfile.mkdtemp(prefix="kvd-overhead-"))
    toy, model, engine_arguments = made(name)
    with Daemon(DAEMON) as daemon:
        connected = EngineOptions(toy, model, depot_connector(daemon.endpoint), engine_arguments)
        with (
            Engine(connected, logs / "with.log") as with_connector,
            Engine(EngineOptions(toy, model, None, engine_arguments), logs / "without.log") as without,
        ):
            daemon.wait_attached(1)
            await_lookups(with_connector, daemon)
            contest = Contest(daemon, with_connector, without, requests)
            while not daemon.status().counters.get("evicted_bytes"):
                contest.pair()
            before = daemon.status().counters
            found = []
            for number in range(pairs):
                found.append(contest.pair())
                print(f"pair {number + 1}: with {found[-1]['with']:.0f}, without {found[-1]['without']:.0f} tokens/s")
            after = daemon.status().counters
    mean, bound = lower_bound([one["with"] / one["without"] for one in found])
    report.figure("throughput_ratio", mean, "")
    report.figure("throughput_ratio_bound", bound, "", at_least=RATIO_MIN)
    for which in ("with", "without"):
        report.figure(f"{which}_tokens_s", statistics.median(one[which] for one in found), "tok/s")
    for counter in ("granted_write_bytes", "evicted_bytes", "locates"):
        report.note(counter, int(after[counter] - before[counter]))
    report.note("model", name)
    report.note("pairs", pairs)
    report.note("requests per round", f"{requests} of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(*TOYS, MTP), default=DENSE.name, help="(default %(default)s)")
    parser.add_argument("--pairs", type=int, default=12, help=f"at least {PAIRS_MIN} (default %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="of one round (default %(default)s)")
    options = parser.parse_args()
    if options.pairs < PAIRS_MIN:
        parser.error(f"--pairs {options.pairs}: below {PAIRS_MIN} the bound says nothing")
    report = Report("connector_overhead: traffic that never hits")
    measure(options.model, options.pairs, options.requests, report)
    report.finish(options.json)


if __name__ == "__main__":
    main()
