"""Speed of the disk tier through the real client, as a share of fio with O_DIRECT on the same path.

Objects of 4 MiB, checksums on, keys always fresh, the tier full and evicting. Writes: all objects lie in
RAM before the first is committed, and commits keep the tier's queue filled, so that the tier always has work as
fio has; from the first commit until all is durable. Reads: from the first acquire to the last copy into KV
tensors, always of what was used longest ago, so that RAM has lost it (eviction is LRU for that); the
daemon's own counter says how many bytes came from the medium, and every byte is compared. fio reads and overwrites a
file as large as the working set, in requests of an object, with as many in flight as the tier's
workers have. Rounds alternate: fio, tier, fio.

`acquire_p99_ratio`: what another engine's acquires of objects in RAM take while the disk is busy,
against idle, in alternating windows. `acquire_p99_fio_ms`: the same beside fio, which reads and writes as fast as it
can and takes little CPU: what of it is the medium's and the machine's. `echo_p99_busy_ms`: what a process takes beside
the busy disk that only sends back what it receives: no daemon could answer sooner.

`hung_acquire_p99_ratio`: the same while the tier's directory is a mount that does not answer (FUSE, its server
stopped) and objects are committed as before it stopped; against a tier on the plain path, whose objects are
committed likewise, with fio doing as many bytes a second beside it. `--hung` measures only that.

`--open`: 100,000 small objects instead; seconds until a new daemon has its index back, and how many
bytes its workers read for it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.client.copy.base import CopyBatch
from kvdepot.client.extents import Extents
from kvdepot.core.report import DaemonStatus

from benchmarks.acquire_probe import Probe
from benchmarks.background import in_background
from benchmarks.depot import SHM, Daemon, Status, daemon, engine
from benchmarks.ram import OBJECT_BYTES, WORKING_SET_BYTES, Chain, Copies, Depot, spec
from benchmarks.report import Report, arguments, median
from benchmarks.small_objects import store_small
from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse

MIB = 1 << 20
TIER, WORKERS, DEPTH = "disk", 2, 4
BATCH = 8
SLICE_OBJECTS = 32  # put before the queue is looked at
QUEUED_BYTES_MAX = 128 * MIB  # well below what the tier's queue takes
KV_BYTES = 256 * MIB
WINDOW_SECONDS = 3.0
HUNG_SECONDS_MAX = 20.0  # until the breaker of a mount that hangs must have opened
HUNG_DEADLINE = "500ms"  # workers are given up, made anew and breakers opened within a window
HUNG_OBJECTS_PER_SECOND = 8
HUNG_RATE = f"{HUNG_OBJECTS_PER_SECOND * OBJECT_BYTES // MIB // 2}m"  # of fio, reads and writes each
SMALL_OBJECTS = 100_000
POLL_SECONDS = 0.01
PUT_POLL_SECONDS_MIN = 0.002  # so that the end of a round is seen in time
DISK_SPEED_MAX = 1e10  # bytes per second
CONFIG = """
[policy]
eviction = "lru"
[[tier]]
name = "{name}"
kind = "disk"
path = "{path}"
capacity = "{capacity}"
write = "commit"
io_workers = {workers}
deadline = "{deadline}"
[scrub]
rate = "0MiB/s"
quarantine_capacity = "64MiB"
"""


class Fio:
    """One file of the working set's size, beside the tier's directory."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "fio"
        self.run("write", WORKING_SET_BYTES)

    def run(self, verb: str, size_bytes: int) -> float:
        """Bytes per second of a `randread`, `randwrite` or `write` of so many bytes."""
        found = subprocess.run(self._command(verb, io_size=size_bytes), capture_output=True, text=True, check=True)
        (job,) = json.loads(found.stdout)["jobs"]
        speed: float = job["read" if verb == "randread" else "write"]["bw_bytes"]
        return speed

    @contextmanager
    def running(self, rate: str = "0") -> Iterator[None]:
        """Random reads and writes, half and half, as fast as it can or at `rate` (`--rate`)."""
        command = self._command("randrw", rate=rate, time_based=1, runtime=600)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def _command(self, verb: str, **more: object) -> list[str]:
        options = {
            "name": "job", "filename": self._file, "rw": verb, "bs": OBJECT_BYTES, "direct": 1, "ioengine": "libaio",
            "iodepth": DEPTH, "size": WORKING_SET_BYTES, "randrepeat": 0, "overwrite": 1, "output-format": "json",
        }  # fmt: skip
        return ["fio", *(f"--{key}={value}" for key, value in (options | more).items())]


class HeldDepot(Depot):
    """What is put lies in RAM, uncommitted, until `commit`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: deque[tuple[int, Chain]] = deque()

    def commit(self) -> None:
        """The oldest chain; waits for the answer."""
        lease, chain = self.held.popleft()
        self.outstanding += 1
        self.session.commit(lease, range(len(chain.keys)), self._committed)
        self._drive([], self._reserve, 1)

    def _store(self, lease: int, chain: Chain, extents: Extents, pieces: list[CopyBatch]) -> None:
        self._copy_in(extents, pieces)
        self.held.append((lease, chain))
        self.session.call_soon(self._loaded)


class DiskDepot:
    """A `Depot` over a daemon with a tier below RAM."""

    def __init__(self, depot: HeldDepot, status: Status, tier: str = TIER) -> None:
        self.depot = depot
        self._tier = tier
        self.status = status
        self._speeds: list[float] = []  # of puts

    def put(self, objects: int) -> float:
        """Bytes per second until all of them are durable, while the tier always has work."""
        self.depot.put(BATCH, objects)
        before = self._written(self.status())
        committed = written = 0.0
        began = time.perf_counter()
        while written < objects * OBJECT_BYTES:
            while self.depot.held and committed - written < QUEUED_BYTES_MAX:
                self.depot.commit()
                committed += BATCH * OBJECT_BYTES
            # Asked seldom: to answer takes the daemon as long as half an object does.
            left = committed - written - (QUEUED_BYTES_MAX // 2 if self.depot.held else 0)
            time.sleep(max(left / self._speed_max, PUT_POLL_SECONDS_MIN))
            written = self._written(status := self.status()) - before
            if time.perf_counter() - began > 120:
                raise SystemExit(f"{written} bytes were written: {status.tiers[1]} {status.counters}")
        self._speeds.append(objects * OBJECT_BYTES / (time.perf_counter() - began))
        return self._speeds[-1]

    @property
    def _speed_max(self) -> float:
        """Nothing is durable sooner than that."""
        return 1.25 * max(self._speeds) if self._speeds else DISK_SPEED_MAX

    def get(self, objects: int) -> float:
        """Bytes per second of what was used longest ago."""
        chains = [self.depot.chains.popleft() for _ in range(objects // BATCH)]
        self.depot.rng.shuffle(chains)
        self.depot.chains.extend(chains)
        before = self.status().counters.get("promoted_bytes", 0.0)
        seconds = self.depot.load(chains, BATCH)
        read = self.status().counters.get("promoted_bytes", 0.0) - before
        if read < 0.95 * objects * OBJECT_BYTES:
            raise SystemExit(f"only {read} of {objects * OBJECT_BYTES} bytes came from the tier")
        return objects * OBJECT_BYTES / seconds

    def _written(self, status: DaemonStatus) -> float:
        return status.counters.get(f"tier_written_bytes.{self._tier}/", 0.0)


Run = Callable[[int], float]
"""Moves so many objects, and returns bytes per second."""


def measure_speed(
    ways: Mapping[str, tuple[Run, Run]], baseline: str, rounds: int, objects: int, at_least: float, report: Report
) -> None:
    """Run each way between two runs of what it is compared with, which is the second of its pair."""
    names = [*ways, *(f"{baseline}_{name}" for name in ways)]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (run, plain) in ways.items():
            before = plain(objects)
            speed = run(objects)
            beside = (before + plain(objects)) / 2
            speeds[name].append(speed)
            speeds[f"{baseline}_{name}"].append(beside)
            ratios[name].append(speed / beside)
    for name, values in ratios.items():
        report.figure(f"{name}_ratio", median(values), "", at_least=at_least)
    for name, values in speeds.items():
        report.figure(f"{name}_gb_s", median(values) / 1e9, "GB/s")


def measure_acquires(depot: DiskDepot, fio: Fio, probe: Probe, echo: Probe, rounds: int, report: Report) -> None:
    idle, busy, beside, echoed, ratios = [], [], [], [], []
    for _ in range(rounds):
        idle.append(probe.p99_seconds(WINDOW_SECONDS))
        with fio.running():
            beside.append(probe.p99_seconds(WINDOW_SECONDS))
        with _kept_busy(depot):
            busy.append(probe.p99_seconds(WINDOW_SECONDS))
        with _kept_busy(depot):
            echoed.append(echo.p99_seconds(WINDOW_SECONDS))
        ratios.append(busy[-1] / idle[-1])
    report.figure("acquire_p99_ratio", median(ratios), "", at_most=2)
    report.figure("acquire_p99_idle_ms", 1e3 * median(idle), "ms")
    report.figure("acquire_p99_fio_ms", 1e3 * median(beside), "ms")
    report.figure("acquire_p99_busy_ms", 1e3 * median(busy), "ms")
    report.figure("echo_p99_busy_ms", 1e3 * median(echoed), "ms")


def _kept_busy(depot: DiskDepot) -> AbstractContextManager[None]:
    def work(over: threading.Event) -> None:
        while not over.is_set():
            depot.put(SLICE_OBJECTS)
            depot.get(SLICE_OBJECTS)

    return in_background(work)


@contextmanager
def disk_daemon(
    directory: Path, ram: str, capacity: str, path: Path | None = None, deadline: str = "10s", memory: Path = SHM
) -> Iterator[Daemon]:
    config = directory / "kvdepot.toml"
    text = CONFIG.format(
        name=TIER, path=path or directory / "tier", capacity=capacity, workers=WORKERS, deadline=deadline
    )
    config.write_text(text)
    with daemon(ram, config=config, memory=memory) as started:
        yield started


def wait_ready(status: Status) -> DaemonStatus:
    while (found := status()).tiers[1].state != "ready":
        time.sleep(POLL_SECONDS)
    return found


def throughput(directory: Path, options: argparse.Namespace, report: Report) -> None:
    fio = Fio(directory)
    with disk_daemon(directory, options.ram, options.capacity, memory=options.memory) as started:
        status = Status(started.endpoint)
        status.wait_populated(started)
        capacity_bytes = wait_ready(status).tiers[1].capacity_bytes
        with engine(started.endpoint, spec()) as (session, worker):
            assert worker.arena is not None
            rng = random.Random(options.seed)
            depot = DiskDepot(
                HeldDepot(session, worker.arena, Copies(), rng, KV_BYTES, options.round_mib * MIB), status
            )
            filled = 0
            while filled < capacity_bytes:  # from here on every write evicts, and no block is written first
                depot.put(64)
                filled += 64 * OBJECT_BYTES
            ways: dict[str, tuple[Run, Run]] = {
                "write": (depot.put, lambda objects: fio.run("randwrite", objects * OBJECT_BYTES)),
                "read": (depot.get, lambda objects: fio.run("randread", objects * OBJECT_BYTES)),
            }
            measure_speed(ways, "fio", options.rounds, options.round_mib * MIB // OBJECT_BYTES, 0.9, report)
            with Probe.of(started.endpoint) as probe, Probe("benchmarks.echo_probe") as echo:
                measure_acquires(depot, fio, probe, echo, options.rounds, report)
            final = status()
            report.note("tier", {"objects": final.tiers[1].objects, "ready_mib": final.tiers[1].ready_bytes // MIB})
            report.note("counters", {k: v for k, v in final.counters.items() if f".{TIER}/" in k})


def hung(directory: Path, options: argparse.Namespace, report: Report) -> None:
    """The p99 of acquires of RAM beside a hung mount, and beside fio."""
    reason = why_no_fuse()
    if reason:
        report.note("hung", f"skipped: {reason}")
        return
    fio = Fio(directory)
    rng = random.Random(options.seed)  # one for all rounds: what lies on the mount stays, and keys must be fresh
    beside, stopped = [], []
    with FuseDirectory() as fuse:
        for _ in range(options.rounds):
            plain = directory / "plain"
            plain.mkdir()
            with _storing(plain, plain, options, rng) as (probe, _), fio.running(HUNG_RATE):
                beside.append(probe.p99_seconds(WINDOW_SECONDS))
            shutil.rmtree(plain)
            with _storing(directory, fuse.path, options, rng) as (probe, status):
                fuse.hang()
                try:
                    stopped.append(probe.p99_seconds(WINDOW_SECONDS))
                    until = time.monotonic() + HUNG_SECONDS_MAX
                    while (tier := status().tiers[1]).breaker == "closed":
                        if time.monotonic() > until:
                            raise SystemExit(f"the mount did not hang: {tier}")
                        time.sleep(POLL_SECONDS)
                finally:
                    fuse.go_on()
    ratios = [one / other for one, other in zip(stopped, beside, strict=True)]
    report.figure("hung_acquire_p99_ratio", median(ratios), "", at_most=2)
    report.figure("hung_acquire_p99_ms", 1e3 * median(stopped), "ms")
    report.figure("hung_acquire_p99_fio_ms", 1e3 * median(beside), "ms")


@contextmanager
def _storing(
    directory: Path, path: Path, options: argparse.Namespace, rng: random.Random
) -> Iterator[tuple[Probe, Status]]:
    """A daemon with its tier at `path`, and an engine that commits objects at a steady rate."""
    with (
        disk_daemon(directory, options.ram, "1GiB", path / "tier", HUNG_DEADLINE) as started,
        engine(started.endpoint, spec()) as (session, worker),
    ):
        status = Status(started.endpoint)
        status.wait_populated(started)
        wait_ready(status)
        assert worker.arena is not None
        depot = Depot(session, worker.arena, Copies(), rng, KV_BYTES, KV_BYTES)
        stop = threading.Event()

        failed: list[str] = []

        def work() -> None:
            try:
                while not stop.wait(1 / HUNG_OBJECTS_PER_SECOND):
                    depot.put(1, 1)
            except SystemExit as error:  # of a thread nobody would hear it
                failed.append(f"{error}")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            with Probe.of(started.endpoint) as probe:
                probe.p99_seconds(WINDOW_SECONDS)  # objects are on the medium, files open
                yield probe, status
        finally:
            stop.set()
            thread.join()
            if failed:
                raise SystemExit(f"objects were not committed all the time: {failed[0]}")


def opening(directory: Path, report: Report) -> None:
    with disk_daemon(directory, "1536MiB", "8GiB") as started:
        status = Status(started.endpoint)
        status.wait_populated(started)
        wait_ready(status)
        store_small(started.endpoint, SMALL_OBJECTS, lambda: status().tiers[1])
    with disk_daemon(directory, "1536MiB", "8GiB") as started:
        status = Status(started.endpoint)
        status()
        began = time.monotonic()
        found = wait_ready(status)
        report.figure("open_seconds", time.monotonic() - began, "s", at_most=5)
        report.figure("open_since_start_seconds", time.monotonic() - started.started, "s")
        report.figure("open_payload_bytes", found.counters.get(f"io_bytes.{TIER}/read", 0.0), "bytes", at_most=0)
        report.figure("open_objects", found.tiers[1].objects, "", at_least=SMALL_OBJECTS)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="where (default %(default)s)")
    parser.add_argument("--ram", default="1536MiB", help="capacity of the daemon's RAM tier (default %(default)s)")
    parser.add_argument("--memory", type=Path, default=SHM, help="where its arena lies (default %(default)s)")
    parser.add_argument("--capacity", default="4GiB", help="of the tier (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-mib", type=int, default=512, help="moved a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--open", action="store_true", help="measure the opening of a tier with 100,000 objects")
    parser.add_argument("--hung", action="store_true", help="measure only acquires beside a mount that hangs")
    options: Any = parser.parse_args()
    report = Report("disk: " + ("index of 100,000 objects" if options.open else "4 MiB objects, fio beside it"))
    if not options.open and shutil.which("fio") is None:
        print("skipped: fio is missing (make system-deps)")
        return
    report.note("seed", options.seed)
    directory = Path(tempfile.mkdtemp(prefix="kvddisk", dir=options.path))
    try:
        if options.open:
            opening(directory, report)
        else:
            if not options.hung:
                throughput(directory, options, report)
            hung(directory, options, report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()
