"""CPU time that one batch of 32 MiB costs the copying thread, for KV tensors on a device, by the ways to copy it.

No GPU is needed: the device does nothing. What is measured is the work of this process before a driver is called:
checks, the table of runs, and torch's operations. On a GPU each of torch's operations costs several times as much.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import numpy as np
import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import BATCH_BYTES, CopyBatch, Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.runs import Runs

from benchmarks.host_device import HostDevice
from benchmarks.report import Report, arguments, median

LAYERS, BLOCKS_IN_OBJECT, BLOCKS = 32, 16, 2048
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


def batch_of(block_kib: int) -> CopyBatch:
    """As many pieces as 32 MiB of such blocks are, of shrunk ones: objects of 16 blocks a layer, scattered."""
    objects = max(1, BATCH_BYTES // (LAYERS * BLOCKS_IN_OBJECT * (block_kib << 10)))
    chance = np.random.default_rng(0)
    blocks = [chance.permutation(BLOCKS)[:BLOCKS_IN_OBJECT] for _ in range(objects)]
    count = objects * LAYERS * BLOCKS_IN_OBJECT
    return CopyBatch(
        np.tile(np.repeat(np.arange(LAYERS), BLOCKS_IN_OBJECT), objects).astype(np.int64),
        np.concatenate([np.tile(ids, LAYERS) for ids in blocks]).astype(np.int64),
        np.zeros(count, dtype=np.int64),
        np.arange(count, dtype=np.int64) * SHRUNK_BYTES,
        np.full(count, SHRUNK_BYTES, dtype=np.int64),
    )


def cpu_ms(copier: DeviceCopier, memory: Any, batch: CopyBatch, direction: Direction) -> float:
    began = time.thread_time()
    copier.copy(memory, batch, direction)
    return (time.thread_time() - began) * 1e3


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = [torch.zeros((BLOCKS, SHRUNK_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
    report = Report("copy overhead")
    for block_kib in (64, 16, 4):
        batch = batch_of(block_kib)
        memory: Any = Memory(batch.size_bytes)
        copiers = {way: DeviceCopier(layers, NullDevice(), way=way) for way in Way}
        for copier in copiers.values():
            copier.prepare(memory)
        for direction in Direction:
            taken: dict[Way, list[float]] = {way: [] for way in Way}
            for _ in range(options.rounds):
                for way, copier in copiers.items():
                    taken[way].append(cpu_ms(copier, memory, batch, direction))
            for way in Way:
                aim = 0.1 if block_kib == 64 and way is Way.BATCH else None
                report.figure(f"{direction.value}_{block_kib}_kib_{way}", median(taken[way]), "ms", at_most=aim)
    report.note("one batch", f"{BATCH_BYTES >> 20} MiB, {LAYERS} layers, objects of {BLOCKS_IN_OBJECT} blocks a layer")
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
