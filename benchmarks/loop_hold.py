"""How long a single callback holds the daemon's event loop under a mixed load: nobody is answered meanwhile.

Engines send the largest messages that the protocol permits, small ones, and many leases in one call; one dies with
leases open. A disk tier writes everything, RAM evicts, operators list and evict. Small objects: the work of a
call grows with their number, not with their bytes. The daemon runs under `benchmarks.timed_loop`.

A process beside it repeats one piece of work. Its longest time shows how much of the daemon's is the machine's: a
virtual machine that waits for its host counts that as CPU time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from kvdepot.client.ctl.calls import connect
from kvdepot.client.endpoint import Endpoint
from kvdepot.core import limits
from kvdepot.core.calls import AcquireOutcome, CommitCall, CommitItem, ReleaseCall, ReserveOutcome
from kvdepot.proto.methods import encode

from benchmarks.report import Report, arguments
from benchmarks.timed_loop import Held
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.raw_client import CALL_SECONDS, RawEngine, dense_spec

OBJECT_BYTES: Final = 4096
HOLD_MS_MAX: Final = 20.0
_ROWS: Final = 12
_LEASES: Final = 512
_LONG: Final = 4096  # chunks of a prompt that is stored and loaded: a million tokens
_KEPT: Final = 16
_CONTROL_NUMBERS: Final = 200_000  # some 2 ms
_CONTROL_PAUSE: Final = 0.002
_CONFIG: Final = """
[sessions]
credit = "64MiB"
[[tier]]
name = "disk"
kind = "disk"
path = "{path}"
capacity = "4GiB"
write = "commit"
"""


def _keys(count: int) -> list[bytes]:
    return [random.randbytes(16) for _ in range(count)]


def _engine(socket: Path, name: str) -> RawEngine:
    return RawEngine(socket, name, spec=dense_spec(name, OBJECT_BYTES))


def _store(engine: RawEngine, keys: list[bytes]) -> int:
    """Ask until everything is answered or nothing is granted; returns how many of the first keys are stored."""
    stored = 0
    while stored < len(keys):
        lease, outcomes, _ = engine.reserve(keys, first=stored)
        granted = sum(outcome is ReserveOutcome.GRANTED for outcome in outcomes)
        if not granted:
            return stored
        engine.commit(lease, granted)
        stored += granted
    return stored


class Load:
    """What is sent, by the name of its engine; each method is one round."""

    def __init__(self, socket: Path, seconds: float) -> None:
        self._socket = socket
        self._until = time.monotonic() + seconds
        self.rounds: dict[str, int] = {}
        self._stored: list[list[bytes]] = []  # large prompts, the oldest no longer in RAM

    def run(self) -> None:
        """Returns when the time is over."""
        rounds = (self.large, self.many, self.small, self.dying, self.operator)
        threads = [threading.Thread(target=self._repeat, args=(once,)) for once in rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, once: Callable[[RawEngine], None]) -> None:
        name = once.__name__
        with _engine(self._socket, name) as engine:
            while time.monotonic() < self._until:
                once(engine)
                self.count(name)

    def count(self, name: str) -> None:
        self.rounds[name] = self.rounds.get(name, 0) + 1

    def large(self, engine: RawEngine) -> None:
        """The largest message of each call."""
        keys = _keys(limits.OBJECTS_PER_LEASE_MAX)
        engine.locate(keys)
        stored = keys[: _store(engine, keys[:_LONG])]
        engine.locate(keys)
        self._stored = [*self._stored[-_KEPT:], stored] if stored else self._stored
        for prompt in (stored, self._stored[0] if self._stored else []):  # from RAM, and from the disk
            if prompt:
                lease, outcome, _ = engine.acquire(prompt)
                self.count(f"large {outcome.name.lower()}")
                if outcome is AcquireOutcome.GRANTED:
                    engine.release(lease)
        lease, _, _ = engine.reserve(_keys(limits.OBJECTS_PER_LEASE_MAX))
        engine.abandon(lease)

    def many(self, engine: RawEngine) -> None:
        """Hundreds of leases, ended by one call."""
        keys = _keys(16)
        if _store(engine, keys) == len(keys):
            reading = [engine.acquire(keys)[0] for _ in range(_LEASES)]
            call = encode(ReleaseCall(engine.session, tuple(reading)))
            engine.stub.Release(call, timeout=CALL_SECONDS)
        items = []
        for _ in range(_LEASES):
            lease, outcomes, _ = engine.reserve(_keys(32))
            granted = [at for at, outcome in enumerate(outcomes) if outcome is ReserveOutcome.GRANTED]
            items.append(CommitItem(lease, struct.pack(f"<{len(granted)}I", *granted)))
        commit = encode(CommitCall(engine.session, tuple(items)))
        engine.stub.Commit(commit, timeout=CALL_SECONDS)

    def small(self, engine: RawEngine) -> None:
        """A prompt of 16 chunks, stored and loaded twice."""
        keys = _keys(16)
        _store(engine, keys)
        for _ in range(2):
            engine.locate(keys)
            lease, outcome, _ = engine.acquire(keys)
            if outcome is AcquireOutcome.GRANTED:
                engine.release(lease)

    def dying(self, _: RawEngine) -> None:
        """An engine that has reserved as much as its credit allows, and is killed."""
        child = multiprocessing.get_context("spawn").Process(target=_die, args=(self._socket,))
        child.start()
        child.join()

    def operator(self, _: RawEngine) -> None:
        """Status, lists, and an eviction of one namespace."""
        with connect(Endpoint.parse(f"unix://{self._socket}"), CALL_SECONDS) as calls:
            calls.status()
            for namespace in calls.namespaces("", 1000).namespaces:
                calls.chunks(namespace.namespace_id, "", 1000)
                if namespace.label == "many":
                    calls.evict(namespace.namespace_id, b"")
        time.sleep(0.5)


def _die(socket: Path) -> None:
    engine = _engine(socket, "dies")
    for _ in range(_LEASES):
        engine.reserve(_keys(64))
    os._exit(1)


def _same_work(times: Connection) -> None:
    """Send the median and the longest CPU time of one piece of work, in seconds, when asked to end."""
    taken = []
    while not times.poll():
        began = time.thread_time()
        sum(range(_CONTROL_NUMBERS))
        taken.append(time.thread_time() - began)
        time.sleep(_CONTROL_PAUSE)
    times.send((statistics.median(taken), max(taken)))


class Control:
    """The piece of work in a process of its own, while the context is open."""

    median = longest = 0.0

    def __enter__(self) -> Self:
        self._here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_same_work, args=(there,))
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send(None)
        self.median, self.longest = self._here.recv()
        self._process.join()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load (default: 30)")
    options = parser.parse_args()
    report = Report("loop_hold")
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        held = Path(directory) / "held.json"
        config = _CONFIG.format(path=Path(directory) / "disk")
        with DaemonProcess(ram="1536MiB", config=config, under=("benchmarks.timed_loop", str(held))) as daemon:
            load = Load(daemon.socket, options.seconds)
            with Control() as control:
                load.run()
            daemon.stop()
        callbacks = {name: Held(**row) for name, row in json.loads(held.read_text()).items()}
    rows = sorted(callbacks.items(), key=lambda row: -row[1].cpu)[:_ROWS]
    print(f"{'callback':<80}{'calls':>8}{'CPU ms':>9}{'third':>9}{'wall ms':>9}")
    for name, row in rows:
        third = row.repeated[0]
        print(f"{name:<80.80}{row.calls:>8}{row.cpu * 1000:>9.1f}{third * 1000:>9.1f}{row.wall * 1000:>9.1f}")
    report.figure("longest_hold_cpu_ms", rows[0][1].cpu * 1000, "ms", at_most=HOLD_MS_MAX)
    report.figure("third_longest_hold_cpu_ms", max(row.repeated[0] for row in callbacks.values()) * 1000, "ms")
    report.figure("control_median_cpu_ms", control.median * 1000, "ms")
    report.figure("control_longest_cpu_ms", control.longest * 1000, "ms")
    report.figure("turns", sum(row.calls for row in callbacks.values()), "")
    report.note("rounds", load.rounds)
    report.finish(options.json)


if __name__ == "__main__":
    main()
