"""Copies between KV tensors on a device and an arena, as a share of one pinned copy of the same size.

Tensors like an engine's: layers of blocks that are scattered at random, objects of 16 blocks a layer. The baseline is
one transfer between pinned memory of torch's and one piece of device memory, in alternating rounds. Every byte that
was stored and loaded is compared.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from kvdepot.client.arena_map import ArenaMap, Population
from kvdepot.client.copy.backend import Device, Way
from kvdepot.client.copy.base import CopyBatch, Direction, object_pieces
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.pinning import PIECE_BYTES
from kvdepot.client.extents import parse_extents
from kvdepot.core.arena import PAGE_BYTES, GenerationsHeader

BLOCKS_IN_OBJECT = 16
ROWS = 1024
GENERATION = 2
"""Of every row of an arena that is made here."""


def make_arena(size_bytes: int) -> ArenaMap:
    """Return one that has all its pages, in this process too, and room for `size_bytes` of objects."""
    column, data = os.memfd_create("generations"), os.memfd_create("data")
    piece = bytes(PIECE_BYTES)
    for at in range(0, size_bytes, len(piece)):  # pages that were never written count as holes
        os.pwrite(data, piece[: size_bytes - at], at)
    os.pwrite(column, GenerationsHeader(1, ROWS).pack(), 0)
    os.pwrite(column, np.full(ROWS, GENERATION, "<u8").tobytes(), PAGE_BYTES)
    arena = ArenaMap(data, column, size_bytes)
    os.close(column)
    population = Population(arena, data)  # which closes the descriptor
    while population.step(PIECE_BYTES) is not None:
        pass
    population.close()
    return arena


def packed_extents(places: Sequence[int], object_bytes: int) -> bytes:
    """Return objects of one size, one extent each, packed. Place 1 begins where place 0 ends."""
    words = [[i, i, place * object_bytes, object_bytes, GENERATION] for i, place in enumerate(places)]
    return np.array(words, dtype="<u8").tobytes()


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def pieces_of(memory: memoryview, piece_bytes: int = PIECE_BYTES) -> list[memoryview]:
    """Return memory in pieces: as long as those that the product pins, if not said otherwise."""
    return [memory[at : at + piece_bytes] for at in range(0, len(memory), piece_bytes)]


def pin_pieces(device: Device, pieces: Sequence[memoryview]) -> list[float]:
    """Pin pieces, and return the seconds of each. Fewer seconds than pieces: the driver refused the next one."""
    took: list[float] = []
    for piece in pieces:
        begin = time.perf_counter()
        if not device.pin(piece):
            break
        took.append(time.perf_counter() - begin)
    return took


def pin(device: Device, arena: ArenaMap) -> tuple[float, float]:
    """Seconds in all, and of the longest piece. They are unpinned again: copies pin what they touch."""
    pieces = pieces_of(arena.buffer)
    took = pin_pieces(device, pieces)
    if len(took) < len(pieces):
        raise SystemExit("the driver pins no more of the arena: figures would be about another way of copying")
    for piece in pieces:
        device.unpin(piece)
    return sum(took), max(took)


@dataclass(frozen=True)
class Round:
    """Seconds of one direction: of kvdepot's copies, and of the pinned copy."""

    ours: float
    pinned: float


class RatioBench:
    """Layers [blocks, ...] of one size on a device, and as much pinned memory."""

    def __init__(self, layers: Sequence[torch.Tensor], device: Device, way: Way | None, size_bytes: int) -> None:
        """Take about `size_bytes` for a round: of the layers' blocks one half is stored, the other one loaded."""
        self.layers = layers
        self._on = layers[0].device
        self._device = device
        self.copier = DeviceCopier(layers, device, way=way)
        self.copier.enter()
        self.copier.prove(self.copier.mark())
        block_bytes = self.copier.block_bytes(0)
        object_bytes = len(layers) * BLOCKS_IN_OBJECT * block_bytes
        count = max(1, min(size_bytes // object_bytes, len(layers[0]) // 2 // BLOCKS_IN_OBJECT)) * BLOCKS_IN_OBJECT
        self.size_bytes = count // BLOCKS_IN_OBJECT * object_bytes
        shuffled = random.Random(0).sample(range(len(layers[0])), 2 * count)
        self._blocks = {Direction.STORE: shuffled[:count], Direction.LOAD: shuffled[count:]}
        self.arena = make_arena(self.size_bytes)
        self._host = torch.empty(self.size_bytes, dtype=torch.uint8)
        if self._on.type == "cuda":
            self._host = self._host.pin_memory()
        self._there = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._on)
        for layer in layers:
            layer.view(torch.uint8).random_()
        self._pieces = {direction: self._pieces_of(blocks) for direction, blocks in self._blocks.items()}

    def pin_all(self) -> tuple[float, float]:
        """See `pin`."""
        took = pin(self._device, self.arena)
        self.copier.prepare(self.arena)
        return took

    def round(self, direction: Direction) -> Round:
        """Copy once each way."""
        into, out = (self._host, self._there) if direction is Direction.STORE else (self._there, self._host)

        def pinned() -> None:
            into.copy_(out, non_blocking=True)
            if self._on.type == "cuda":
                torch.cuda.synchronize(self._on)

        return Round(seconds(lambda: self.copy(direction)), seconds(pinned))

    def copy(self, direction: Direction) -> None:
        """Copy once, and wait."""
        for batch in self._pieces[direction].split():
            self.copier.copy(self.arena, batch, direction)
        self.copier.wait()

    def wrong_layers(self) -> list[int]:
        """Return the layers whose loaded blocks are not as the stored ones. After a round each way."""
        source, target = self._blocks[Direction.STORE], self._blocks[Direction.LOAD]
        as_bytes = [layer.view(torch.uint8) for layer in self.layers]
        return [number for number, layer in enumerate(as_bytes) if not torch.equal(layer[source], layer[target])]

    def close(self) -> None:
        """Unpin the arena."""
        self.copier.leave()

    def _pieces_of(self, blocks: list[int]) -> CopyBatch:
        """These blocks of every layer, as objects end to end in the arena."""
        objects = list(range(len(blocks) // BLOCKS_IN_OBJECT))
        sizes = [self.copier.block_bytes(layer) for layer in range(len(self.layers))]
        packed = packed_extents(objects, sum(sizes) * BLOCKS_IN_OBJECT)
        extents = parse_extents(packed, self.arena.size_bytes)
        ids = np.array(blocks, dtype=np.int64).reshape(len(objects), BLOCKS_IN_OBJECT)
        return object_pieces(extents, objects, 0, range(len(self.layers)), sizes, BLOCKS_IN_OBJECT, ids)


@contextmanager
def ratio_bench(
    layers: Sequence[torch.Tensor], device: Device, way: Way | None, size_bytes: int
) -> Iterator[RatioBench]:
    """One that is closed at the end."""
    bench = RatioBench(layers, device, way, size_bytes)
    try:
        yield bench
    finally:
        bench.close()
