"""Time to first token by where a prompt's prefix is: computed, in the engine's cache, in kvdepot's RAM, on its disk.

One engine and one daemon; every prompt ends ten tokens behind a chunk's boundary, so that the
same ten tokens are left to compute wherever the rest comes from. Local and RAM are asked in
turns, and what they are compared by is the median of each prompt's own ratios; so they are once
more in a row, each request right behind the one before, where no process has gone to sleep. For the disk the
daemon starts again without its arena; each prompt is read once. With `--busy N` also beside N
requests that decode, where each step that a load needs is one of theirs.

With `--peer LANE` also from the RAM of another node, as root (`benchmarks.peer_nodes`). A prompt that the node does not
have is loaded from its peer, then from RAM. The limit is 1.5 of RAM and what a bare socket takes over the same wire for
as many bytes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.server.io.peer_wire import Lane

from benchmarks.peer_nodes import PeerNodes, peer_nodes
from benchmarks.report import Report, arguments
from demo.daemon import Daemon
from demo.engine import LOAD_ALWAYS, ROOT, Engine, EngineOptions, depot_connector
from demo.scenarios import await_lookups
from demo.toys import DENSE, HYBRID, Toy, make_toy, prompt
from tests.rigs.network import NetworkError

CHUNKS = (1, 2, 4, 8, 12, 18)
TAIL_TOKENS = 10
TOYS = {toy.name: toy for toy in (HYBRID, DENSE)}
RATIO_MAX = 1.3
PEER_BY_RAM_MAX = 1.5
WIRE_TRIES = 3
LONG_TOKENS = 3000
"""From here on a prompt counts as long: below it, a hit saves little of a few milliseconds."""
DISK = 1  # of the daemon's tiers; 0 is RAM
DAEMON = """capacity = "1GiB"
[[tier]]
name = "disk"
kind = "disk"
path = "{path}"
capacity = "4GiB"
write = "commit"
"""
POOL_BYTES = 1 << 29
CONNECTOR = {"lookup_timeout_seconds": 2.0, "lookup_min_seconds": 2.0, "load_weight": LOAD_ALWAYS}
"""On two cores the default would now and then turn a hit into a miss; what a lookup takes is in the figures.
What a disk has is loaded, also where the toy would compute it sooner: that is what is to be seen."""
SOURCES = ("cold", "local", "ram", "disk")
BUSY_PROMPTS = 30
BUSY_CHUNKS = 4
BUSY_TOKENS = 1500
"""Of each of the others: more than there are steps in the meantime."""

Seconds = dict[tuple[str, int], list[float]]
"""To the first token, by source and prompt tokens."""
Ratios = dict[int, list[float]]
"""RAM by local, by prompt tokens."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One prompt. `wire_seconds`: of a bare socket, for as many bytes as the load."""

    peer_seconds: float
    ram_seconds: float
    wire_seconds: float
    loaded_bytes: int

    @property
    def by_limit(self) -> float:
        return self.peer_seconds / (PEER_BY_RAM_MAX * self.ram_seconds + self.wire_seconds)


PeerLoads = dict[int, list[PeerLoad]]
"""By prompt tokens."""


class Run:
    """One engine's prompts: `rounds` of each length."""

    def __init__(self, toy: Toy, engine: Engine, daemon: Daemon, rounds: int) -> None:
        self.seconds: Seconds = defaultdict(list)
        self.ratios: Ratios = defaultdict(list)
        self.ratios_in_a_row: Ratios = defaultdict(list)
        self._toy = toy
        self._engine = engine
        self._daemon = daemon
        self._prompts = [
            prompt(chunks * toy.chunk_tokens + TAIL_TOKENS, f"first-token-{toy.name}-{chunks}-{number}")
            for number in range(rounds)
            for chunks in CHUNKS
        ]

    def cold_local_and_ram(self, repeats: int) -> None:
        for ids in self._prompts:
            self._ask("cold", ids)
            for _ in range(repeats):
                self._forget()
                ram = self._ask("ram", ids)
                self._daemon.settle()
                self.ratios[len(ids)].append(ram / self._ask("local", ids))

    def in_a_row(self, repeats: int) -> None:
        for _ in range(repeats):
            self._forget()
            ram, local = ([self._asked(source, ids) for ids in self._prompts] for source in ("ram", "local"))
            for ids, slower, faster in zip(self._prompts, ram, local, strict=True):
                self.ratios_in_a_row[len(ids)].append(slower / faster)

    def from_disk(self) -> None:
        self._engine.reset_prefix_cache()
        for ids in self._prompts:
            self._ask("disk", ids)

    def store(self) -> None:
        """Compute all prompts, until another node can load them."""
        for ids in self._prompts:
            self._ask("cold", ids)
        self._daemon.settle(summed=True)

    def from_peer(self, nodes: PeerNodes, repeats: int) -> PeerLoads:
        """Load each prompt once from the peer, and `repeats` times from RAM."""
        loads: PeerLoads = defaultdict(list)
        for ids in self._prompts:
            self._forget()
            before = nodes.loaded_bytes()
            peer = self._asked("peer", ids)
            loaded = nodes.loaded_bytes() - before
            if not loaded:
                raise SystemExit(f"nothing came over {nodes.lane}:\n{self._daemon.log_tail()}")
            wire = statistics.median(nodes.wire.seconds(loaded) for _ in range(WIRE_TRIES))
            ram = []
            for _ in range(repeats):
                self._forget()
                ram.append(self._asked("ram", ids))
            loads[len(ids)].append(PeerLoad(peer, statistics.median(ram), wire, loaded))
        return loads

    def _forget(self) -> None:
        self._daemon.settle()
        self._engine.reset_prefix_cache()

    def _ask(self, source: str, ids: Sequence[int]) -> float:
        seconds = self._asked(source, ids)
        self.seconds[source, len(ids)].append(seconds)
        return seconds

    def _asked(self, source: str, ids: Sequence[int]) -> float:
        answer = self._engine.ask(ids, 1)
        boundary = len(ids) - TAIL_TOKENS
        expected = {"cold": (0, 0), "local": (boundary, 0)}.get(source, (0, boundary))
        if (answer.local_tokens, answer.external_tokens) != expected:
            raise SystemExit(f"{source}: {len(ids)} tokens, {expected} local and external expected: {answer}")
        return answer.completion.first_token_seconds


def beside(engine: Engine, daemon: Daemon, toy: Toy, requests: int, report: Report) -> None:
    """RAM, then local, while others decode: a prefix cache is not emptied then, so each prompt is loaded once."""
    prompts = [
        prompt(BUSY_CHUNKS * toy.chunk_tokens + TAIL_TOKENS, f"busy-{toy.name}-{n}") for n in range(BUSY_PROMPTS)
    ]
    engine.generate(prompts, 1, serial=True)
    daemon.settle()
    engine.reset_prefix_cache()
    decoding = engine.begin([prompt(toy.chunk_tokens, f"decoding-{n}") for n in range(requests)], BUSY_TOKENS)
    for source in ("ram", "local"):
        seconds = []
        for ids in prompts:
            (done,) = engine.generate([ids], 1)
            if done.cached_tokens != len(ids) - TAIL_TOKENS:
                raise SystemExit(f"{source}: {done}")
            seconds.append(done.first_token_seconds)
        if decoding.done():
            raise SystemExit("the others were done too early")
        report.figure(f"{toy.name}_{source}_beside_{requests}_ms", 1000 * statistics.median(seconds), "ms")
    engine.finish(decoding)


@contextmanager
def engine_of(toy: Toy, daemon: Daemon, log: Path) -> Iterator[Engine]:
    """Start an engine that asks this daemon."""
    model = make_toy(toy, ROOT / "build" / "toys")
    connector = depot_connector(daemon.endpoint, **CONNECTOR)
    with Engine(EngineOptions(toy, model, connector, {"kv_cache_memory_bytes": POOL_BYTES}), log) as engine:
        daemon.wait_attached(1)
        await_lookups(engine, daemon)
        yield engine


def measure(toy: Toy, rounds: int, repeats: int, busy: int, report: Report, directory: Path) -> Run:
    with (
        Daemon(DAEMON.format(path=directory / f"disk-{toy.name}")) as daemon,
        engine_of(toy, daemon, directory / f"{toy.name}.log") as engine,
    ):
        run = Run(toy, engine, daemon, rounds)
        run.cold_local_and_ram(repeats)
        run.in_a_row(repeats)
        daemon.wait(lambda status: not status.tiers[DISK].queued_objects, 120, "done writing to disk")
        daemon.settle()
        if busy:
            beside(engine, daemon, toy, busy, report)
        daemon.stop()
        daemon.arena.unlink()
        daemon.start()
        daemon.wait(lambda status: status.tiers[DISK].state == "ready", 60, "back on its disk")
        daemon.wait_attached(1)
        await_lookups(engine, daemon)
        run.from_disk()
    return run


def measure_peer(toy: Toy, lane: Lane, rounds: int, repeats: int, directory: Path) -> PeerLoads:
    """One engine after the other: that of the source has ended when that of the reader starts."""
    with peer_nodes(directory, lane) as nodes:
        with engine_of(toy, nodes.source, directory / f"{toy.name}-{lane}-source.log") as engine:
            Run(toy, engine, nodes.source, rounds).store()
        with engine_of(toy, nodes.reader, directory / f"{toy.name}-{lane}-reader.log") as engine:
            return Run(toy, engine, nodes.reader, rounds).from_peer(nodes, repeats)


def tabulate_peer(toy: Toy, lane: Lane, loads: PeerLoads, report: Report) -> None:
    print(f"\n{toy.name}, from a peer over {lane}: median milliseconds to the first token, and by the limit")
    print("".join(f"{title:>10}" for title in ("tokens", "MiB", "ram", "wire", "peer", "by limit")))
    shares = []
    for tokens, found in sorted(loads.items()):
        ram = 1000 * statistics.median(one.ram_seconds for one in found)
        wire = 1000 * statistics.median(one.wire_seconds for one in found)
        peer = 1000 * statistics.median(one.peer_seconds for one in found)
        shares.append(statistics.median(one.by_limit for one in found))
        mib = found[0].loaded_bytes / (1 << 20)
        print(f"{tokens:>10}{mib:>10.1f}{ram:>10.1f}{wire:>10.1f}{peer:>10.1f}{shares[-1]:>10.2f}")
        report.figure(f"{toy.name}_{lane}_{tokens}_ms", peer, "ms")
    report.figure(f"{toy.name}_{lane}_by_limit", max(shares), "", at_most=1.0)


def tabulate(toy: Toy, run: Run, report: Report) -> None:
    print(f"\n{toy.name}: median milliseconds to the first token\n{'tokens':>8}" + "".join(f"{s:>10}" for s in SOURCES))
    for tokens in sorted(run.ratios):
        medians = [statistics.median(run.seconds[source, tokens]) for source in SOURCES]
        print(f"{tokens:>8}" + "".join(f"{1000 * seconds:>10.1f}" for seconds in medians))
        for source, seconds in zip(SOURCES, medians, strict=True):
            report.figure(f"{toy.name}_{source}_{tokens}_ms", 1000 * seconds, "ms")
    for name, by_length in (("ram_by_local", run.ratios), ("ram_by_local_in_a_row", run.ratios_in_a_row)):
        long = [ratio for tokens, ratios in by_length.items() if tokens >= LONG_TOKENS for ratio in ratios]
        report.figure(f"{toy.name}_{name}", statistics.median(long), "", at_most=RATIO_MAX)


def plot(runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvdepot"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 4), squeeze=False)
    for axis, (name, run) in zip(axes[0], runs.items(), strict=True):
        lengths = sorted(run.ratios)
        for source in SOURCES:
            medians = [1000 * statistics.median(run.seconds[source, tokens]) for tokens in lengths]
            axis.plot(lengths, medians, marker="o", label=source)
        axis.set(title=name, xlabel="prompt tokens", ylabel="ms to first token (median)", yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=TOYS, default=list(TOYS))
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of RAM and local a prompt (default %(default)s)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="also beside N requests that decode")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw the curves there")
    parser.add_argument(
        "--peer", nargs="+", type=Lane, choices=[*Lane], default=[], help="also from a peer, over these lanes"
    )
    parser.add_argument("--only-peer", action="store_true", help="nothing but `--peer`")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-first-token-"))
    report = Report("first_token: by where the prefix is")
    runs = {
        name: measure(TOYS[name], options.rounds, options.repeats, options.busy, report, directory)
        for name in ([] if options.only_peer else options.models)
    }
    for name, run in runs.items():
        tabulate(TOYS[name], run, report)
    try:
        for name, lane in itertools.product(options.models, options.peer):
            loads = measure_peer(TOYS[name], lane, options.rounds, options.repeats, directory)
            tabulate_peer(TOYS[name], lane, loads, report)
    except NetworkError as error:
        raise SystemExit(f"no network namespaces: {error}") from error
    report.note("prompts", f"{options.rounds} of each length, RAM and local {options.repeats} times each")
    report.note("load", round(os.getloadavg()[0], 1))
    report.finish(options.json)
    if options.plot and runs:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
