"""CPU time that one batch of 32 MiB costs the copying thread, for KV tensors on a device, by the ways to copy it.

No GPU is needed: the device does nothing. What is measured is the work of this process before a driver is called: the
pieces of an operation, then checks, the table of runs, and torch's operations. On a GPU each of torch's operations
costs several times as much. The exit status is 1 if an aim is missed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import numpy as np
import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import BATCH_BYTES, CopyBatch, Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.runs import Runs
from kvdepot.client.extents import parse_extents
from kvdepot.client.vllm.base.operations import LayerFacts, ObjectCopy, SpanCopy
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.places import ObjectPlaces
from kvdepot.core.calls import Kind
from kvdepot.core.groups import GroupSpec
from kvdepot.core.planner import Planner

from benchmarks.copy_ratio import BLOCKS_IN_OBJECT, packed_extents
from benchmarks.host_device import HostDevice
from benchmarks.report import Report, arguments, median

LAYERS, BLOCK_TOKENS, BLOCKS = 32, 16, 2048
SHRUNK_BYTES = 64
"""Blocks of the tensors: torch's operations move so little that their own cost is what is left."""


class NullDevice(HostDevice):
    """Moves nothing but by torch's operations."""

    def transfer(self, _direction: Direction, _runs: Runs, *, pinned: bool) -> None: ...

    def shuffle(self, _direction: Direction, runs: Runs) -> None:
        self.numbers(np.stack([runs.sources, runs.targets, runs.lengths]))
        assert runs.word_bytes


class Memory:
    """Instead of an arena: all of it can be pinned."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = self.pinnable = memoryview(bytearray(size_bytes))
        self.size_bytes = size_bytes


class Operation:
    """As many pieces as 32 MiB of such blocks are, of shrunk ones: objects of 16 blocks a layer, scattered."""

    def __init__(self, block_kib: int) -> None:
        count = max(1, BATCH_BYTES // (LAYERS * BLOCKS_IN_OBJECT * (block_kib << 10)))
        names = [f"layer.{number}" for number in range(LAYERS)]
        facts = tuple(LayerFacts(name, 0, "uint8", (SHRUNK_BYTES,), (0,), SHRUNK_BYTES, "") for name in names)
        group = GroupSpec(Kind.ATTENTION, BLOCK_TOKENS, rank_block_bytes=(LAYERS * SHRUNK_BYTES,), layers=tuple(names))
        self._places = ObjectPlaces(Planner([group], BLOCKS_IN_OBJECT * BLOCK_TOKENS), RankLayers((), facts), 0)
        chance = np.random.default_rng(0)
        self._objects = [
            ObjectCopy(number, Kind.ATTENTION, bytes(16), BLOCK_TOKENS, (SpanCopy(0, 0, tuple(ids.tolist())),))
            for number in range(count)
            for ids in [chance.permutation(BLOCKS)[:BLOCKS_IN_OBJECT]]
        ]
        object_bytes = LAYERS * BLOCKS_IN_OBJECT * SHRUNK_BYTES
        self.size_bytes = count * object_bytes
        self._extents = packed_extents(range(count), object_bytes)

    def batch(self) -> CopyBatch:
        """Return its pieces, as the copying thread works them out."""
        extents = parse_extents(self._extents, self.size_bytes)
        (batch,) = self._places.pieces(self._objects, extents, writing=True).split()
        return batch


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = [torch.zeros((BLOCKS, SHRUNK_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
    report = Report("copy overhead")
    for block_kib in (64, 16, 4):
        operation = Operation(block_kib)
        batch = operation.batch()
        memory: Any = Memory(batch.size_bytes)
        copiers = {way: DeviceCopier(layers, NullDevice(), way=way) for way in Way}
        for copier in copiers.values():
            copier.prepare(memory)
        planned = median([cpu_ms(operation.batch) for _ in range(options.rounds)])
        report.figure(f"pieces_{block_kib}_kib", planned, "ms")
        for direction in Direction:
            taken: dict[Way, list[float]] = {way: [] for way in Way}
            for _ in range(options.rounds):
                for way, copier in copiers.items():
                    taken[way].append(cpu_ms(functools.partial(copier.copy, memory, batch, direction)))
            for way in Way:
                aim = 0.1 if block_kib == 64 and way is Way.BATCH else None
                report.figure(f"{direction.value}_{block_kib}_kib_{way}", median(taken[way]), "ms", at_most=aim)
    report.note("one batch", f"{BATCH_BYTES >> 20} MiB, {LAYERS} layers, objects of {BLOCKS_IN_OBJECT} blocks a layer")
    report.finish(options.json)
    return bool(report.missed())


if __name__ == "__main__":
    raise SystemExit(main())
