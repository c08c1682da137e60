"""Copies see what the engine has queued before them, and do not disturb what it still reads. A part of step 3."""

from __future__ import annotations

import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction, object_pieces
from kvdepot.client.copy.device import DeviceCopier

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one.byte_steps import note_ways
from benchmarks.day_one.copies import block_bytes_of, copier_on, extents_of
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.steps import Context, WrongByteError

BLOCKS, BLOCK_BYTES = 16, 65536
LATE_SECONDS = 0.05
_ROUNDS = 3


def order(context: Context) -> None:
    """Run both directions by each way."""
    machine, arena = context.machine, make_arena(16 << 20)
    ways = context.drawn(note_ways(context))
    for done, way in enumerate(ways):
        context.case(done, len(ways))
        layer = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=machine.device)
        machine.synchronize()
        with copier_on(machine, [layer], arena, way) as copier:
            for value in range(1, 1 + _ROUNDS):
                see_late_writes(machine, copier, arena, layer, value, way)
                spare_late_reads(machine, copier, arena, layer, value + 100, way)
    context.figure("cases", 2 * len(ways) * _ROUNDS, "")


def _copy(copier: DeviceCopier, arena: ArenaMap, direction: Direction, blocks: list[int]) -> None:
    size = len(blocks) * BLOCK_BYTES
    held = extents_of([(0, size)], arena.size_bytes)
    copier.copy(arena, object_pieces(held, [0], 0, [0], [BLOCK_BYTES], len(blocks), [blocks]), direction)


def see_late_writes(
    machine: Machine, copier: DeviceCopier, arena: ArenaMap, layer: torch.Tensor, value: int, way: Way
) -> None:
    """A store after the engine's mark has the bytes that the engine writes late."""
    blocks = [3, 7, 11]
    machine.delay(LATE_SECONDS)
    machine.on_engine(lambda: layer.fill_(value))
    copier.after(copier.mark())
    _copy(copier, arena, Direction.STORE, blocks)
    copier.wait()
    size = len(blocks) * BLOCK_BYTES
    if bytes(arena.buffer[:size]) != bytes([value]) * size:
        raise WrongByteError(f"{way}: a store did not wait for the engine's writes")
    machine.synchronize()


def spare_late_reads(
    machine: Machine, copier: DeviceCopier, arena: ArenaMap, layer: torch.Tensor, value: int, way: Way
) -> None:
    """A load after the engine's mark writes after the engine's late reads."""
    blocks = [2, 5]
    size = len(blocks) * BLOCK_BYTES
    before = [block_bytes_of(layer, block) for block in range(BLOCKS)]
    read = torch.zeros_like(layer)
    machine.synchronize()
    arena.buffer[:size] = bytes([value]) * size
    machine.delay(LATE_SECONDS)
    machine.on_engine(lambda: read.copy_(layer))
    copier.after(copier.mark())
    _copy(copier, arena, Direction.LOAD, blocks)
    copier.wait()
    machine.synchronize()
    if [block_bytes_of(read, block) for block in range(BLOCKS)] != before:
        raise WrongByteError(f"{way}: a load did not wait for the engine's reads")
    for block in range(BLOCKS):
        wanted = bytes([value]) * BLOCK_BYTES if block in blocks else before[block]
        if block_bytes_of(layer, block) != wanted:
            raise WrongByteError(f"{way}: block {block} is wrong after a load")
