"""One fault after the other, at random points of a transfer, and a look at everything that was promised."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from tests.peer_faults.acquires import TIMED
from tests.peer_faults.faults import FAULTS, GROUPS, NOT_OVER_NIXL, OF_DISK, OF_READER, Ending
from tests.peer_faults.world import (
    CHUNKS,
    DEADLINE_SECONDS,
    MORE_SECONDS,
    PIECE_BYTES,
    SOURCES,
    Asked,
    Source,
    ViolationError,
    World,
)
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import OBJECT_BYTES

_LIMIT_SECONDS: Final = DEADLINE_SECONDS + MORE_SECONDS
_RATES: Final = (10e6, 40e6, 1.25e9)
"""Bytes a second of the wire: the middle of a transfer is hit more often if it is slow."""
_AT_ONCE_MAX: Final = 3
"""Faults."""
_QUIET_REQUESTS: Final = 2
_REQUESTS: Final = 2
"""While a fault lasts, after the one that was on its way."""
_LATE_SECONDS: Final = 0.1
"""After the end of a fault, for bytes that would be late."""
_FOUND_SECONDS: Final = 1.0


@dataclass(slots=True)
class Outcome:
    """What a run has come to."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    """By outcome, while a fault began or lasted."""
    quiet: Counter[str] = field(default_factory=Counter)
    late_bytes: int = 0
    compared_pieces: int = 0
    own_objects: int = 0
    request_seconds_max: float = 0.0
    over: int = 0
    disk_reads: int = 0
    """Objects that sources read from their disks, as far as they were counted before a restart."""
    under_way: int = 0
    """Faults that began before the request on its way was done."""
    load: float = 0.0
    """Of the machine, on average."""
    acquires: dict[str, int] = field(default_factory=dict)
    acquire_p99_ms: dict[str, float] = field(default_factory=dict)
    acquire_p50_ms: dict[str, float] = field(default_factory=dict)
    packets: dict[str, int] = field(default_factory=dict)
    finding: str = ""

    @property
    def acquire_p99_ratio(self) -> float:
        """0: there was too little to compare."""
        quiet = self.acquire_p99_ms.get("quiet", 0.0)
        return self.acquire_p99_ms.get("fault", 0.0) / quiet if quiet else 0.0

    def record(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__ if name not in ("faults", "requests", "quiet")}
        counted = {name: dict(sorted(getattr(self, name).items())) for name in ("faults", "requests", "quiet")}
        return found | counted | {"acquire_p99_ratio": self.acquire_p99_ratio}


class Acquires:
    """The times that `tests.peer_faults.acquires` writes, and the windows in which faults lasted, or none."""

    def __init__(self, socket: Path) -> None:
        command = [sys.executable, "-m", "tests.peer_faults.acquires", str(socket)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._timed = list[tuple[float, float]]()
        self.windows: dict[str, list[tuple[float, float]]] = {"quiet": [], "fault": []}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while len(record := self._process.stdout.read(TIMED.size)) == TIMED.size:
            self._timed.append(TIMED.unpack(record))

    @property
    def running(self) -> bool:
        return bool(self._timed)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def milliseconds(self, kind: str) -> list[float]:
        """Return all times of these windows, sorted."""
        starts = [began for began, _ in self._timed]
        found = list[float]()
        for first, last in self.windows[kind]:
            found += [
                seconds * 1e3 for _, seconds in self._timed[bisect_left(starts, first) : bisect_left(starts, last)]
            ]
        return sorted(found)


def plan(seed: int, names: Collection[str] = FAULTS) -> Iterator[tuple[str, ...]]:
    """Name the faults of each request, of one group each, without end. Each comes once before any comes again."""
    rng = random.Random(f"plan {seed}")
    deck = list[str]()
    while True:
        if not deck:
            deck = rng.sample(sorted(names), len(names))
        faults = [deck.pop()]
        for _ in range(rng.randrange(_AT_ONCE_MAX)):
            others = [name for name in deck if GROUPS[name] not in {GROUPS[one] for one in faults}]
            if others:
                faults.append(others[-1])
                deck.remove(others[-1])
        yield tuple(faults)


class Run:
    """`plant`: write a byte after the extents were given back, which has to be found."""

    def __init__(
        self, folder: Path, seed: int, *, plant: bool = False, nixl: bool = False, listed: bool = False,
        disk: bool = False, say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.outcome = Outcome(seed)
        self._plant, self._nixl, self._disk, self._say = plant, nixl, disk, say
        self._rng = random.Random(seed)
        self._loads = list[float]()
        self._pool = ThreadPoolExecutor(1)
        self.world = World(folder, seed, nixl=nixl, listed=listed, disk=disk)
        try:
            self._acquires = Acquires(self.world.reader.socket)
        except BaseException:
            self.world.close()
            raise

    def run(self, faults: int, seconds: float = float("inf")) -> Outcome:
        """Stop after so many faults, or before those that would begin after so many seconds.

        In any case a fault has begun within a load, and a load without a fault has come, if so many faults suffice.
        """
        began = time.monotonic()
        try:
            wait_until(lambda: self._acquires.running, "RAM serves")
            began = time.monotonic()
            left_out = (NOT_OVER_NIXL if self._nixl else frozenset()) | (frozenset() if self._disk else OF_DISK)
            for names in plan(self.outcome.seed, FAULTS.keys() - left_out):
                struck = self.outcome.faults.total()
                seen = self.outcome.under_way and self.outcome.quiet["hit"]
                if struck >= faults or (seen and time.monotonic() > began + seconds):
                    break
                self._phase(names)
            if self._nixl and "objects come over nixl" not in self.world.reader.log:
                raise ViolationError("nothing came over NIXL")
            self.outcome.disk_reads = int(self.world.disk_reads)
            if self.outcome.over:
                raise ViolationError(f"N3: {self.outcome.over} requests took more than {_LIMIT_SECONDS:g} s")
        except (AssertionError, grpc.RpcError) as error:
            self.outcome.finding = "".join(traceback.format_exception(error))
        self.outcome.seconds = time.monotonic() - began
        return self._added_up()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._acquires.close()
        self.world.close()

    # One fault

    def _phase(self, names: tuple[str, ...]) -> None:
        self._loads.append(os.getloadavg()[0])
        world, rng, began = self.world, self._rng, time.monotonic()
        source, rate = rng.choice(world.sources), rng.choice(_RATES)
        self._quiet(source, rate)
        keys = self._offered(source)
        struck = time.monotonic()
        request = self._pool.submit(world.ask, keys)
        endings = self._strike(names, source, keys, CHUNKS * OBJECT_BYTES / rate + 0.03, request)
        asked = [request.result()]
        if not OF_READER.intersection(names):
            asked += [world.ask(keys) for _ in range(rng.randint(0, _REQUESTS))]
            self._fill()
            before = world.pieces()
            self._acquires.windows["fault"].append((struck, time.monotonic()))
        for end in endings:
            end()
        world.network.heal()
        if OF_READER.intersection(names):
            self._fill()
            before = world.pieces()
        self._judge(names, asked)
        world.wait_recovered()
        time.sleep(_LATE_SECONDS)
        self._compare(before)
        outcomes = ", ".join(f"{one.outcome} {one.seconds:.2f} s" for one in asked)
        faults = self.outcome.faults.total()
        self._say(f"{faults:4} {' + '.join(names)}: {outcomes}; {time.monotonic() - began:.1f} s")

    def _strike(
        self, names: tuple[str, ...], source: Source, keys: list[bytes], seconds: float, request: Future[Asked]
    ) -> list[Ending]:
        """Begin the faults at random points of a request that takes about so long. Return what ends them."""
        began, endings = time.monotonic(), list[Ending]()
        points = sorted(self._rng.uniform(0.0, 1.2 * seconds) for _ in names)
        for name, point in zip(names, points, strict=True):
            time.sleep(max(began + point - time.monotonic(), 0.0))
            self.outcome.under_way += not request.done()
            self.outcome.faults[name] += 1
            endings.append(FAULTS[name](self.world, source, keys, self._rng))
        return endings

    def _quiet(self, source: Source, rate: float) -> None:
        """Load without a fault, as much as with one: what RAM acquires take is compared."""
        world = self.world
        prompts = [world.prompt(source) for _ in range(_QUIET_REQUESTS)]
        world.network.fault(*range(SOURCES), bytes_per_second=rate)
        began = time.monotonic()
        for keys in prompts:
            self.outcome.quiet[world.ask(keys).outcome] += 1
        self._fill()
        self._acquires.windows["quiet"].append((began, time.monotonic()))

    def _offered(self, source: Source) -> list[bytes]:
        """Return a prompt of the source that the reader has found there."""
        found = list[bytes]()

        def offered() -> bool:
            found[:] = self.world.prompt(source)
            with suppress(grpc.RpcError):  # there is no answer yet
                return self.world.locate(found, _FOUND_SECONDS) == CHUNKS
            return False

        wait_until(offered, f"N3: something of source {source.node} is found")
        return found

    def _fill(self) -> None:
        """Have all extents given back, and store over them."""
        wait_until(self._nothing_lent, "all extents were given back", pause_seconds=0.003)
        self.world.forget()
        self.world.store_own()

    def _nothing_lent(self) -> bool:
        self.world.release()  # one may be granted only now
        return not self.world.lent_bytes()

    def _judge(self, names: tuple[str, ...], asked: list[Asked]) -> None:
        for one in asked:
            self.outcome.requests[one.outcome] += 1
            self.outcome.request_seconds_max = max(self.outcome.request_seconds_max, one.seconds)
            if one.over:
                self.outcome.over += 1
                self._say(f"N3: {names}: a request took {one.seconds:.2f} s, and may take {_LIMIT_SECONDS:g} s")

    def _compare(self, before: list[int]) -> None:
        """Nobody may write to the reader's arena: all requests are done, and nothing was stored since."""
        world = self.world
        if self._plant:
            world.engine.arena[self._rng.randrange(len(world.engine.arena))] ^= 1
        after = world.pieces()
        wrong = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        self.outcome.compared_pieces += len(after)
        self.outcome.late_bytes += len(wrong) * PIECE_BYTES
        if wrong:
            raise ViolationError(f"N1: {len(wrong)} pieces changed after all extents were given back: {wrong[:20]}")
        self.outcome.own_objects += world.check_own()

    # The end

    def _added_up(self) -> Outcome:
        self._acquires.close()
        for kind in self._acquires.windows:
            times = self._acquires.milliseconds(kind)
            self.outcome.acquires[kind] = len(times)
            if times:
                self.outcome.acquire_p50_ms[kind] = statistics.median(times)
                self.outcome.acquire_p99_ms[kind] = times[int(len(times) * 0.99)]
        self.outcome.load = statistics.fmean(self._loads or [0.0])
        self.outcome.packets = self.world.network.counts()
        return self.outcome
