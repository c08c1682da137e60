"""Speed of the RAM tier through the real client: put and get of 4 MiB objects, as a share of plain memcpy.

One thread copies. An object is a block of 1 MiB in each of 4 layers (a hybrid engine's), scattered
over 1 GiB of KV tensors on either side; gets choose from 2.25 GiB of the arena. Keys are always
fresh, the arena is full, so that puts evict (between rounds the daemon frees 5 to 10 % of it),
every byte that was got is compared. The baseline
is memcpy of 4 MiB between the same tensors and a tmpfs mapping made like the arena's, 1 GiB of it
before and after each round, on the same thread, when the checksum worker has read what was put.
The largest batch is what one call may reserve.
A round of puts is 4 GiB: of 1 GiB in batches of 64, four of them, an eighth to a twelfth would be
its first reservation and its last commit, beside which nothing is copied.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import numpy as np
import torch
from kvdepot.client.attachment import Transport
from kvdepot.client.copy.base import Arena, CopyBatch, Direction, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    Kind,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.planner import GroupSpec

from benchmarks.depot import SHM, Status, daemon, engine
from benchmarks.report import Report, arguments, median

LAYERS, BLOCKS_IN_OBJECT, BLOCK_BYTES, CHUNK_TOKENS = 4, 1, 1 << 20, 256
OBJECT_BYTES = LAYERS * BLOCKS_IN_OBJECT * BLOCK_BYTES
SOURCE_BYTES, TARGET_BYTES = 1 << 30, 1 << 30
WORKING_SET_BYTES = 9 << 28  # 2.25 GiB: what gets choose from, half of the arena: eviction passes over what is read
PUT_BYTES, GET_BYTES = 4 << 30, 1 << 30  # of a round
BATCHES = (8, RESERVED_PER_CALL_MAX, 1)
FILL_OBJECTS = 6 * RESERVED_PER_CALL_MAX
CALL_SECONDS = 10.0
IN_FLIGHT_BYTES_MAX = 768 << 20  # of reservations, below the default credit


def spec() -> NamespaceSpec:
    group = GroupSpec(
        Kind.ATTENTION,
        CHUNK_TOKENS // BLOCKS_IN_OBJECT,
        rank_block_bytes=(LAYERS * BLOCK_BYTES,),
        layers=tuple(f"layer.{i}" for i in range(LAYERS)),
    )
    return NamespaceSpec({"benchmark": "ram"}, CHUNK_TOKENS, (group,), {Kind.ATTENTION: OBJECT_BYTES}, label="ram.py")


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks stored together: a prompt. `blocks`: the source blocks of each object."""

    keys: tuple[bytes, ...]
    blocks: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Copies:
    """The one copying thread."""

    tasks: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    busy_seconds: float = 0.0

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            start = time.perf_counter()
            task()
            self.busy_seconds += time.perf_counter() - start

    def run(self, task: Callable[[], None]) -> float:
        """Seconds that `task` took on the copying thread."""
        done: queue.SimpleQueue[float] = queue.SimpleQueue()

        def timed() -> None:
            start = time.perf_counter()
            task()
            done.put(time.perf_counter() - start)

        self.tasks.put(timed)
        return done.get()


class Depot:
    """Puts and gets of chains, several calls in flight, copies on one thread."""

    def __init__(
        self,
        session: DepotSession,
        arena: Arena,
        copies: Copies,
        rng: random.Random,
        source_bytes: int = SOURCE_BYTES,
        target_bytes: int = TARGET_BYTES,
        *,
        verify_loads: float = 0.0,
    ) -> None:
        self.namespace = spec().namespace_id()
        self.session, self.arena, self.copies, self.rng = session, arena, copies, rng
        self.source = [_blocks(source_bytes // LAYERS, seed) for seed in range(LAYERS)]
        self.target = [_blocks(target_bytes // LAYERS, None) for _ in range(LAYERS)]
        self.readers, self.writers = CpuCopier(self.source), CpuCopier(self.target)
        self.chains: deque[Chain] = deque()
        self.outstanding = 0
        self.failures: list[str] = []
        self.verify_loads = verify_loads

    def put(self, batch: int, objects: int) -> float:
        """Seconds from the first reservation to the last confirmed commit."""
        chains = [self._fresh(batch) for _ in range(objects // batch)]
        seconds = self._drive(
            chains, self._reserve, max(2, IN_FLIGHT_BYTES_MAX // (batch * OBJECT_BYTES)) if batch > 1 else 1
        )
        self.chains.extend(chains)
        while sum(len(chain.keys) for chain in self.chains) * OBJECT_BYTES > WORKING_SET_BYTES:
            self.chains.popleft()
        return seconds

    def get(self, batch: int, objects: int) -> float:
        """Seconds from the first acquire to the last copy; every byte is compared afterwards."""
        numbers = self.rng.sample(range(len(self.chains)), objects // batch)
        chains = [self.chains[number] for number in numbers]
        # A hit renews a chain: keep the same order of use as the daemon, whose oldest goes first.
        chosen = set(numbers)
        self.chains = deque([chain for number, chain in enumerate(self.chains) if number not in chosen] + chains)
        return self.load(chains, batch)

    def load(self, chains: list[Chain], batch: int) -> float:
        """As `get`, of these."""
        objects = batch * len(chains)
        where = np.array(self.rng.sample(range(len(self.target[0])), objects * BLOCKS_IN_OBJECT)).reshape(
            -1, batch, BLOCKS_IN_OBJECT
        )
        pairs = list(zip(chains, where, strict=True))
        seconds = self._drive(pairs, self._acquire, 8 if batch > 1 else 1)
        for layer_source, layer_target in zip(self.source, self.target, strict=True):
            for chain, blocks in pairs:
                if not torch.equal(layer_target[blocks.ravel()], layer_source[chain.blocks.ravel()]):
                    raise SystemExit("wrong bytes")
        return seconds

    def _fresh(self, batch: int) -> Chain:
        blocks = np.array(self.rng.sample(range(len(self.source[0])), batch * BLOCKS_IN_OBJECT)).reshape(batch, -1)
        return Chain(tuple(self.rng.randbytes(16) for _ in range(batch)), blocks)

    def _drive(self, work: list[Any], start: Callable[[Any], None], depth: int) -> float:
        todo = deque(work)
        began = time.perf_counter()
        while todo or self.outstanding:
            while todo and self.outstanding < depth:
                self.outstanding += 1
                start(todo.popleft())
            if not self.session.wait(CALL_SECONDS):
                raise SystemExit("no answer")
            if self.failures:
                raise SystemExit(f"failed: {self.failures}")
        return time.perf_counter() - began

    def _reserve(self, chain: Chain) -> None:
        lease = self.session.new_lease_id()
        count = len(chain.keys)
        boundaries = (np.arange(1, count + 1) * CHUNK_TOKENS).astype("<u4").tobytes()
        parents = b"".join((ROOT_KEY, *chain.keys[:-1]))
        call = ReserveCall(
            b"", lease, self.namespace, b"".join(chain.keys), parents, bytes([Kind.ATTENTION] * count), boundaries
        )

        def granted(reply: object) -> None:
            if not isinstance(reply, ReserveReply) or set(reply.outcomes) != {ReserveOutcome.GRANTED}:
                self.failures.append(f"reserve: {reply}"[:300])
                return
            extents = parse_extents(reply.extents, self.arena.size_bytes)
            pieces = self._pieces(extents, chain.blocks)
            self.copies.tasks.put(lambda: self._store(lease, chain, extents, pieces))

        self.session.submit(call, CALL_SECONDS, granted)

    def _store(self, lease: int, chain: Chain, extents: Extents, pieces: list[CopyBatch]) -> None:
        self._copy_in(extents, pieces)
        self.session.commit(lease, range(len(chain.keys)), self._committed)

    def _copy_in(self, extents: Extents, pieces: list[CopyBatch]) -> None:
        for batch in pieces:
            if not self.arena.store(self.readers, extents, batch):
                self.failures.append("a store did not get there")

    def _committed(self, outcomes: bytes) -> None:
        self.outstanding -= 1
        if set(outcomes) != {CommitOutcome.COMMITTED}:
            self.failures.append(f"commit: {list(outcomes)}")

    def _acquire(self, pair: tuple[Chain, Any]) -> None:
        chain, blocks = pair
        lease = self.session.new_lease_id()
        call = AcquireCall(
            b"", lease, self.namespace, b"".join(chain.keys), bytes([Kind.ATTENTION] * len(chain.keys)),
            checksums=self.verify_loads > 0,
        )  # fmt: skip

        def granted(reply: object) -> None:
            if not isinstance(reply, AcquireReply) or reply.outcome is not AcquireOutcome.GRANTED:
                self.failures.append(f"acquire: {reply}"[:300])
                return
            extents = parse_extents(reply.extents, self.arena.size_bytes)
            pieces = self._pieces(extents, blocks)
            self.copies.tasks.put(lambda: self._load(lease, extents, pieces, reply.checksums))

        self.session.submit(call, CALL_SECONDS, granted)

    def _load(self, lease: int, extents: Extents, pieces: list[CopyBatch], checksums: bytes) -> None:
        rows, generations = extents.granted(extents.fragments)
        for batch in pieces:
            if not self.arena.check(rows, generations):
                self.failures.append("a generation changed")
            if not self.arena.load(self.writers, extents, batch):
                self.failures.append("a load did not get there")
        if self.rng.random() < self.verify_loads and not self.arena.intact(extents, checksums):
            self.failures.append("an object does not match its checksum")
        if not self.arena.check(rows, generations):
            self.failures.append("a generation changed")
        self.session.release((lease,))
        self.session.call_soon(self._loaded)

    def _loaded(self, _: None) -> None:
        self.outstanding -= 1

    def _pieces(self, extents: Extents, blocks: Any) -> list[CopyBatch]:
        layers, sizes = range(LAYERS), [BLOCK_BYTES] * LAYERS
        return list(object_pieces(extents, range(len(blocks)), 0, layers, sizes, BLOCKS_IN_OBJECT, blocks).split())


def _blocks(size_bytes: int, seed: int | None) -> torch.Tensor:
    if seed is None:
        return torch.full((size_bytes // BLOCK_BYTES, BLOCK_BYTES), 1, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (size_bytes // 8,), dtype=torch.int64, generator=generator)
    return words.view(torch.uint8).reshape(-1, BLOCK_BYTES)


class Plain:
    """memcpy of 4 MiB between the same tensors and a mapping like the arena's."""

    def __init__(self, depot: Depot, size_bytes: int, directory: str) -> None:
        self.depot = depot
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            self._map = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED)
        self._map.madvise(23)  # MADV_POPULATE_WRITE
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._slots = size_bytes // OBJECT_BYTES

    def copy(self, objects: int, direction: Direction) -> float:
        tensors = self.depot.source if direction is Direction.STORE else self.depot.target
        rng = self.depot.rng
        per_layer = tensors[0].numel() // OBJECT_BYTES
        pairs = [
            (
                tensors[rng.randrange(LAYERS)].data_ptr() + rng.randrange(per_layer) * OBJECT_BYTES,
                self._base + slot * OBJECT_BYTES,
            )
            for slot in rng.sample(range(self._slots), objects)
        ]

        def run() -> None:
            for tensor, slot in pairs:
                into, out = (slot, tensor) if direction is Direction.STORE else (tensor, slot)
                ctypes.memmove(into, out, OBJECT_BYTES)

        return self.depot.copies.run(run)


def measure(depot: Depot, plain: Plain, batch: int, rounds: int, report: Report, status: Status, *, aims: bool) -> None:
    part = 1 if batch > 1 else 4
    put, got = (size // OBJECT_BYTES // part // batch * batch for size in (PUT_BYTES, GET_BYTES))
    while sum(len(chain.keys) for chain in depot.chains) * OBJECT_BYTES < WORKING_SET_BYTES - batch * OBJECT_BYTES:
        depot.put(batch, got)
    ratios: dict[str, list[float]] = {"put": [], "get": []}
    speeds: dict[str, list[float]] = {"put": [], "get": [], "memcpy_in": [], "memcpy_out": []}
    shares: dict[str, list[float]] = {"put": [], "get": []}
    for _ in range(rounds):
        for name, run, objects, direction, plain_name in (
            ("put", depot.put, put, Direction.STORE, "memcpy_in"),
            ("get", depot.get, got, Direction.LOAD, "memcpy_out"),
        ):
            status.wait_summed()
            before = plain.copy(got, direction)
            busy = depot.copies.busy_seconds
            seconds = run(batch, objects)
            shares[name].append((depot.copies.busy_seconds - busy) / seconds)
            status.wait_summed()
            after = plain.copy(got, direction)
            speeds[name].append(objects * OBJECT_BYTES / 1e9 / seconds)
            speeds[plain_name].append(got * OBJECT_BYTES / 1e9 / ((before + after) / 2))
            ratios[name].append(speeds[name][-1] / speeds[plain_name][-1])
    aim = {8: 0.90, RESERVED_PER_CALL_MAX: 0.95}.get(batch) if aims else None
    for name in ("put", "get"):
        if batch > 1:
            report.figure(f"{name}_ratio_{batch}", median(ratios[name]), "", at_least=aim)
        report.figure(f"{name}_gb_s_{batch}", median(speeds[name]), "GB/s")
        report.figure(f"{name}_copying_share_{batch}", median(shares[name]), "")
    for name in ("memcpy_in", "memcpy_out"):
        report.figure(f"{name}_gb_s_{batch}", median(speeds[name]), "GB/s")


def compare_verified(
    depot: Depot, shares: list[float], batch: int, rounds: int, report: Report, status: Status
) -> None:
    """Measure gets with each share of verified loads, in turns, against the first one."""
    got = GET_BYTES // OBJECT_BYTES // (1 if batch > 1 else 4)
    while sum(len(chain.keys) for chain in depot.chains) * OBJECT_BYTES < WORKING_SET_BYTES - batch * OBJECT_BYTES:
        depot.put(batch, got)
    status.wait_summed()
    seconds: dict[float, list[float]] = {share: [] for share in shares}
    for number in range(rounds):
        for share in shares if number % 2 else shares[::-1]:
            depot.verify_loads = share
            seconds[share].append(depot.get(batch, got))
    for share in shares:
        report.figure(f"get_gb_s_{batch}_verify_{share:g}", got * OBJECT_BYTES / 1e9 / median(seconds[share]), "GB/s")
    for share in shares[1:]:
        ratios = [first / other for first, other in zip(seconds[shares[0]], seconds[share], strict=True)]
        report.figure(f"get_ratio_{batch}_verify_{share:g}", median(ratios), "")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--ram", default="4608MiB", help="capacity of the daemon that is started (default %(default)s)")
    parser.add_argument("--memory", type=Path, default=SHM, help="where its arena lies (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--transport", type=Transport, choices=(Transport.SHM, Transport.STREAM), default=Transport.SHM)
    parser.add_argument(
        "--verify-loads", type=float, nargs="+", default=[0.0],
        help="the share of gets compared with checksums; several: gets alone, in turns, as ratios of the first share",
    )  # fmt: skip
    options: argparse.Namespace = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    way = "shared memory" if options.transport is Transport.SHM else "streams"
    report = Report(f"ram: 4 MiB objects through {way}, one copying thread")
    report.note("seed", seed)
    report.note("share of gets compared with checksums", options.verify_loads)
    # By recency alone, so that it is known here what the daemon still has.
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "kvdepot.toml")
        config.write_text('[policy]\neviction = "lru"\n')
        run(options, config, seed, report)
    report.finish(options.json)


def run(options: argparse.Namespace, config: Path, seed: int, report: Report) -> None:
    with daemon(options.ram, config=config, memory=options.memory) as started:
        status = Status(started.endpoint)
        status.wait_populated(started)
        with engine(started.endpoint, spec(), transport=options.transport) as (session, worker):
            arena = worker.arena
            assert arena is not None
            depot = Depot(session, arena, Copies(), random.Random(seed), verify_loads=options.verify_loads[0])
            plain = Plain(depot, WORKING_SET_BYTES, str(started.arena_directory))
            filled = 0
            while filled < arena.size_bytes:  # from here on every put evicts
                depot.put(RESERVED_PER_CALL_MAX, FILL_OBJECTS)
                filled += FILL_OBJECTS * OBJECT_BYTES
            for batch in options.batches:
                depot.chains.clear()
                if len(options.verify_loads) > 1:
                    compare_verified(depot, options.verify_loads, batch, options.rounds, report, status)
                    continue
                measure(depot, plain, batch, options.rounds, report, status, aims=options.transport is Transport.SHM)
            final = status()
            report.note(
                "arena",
                f"{arena.size_bytes / 2**30:.2f} GiB of data, {final.tiers[0].objects} objects at the end",
            )
            report.note("evictions", {k: v for k, v in final.counters.items() if "evict" in k})


if __name__ == "__main__":
    main()
