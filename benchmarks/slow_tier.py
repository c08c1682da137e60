"""Prompts whose prefix is on a tier of 20 MB/s alone: time to first token against computing them (llm-d-router#2833).

Two engines of one model on the same core: one without a connector, which computes, and one whose
daemon has every prompt on a disk tier behind a FUSE mount of that speed, and nothing in RAM. What loads are
worth is left to the defaults (`load_weight` 1). No request may take more than a tenth longer than computing; each is
compared with the same prompt's computation, and all tokens must be equal. They come in rounds of all lengths, one right
behind the other, so that what is read for one of them is read beside the next; each round begins with another length.
When nothing is read any more the first engine computes as many others: the control, by which it differs from itself.
The mount's server, which stands for the device, runs on the other cores: a device takes none of the engines'.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.core.report import DaemonStatus

from benchmarks.multi_turn import MODEL
from benchmarks.report import Report, arguments
from demo.daemon import Daemon
from demo.engine import ROOT, Answer, Engine, EngineOptions, depot_connector
from demo.scenarios import await_lookups
from demo.toys import DENSE, Toy, make_toy, prompt
from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse

TOYS = {toy.name: toy for toy in (DENSE, MODEL)}
"""One computes faster than such a tier reads, one slower."""
CHUNKS = (2, 4, 8, 12)
TAIL_TOKENS = 10
BYTES_PER_SECOND = 20e6
RATIO_MAX = 1.1
RAM, DISK = 0, 1  # of the daemon's tiers
DAEMON = """capacity = "1GiB"
[[tier]]
name = "slow"
kind = "disk"
path = "{path}"
capacity = "2GiB"
write = "commit"
io_workers = 1
deadline = "60s"
[scrub]
rate = "0"
"""
LOOKUP_SECONDS = 2.0
"""On two cores the default of 0.05 would now and then turn a hit into a miss; what a lookup takes is in the figures."""


@dataclass
class Asked:
    """One model's requests, by prompt tokens."""

    ratios: dict[int, list[float]] = field(default_factory=dict)  # of time to first token, slow tier by computing
    control: dict[int, list[float]] = field(default_factory=dict)  # likewise, computing by computing
    computed_seconds: dict[int, list[float]] = field(default_factory=dict)
    loaded_tokens: dict[int, list[int]] = field(default_factory=dict)

    def add(self, computed: Answer, other: Answer, control: Answer, tokens: int) -> None:
        if computed.tokens != other.tokens:
            raise SystemExit(f"other tokens than computed: {other} and {computed}")
        seconds = computed.completion.first_token_seconds
        self.ratios.setdefault(tokens, []).append(other.completion.first_token_seconds / seconds)
        self.control.setdefault(tokens, []).append(control.completion.first_token_seconds / seconds)
        self.computed_seconds.setdefault(tokens, []).append(seconds)
        self.loaded_tokens.setdefault(tokens, []).append(other.external_tokens)


def read_rate(file: Path) -> float:
    """Bytes a second of a file's first 16 MiB, past the page cache."""
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 16 << 20) as aligned:
            began = time.perf_counter()
            return os.preadv(fd, [aligned], 0) / (time.perf_counter() - began)
    finally:
        os.close(fd)


def measure(toy: Toy, rounds: int, directory: Path, report: Report) -> Asked:
    model = make_toy(toy, ROOT / "build" / "toys")
    prompts = [
        prompt(chunks * toy.chunk_tokens + TAIL_TOKENS, f"slow-{toy.name}-{chunks}-{number}")
        for number in range(rounds)
        for chunks in CHUNKS
    ]
    core, *others = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    with ExitStack() as stack:
        mount = stack.enter_context(FuseDirectory())
        keep_to(mount.process.pid, others or [core])
        daemon = stack.enter_context(Daemon(DAEMON.format(path=mount.path / "store")))
        connector = depot_connector(
            daemon.endpoint, lookup_timeout_seconds=LOOKUP_SECONDS, lookup_min_seconds=LOOKUP_SECONDS
        )
        plain, depot = (
            stack.enter_context(Engine(EngineOptions(toy, model, one, {}, bound), directory / f"{toy.name}-{name}.log"))
            for name, one in (("plain", None), ("depot", connector))
        )
        daemon.wait_attached(1)
        await_lookups(depot, daemon)
        store(depot, daemon, prompts)
        mount.fault(bytes_per_second=BYTES_PER_SECOND)
        report.figure(f"{toy.name}_tier_mb_s", read_rate(largest(mount.backing, mount.path)) / 1e6, "MB/s")
        return ask(plain, depot, daemon, prompts)


def keep_to(pid: int, cores: Sequence[int]) -> None:
    """All threads that the process has, and will have."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def store(engine: Engine, daemon: Daemon, prompts: Sequence[Sequence[int]]) -> None:
    """Every prompt on the tier, none in RAM, and an engine that knows how fast it computes."""
    for ids in prompts:
        engine.ask(ids, 1)
    daemon.wait(lambda status: not status.tiers[DISK].queued_objects, 120, "done writing")
    daemon.settle()
    daemon.stop()
    daemon.arena.unlink()
    daemon.start()
    daemon.wait(lambda status: status.tiers[DISK].state == "ready", 60, "back on its disk")
    daemon.wait_attached(1)
    engine.reset_prefix_cache()


def largest(backing: Path, mount: Path) -> Path:
    """Of the tier's files, seen through the mount."""
    file = max((path for path in backing.rglob("*") if path.is_file()), key=lambda path: path.stat().st_blocks)
    return mount / file.relative_to(backing)


def ask(plain: Engine, depot: Engine, daemon: Daemon, prompts: Sequence[Sequence[int]]) -> Asked:
    asked = Asked()
    each = len(CHUNKS)
    for number, first in enumerate(range(0, len(prompts), each)):
        at = number % each
        ids = [*prompts[first + at : first + each], *prompts[first : first + at]]
        control = [prompt(len(one), f"slow-control-{first + index}") for index, one in enumerate(ids)]
        computed, others = [plain.ask(one, 1) for one in ids], [depot.ask(one, 1) for one in ids]
        daemon.wait(nothing_read_ahead, 60, "done reading")
        again = [plain.ask(one, 1) for one in control]
        for one, alone, other, repeated in zip(ids, computed, others, again, strict=True):
            asked.add(alone, other, repeated, len(one))
    return asked


def nothing_read_ahead(status: DaemonStatus) -> bool:
    return not status.tiers[RAM].prefetching_requests and not status.tiers[RAM].prefetched_objects


def tabulate(toy: Toy, asked: Asked, report: Report) -> None:
    heads = f"{'tokens':>8}{'computed ms':>14}{'ratio':>8}{'worst':>8}{'loaded':>8}{'control':>10}{'worst':>8}"
    print(f"\n{toy.name}: {heads}")
    for tokens, ratios in asked.ratios.items():
        share = statistics.mean(asked.loaded_tokens[tokens]) / tokens
        computed = 1000 * statistics.median(asked.computed_seconds[tokens])
        print(
            f"{'':>{len(toy.name) + 2}}{tokens:>8}{computed:>14.1f}{statistics.median(ratios):>8.2f}"
            f"{max(ratios):>8.2f}{share:>8.0%}"
            f"{statistics.median(asked.control[tokens]):>10.2f}{max(asked.control[tokens]):>8.2f}"
        )
    worst = max(statistics.median(ratios) for ratios in asked.ratios.values())
    report.figure(f"{toy.name}_ratio", worst, "", at_most=RATIO_MAX)
    report.figure(f"{toy.name}_worst_request_ratio", max(max(r) for r in asked.ratios.values()), "", at_most=RATIO_MAX)
    report.figure(f"{toy.name}_worst_control_ratio", max(max(r) for r in asked.control.values()), "")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=TOYS, default=list(TOYS))
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length (default %(default)s)")
    options = parser.parse_args()
    if reason := why_no_fuse():
        parser.error(reason)
    directory = Path(tempfile.mkdtemp(prefix="kvd-slow-tier-"))
    report = Report("slow_tier: prompts that only a slow tier has, against computing them")
    for name in options.models:
        tabulate(TOYS[name], measure(TOYS[name], options.rounds, directory, report), report)
    report.note("prompts", f"{options.rounds} of each length; a ratio is the median of a length, the worst of them")
    report.finish(options.json)


if __name__ == "__main__":
    main()
