"""Copies between KV tensors on a GPU and the arena, as a share of one pinned copy of the same size.

Tensors like an engine's: 32 layers of blocks that are scattered at random, objects of 16 blocks a layer. The baseline
is one transfer between pinned memory of torch's and one piece of device memory, in alternating rounds. Every byte that
was stored and loaded is compared. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import numpy as np
import torch
from kvdepot.client.arena_map import ArenaMap, Population
from kvdepot.client.copy.base import CopyBatch, Direction, object_pieces
from kvdepot.client.copy.cuda import CudaDevice
from kvdepot.client.copy.device import PIN_PIECE_BYTES, DeviceCopier
from kvdepot.client.extents import parse_extents
from kvdepot.core.arena import ArenaLayout, Superblock

from benchmarks.report import Report, arguments, median

LAYERS, BLOCKS_IN_OBJECT = 32, 16
ROWS = 1024


def make_arena(size_bytes: int) -> ArenaMap:
    """One that has all its pages, in this process too."""
    layout = ArenaLayout.plan(size_bytes, rows=ROWS, lent_rows=ROWS)
    descriptor = os.memfd_create("arena")
    piece = bytes(PIN_PIECE_BYTES)
    for at in range(0, layout.size_bytes, len(piece)):  # pages that were never written count as holes
        os.pwrite(descriptor, piece[: layout.size_bytes - at], at)
    os.pwrite(descriptor, Superblock(1, layout, 1, b"\0" * 16).pack(), 0)
    arena = ArenaMap(descriptor)
    population = Population(arena, descriptor)
    while population.step(PIN_PIECE_BYTES) is not None:
        pass
    population.close()
    return arena


def pieces_of(arena: ArenaMap, block_bytes: int, blocks: list[int]) -> CopyBatch:
    """These blocks of every layer, as objects end to end in the arena."""
    object_bytes = LAYERS * BLOCKS_IN_OBJECT * block_bytes
    objects = list(range(len(blocks) // BLOCKS_IN_OBJECT))
    words = [[i, i, arena.data_offset + i * object_bytes, object_bytes, 2] for i in objects]
    extents = parse_extents(np.array(words, dtype="<u8").tobytes(), arena.size_bytes)
    ids = np.array(blocks, dtype=np.int64).reshape(len(objects), BLOCKS_IN_OBJECT)
    return object_pieces(extents, objects, 0, range(LAYERS), [block_bytes] * LAYERS, BLOCKS_IN_OBJECT, ids)


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def pin(copier: DeviceCopier, arena: ArenaMap) -> tuple[float, float]:
    """Seconds in all, and of the longest piece."""
    took: list[float] = []
    while True:
        begin = time.perf_counter()
        if copier.prepare(arena) != 0.0:
            break
        took.append(time.perf_counter() - begin)
    if copier.pinned_bytes < arena.size_bytes:
        raise SystemExit("the driver pins no more of the arena: figures would be about another way of copying")
    return sum(took), max(took)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, default=1024, help="bytes of a round")
    parser.add_argument("--block-kib", type=int, default=64, help="a block of one layer: 16 tokens of 8 heads in bf16")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and torch sees none here")
        return 2
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    device, block_bytes = torch.device("cuda", 0), options.block_kib << 10
    count = (options.mib << 20) // (LAYERS * BLOCKS_IN_OBJECT * block_bytes) * BLOCKS_IN_OBJECT
    size_bytes = count * LAYERS * block_bytes
    layers = [torch.empty((2 * count, block_bytes // 2), dtype=torch.int16, device=device) for _ in range(LAYERS)]
    for layer in layers:
        layer.random_()
    shuffled = random.Random(0).sample(range(2 * count), 2 * count)
    source, target = shuffled[:count], shuffled[count:]
    arena = make_arena(size_bytes + (64 << 20))
    copier = DeviceCopier(layers, CudaDevice(device))
    pin_seconds, piece_seconds = pin(copier, arena)
    host = torch.empty(size_bytes, dtype=torch.uint8).pin_memory()
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def one_copy(into: torch.Tensor, out: torch.Tensor) -> None:
        into.copy_(out, non_blocking=True)
        torch.cuda.synchronize(device)

    def copy(direction: Direction, blocks: list[int]) -> None:
        for batch in pieces_of(arena, block_bytes, blocks).split():
            copier.copy(arena, batch, direction)
        copier.wait()

    report = Report("cuda")
    ways: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("store", lambda: copy(Direction.STORE, source), lambda: one_copy(host, there)),
        ("load", lambda: copy(Direction.LOAD, target), lambda: one_copy(there, host)),
    ]
    for name, ours, plain in ways:
        ours(), plain()  # not measured: memory is taken
        pairs = [(seconds(ours), seconds(plain)) for _ in range(options.rounds)]
        report.figure(f"{name}_ratio", median([plain / mine for mine, plain in pairs]), "", at_least=0.9)
        report.figure(f"{name}_gb_s", size_bytes / median([mine for mine, _ in pairs]) / 1e9, "GB/s")
        report.figure(f"{name}_pinned_gb_s", size_bytes / median([plain for _, plain in pairs]) / 1e9, "GB/s")
    report.figure("pin_seconds_per_gib", pin_seconds / arena.size_bytes * 2**30, "s")
    report.figure("pin_piece_ms_max", piece_seconds * 1e3, "ms")
    if any(not torch.equal(layer[source], layer[target]) for layer in layers):
        raise SystemExit("wrong bytes")
    copier.prepare(None)
    report.note("block_kib", options.block_kib)
    report.note("device", torch.cuda.get_device_name(device))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
