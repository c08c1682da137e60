"""Copies by each way, compared with what torch's own copies say. Every check raises WrongByteError."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import BlockCopier, Direction, object_pieces
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.vllm.worker.layers import RankLayers

from benchmarks.copy_ratio import GENERATION
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.steps import WrongByteError


class Copier(BlockCopier, Protocol):
    """One that says how large its blocks are, as all do."""

    def block_bytes(self, layer: int) -> int: ...


Cut = list[tuple[int, int]]
"""Fragments of one object: offset in the arena, bytes."""


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bytes as a CPU tensor."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(tuple(shape))


def layer_sets(device: torch.device) -> dict[str, list[torch.Tensor]]:
    """Name -> the layers of one rank, 20 blocks each, of every shape that engines hand out."""

    def there(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        return filled(shape, dtype, seed).to(device)

    packed = there((20, 3 * 4096), torch.uint8)  # one storage, three layers side by side in each block
    padded = there((20, 5000), torch.uint8)
    halves = there((2, 20, 4, 16, 32), torch.bfloat16)  # keys and values apart: [2, blocks, ...]
    return {
        "contiguous": [there((20, 16, 4, 64), torch.bfloat16), there((20, 16, 4, 64), torch.bfloat16, 1)],
        "side by side in one storage": [packed[:, i * 4096 : (i + 1) * 4096] for i in range(3)],
        "padded": [padded[:, :4096], there((20, 2048), torch.float32)],
        "keys and values apart": [halves.permute(1, 0, 2, 3, 4)],
        "heads before tokens": [there((20, 4, 16, 64), torch.float32).permute(0, 2, 1, 3)],
        "innermost strided": [there((20, 64, 16), torch.bfloat16).permute(0, 2, 1)],
        "odd sizes": [there((20, 7, 3), torch.float16), there((20, 1), torch.float32)],
        "offset in its storage": [there((25, 2048), torch.float16)[5:]],
    }


def block_bytes_of(layer: torch.Tensor, block: int) -> bytes:
    """Return a block's bytes in the layer's order, by torch's own copy."""
    return bytes(layer[block].contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())


def extents_of(cut: Cut, arena_bytes: int) -> Extents:
    """Return the grant of one object in these fragments."""
    words = [word for row, (offset, length) in enumerate(cut) for word in (0, row, offset, length, GENERATION)]
    return parse_extents(np.array(words, dtype="<u8").tobytes(), arena_bytes)


def backward_cut(total: int, cut_bytes: int) -> Cut:
    """Return fragments of `cut_bytes`, in reverse order in the arena; one fragment with 0."""
    if not cut_bytes:
        return [(0, total)]
    count = -(-total // cut_bytes)
    return [((count - i) * 8192, min(cut_bytes, total - i * cut_bytes)) for i in range(count)]


def random_cut(total: int, most: int, chance: random.Random) -> Cut:
    """Return up to `most` fragments with gaps, in any order in the arena. They lie within twice `total`."""
    ends = sorted({*(chance.randrange(1, total + 1) for _ in range(chance.randrange(most))), total})
    lengths = [int(length) for length in np.diff([0, *ends])]
    order = list(range(len(lengths)))
    chance.shuffle(order)
    offsets, at = [0] * len(lengths), 0
    for number in order:
        at += chance.randrange(1 + total // len(lengths))
        offsets[number] = at
        at += lengths[number]
    return list(zip(offsets, lengths, strict=True))


@contextmanager
def copier_on(
    machine: Machine, layers: Sequence[torch.Tensor], arena: ArenaMap, way: Way | None
) -> Iterator[DeviceCopier]:
    """A copier of its own device, on the calling thread, which may pin all of the arena."""
    copier = DeviceCopier(layers, machine.copies(), way=way)
    copier.enter()
    copier.prepare(arena)
    try:
        yield copier
    finally:
        copier.leave()


def check_layers(
    copier: Copier, arena: ArenaMap, layers: Sequence[torch.Tensor], cut: Cut, chance: random.Random
) -> None:
    """Store blocks of every layer into one object, load it into other blocks, and look at every byte of both."""
    drawn = chance.sample(range(len(layers[0])), 8)
    source, target = drawn[:4], drawn[4:]
    sizes = [copier.block_bytes(number) for number in range(len(layers))]
    held = extents_of(cut, arena.size_bytes)
    args = (list(range(len(layers))), sizes, len(source))
    before = [[block_bytes_of(layer, block) for block in range(len(layer))] for layer in layers]
    for batch in object_pieces(held, [0], 0, *args, [source]).split(8192):
        copier.copy(arena, batch, Direction.STORE)
    copier.wait()
    expected = b"".join(blocks[block] for blocks in before for block in source)
    if b"".join(bytes(arena.buffer[at : at + size]) for at, size in cut) != expected:
        raise WrongByteError("a store put other bytes into the arena than the blocks hold")
    for batch in object_pieces(held, [0], 0, *args, [target]).split(8192):
        copier.copy(arena, batch, Direction.LOAD)
    copier.wait()
    came_from = dict(zip(target, source, strict=True))
    for number, (layer, blocks) in enumerate(zip(layers, before, strict=True)):
        for block in range(len(layer)):
            if block_bytes_of(layer, block) != blocks[came_from.get(block, block)]:
                what = "holds other bytes than were stored" if block in came_from else "was not to be written"
                raise WrongByteError(f"after a load, block {block} of layer {number} {what}")


def check_group(
    copier: DeviceCopier, arena: ArenaMap, ranks: RankLayers, group: int, storages: Sequence[torch.Tensor],
    expected: RankLayers, expected_storages: Sequence[torch.Tensor], chance: random.Random,
) -> int:  # fmt: skip
    """Likewise for one group of a rank whose layers may share memory: every byte of the storages is compared.

    `expected` are the same layers over `expected_storages`, which hold the same bytes. Return the bytes of the object.
    """
    layers = ranks.of_group(group)
    blocks = len(ranks.views[layers[0]])
    count = min(4, blocks // 2)
    drawn = chance.sample(range(blocks), 2 * count)
    source, target = drawn[:count], drawn[count:]
    sizes = [ranks.facts[layer].block_bytes for layer in layers]
    cut = random_cut(sum(sizes) * count, 7, chance)
    held = extents_of(cut, arena.size_bytes)
    for direction, ids in ((Direction.STORE, source), (Direction.LOAD, target)):
        for batch in object_pieces(held, [0], 0, layers, sizes, count, [ids]).split(chance.choice([1 << 16, 1 << 22])):
            copier.copy(arena, batch, direction)
        copier.wait()
        if direction is Direction.STORE:
            stored = b"".join(bytes(arena.buffer[at : at + size]) for at, size in cut)
            if stored != b"".join(block_bytes_of(ranks.views[layer], block) for layer in layers for block in source):
                raise WrongByteError(f"a store of group {group} put other bytes into the arena than the blocks hold")
    for layer in layers:
        for wrote, came_from in zip(target, source, strict=True):
            expected.views[layer][wrote].copy_(expected.views[layer][came_from])
    for number, (storage, wanted) in enumerate(zip(storages, expected_storages, strict=True)):
        if not torch.equal(storage, wanted):
            wrong = int((storage != wanted).nonzero()[0])
            raise WrongByteError(f"after a load of group {group}, byte {wrong} of storage {number} is wrong")
    return sum(sizes) * count
