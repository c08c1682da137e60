"""Batches by way of staging memory: the same bytes in the same places, asked for in few parts."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from kvdepot.client.copy.base import CopyBatch, CopyError, Direction, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.copy.staging import Staging, staged
from kvdepot.client.extents import Extents, parse_extents

ARENA_BYTES = 1 << 20
BLOCK_BYTES, IN_OBJECT, LAYERS = 1000, 4, 2


def granted(*fragments: tuple[int, int, int, int, int]) -> Extents:
    return parse_extents(b"".join(struct.pack("<5Q", *one) for one in fragments), ARENA_BYTES)


def asked(extents: bytes) -> list[tuple[int, ...]]:
    """(row, offset, length, generation) of each part."""
    return [one[1:] for one in struct.iter_unpack("<5Q", extents)]


def pieces(extents: Extents, objects: list[int], blocks: list[list[int]], first: int = 0) -> CopyBatch:
    sizes = [BLOCK_BYTES] * LAYERS
    return object_pieces(extents, objects, 0, range(LAYERS), sizes, IN_OBJECT, blocks, first)


def test_whole_objects_are_one_part_each_though_they_lie_side_by_side() -> None:
    extents = granted((0, 7, 4096, 8000, 3), (1, 8, 4096 + 8000, 8000, 5))
    there = staged(pieces(extents, [1, 0], [[9, 8, 7, 6], [0, 1, 2, 3]]), extents)
    assert asked(there.extents) == [(8, 12096, 8000, 5), (7, 4096, 8000, 3)]
    assert there.batch.offsets.tolist() == list(range(0, 16000, BLOCK_BYTES))


def test_missing_blocks_of_an_object_are_asked_for_alone() -> None:
    extents = granted((0, 7, 4096, 8000, 3))
    there = staged(pieces(extents, [0], [[5, 6]], first=1), extents)
    assert asked(there.extents) == [(7, 5096, 2000, 3), (7, 9096, 2000, 3)]


def test_the_fragments_of_an_object_are_parts_of_their_own_rows() -> None:
    extents = granted((0, 7, 8192, 4500, 3), (0, 2, 4096, 3500, 9))
    there = staged(pieces(extents, [0], [[1, 2, 3, 4]]), extents)
    assert asked(there.extents) == [(7, 8192, 4500, 3), (2, 4096, 3500, 9)]


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("offset", [4095, 4096 + 7001, 100_000])
def test_what_lies_outside_the_grant_is_never_asked_for(offset: int) -> None:
    extents = granted((0, 7, 4096, 8000, 3), (1, 8, 40_960, 8000, 5))
    one = np.array([0])
    with pytest.raises(CopyError, match="outside"):
        staged(CopyBatch(one, one, one, np.array([offset]), np.array([1000])), extents)


def test_bytes_that_went_by_staging_are_those_that_a_mapping_would_have_got() -> None:
    rng = np.random.default_rng(1)
    layers = [torch.from_numpy(rng.integers(0, 256, (16, BLOCK_BYTES), dtype=np.uint8)) for _ in range(LAYERS)]
    before = [layer.clone() for layer in layers]
    copier = CpuCopier(layers)
    extents = granted((0, 7, 8192, 4500, 3), (0, 2, 4096, 3500, 9), (1, 5, 16_384, 8000, 1))
    batch = pieces(extents, [0, 1], [[3, 1, 4, 15], [9, 2, 6, 5]])
    there = staged(batch, extents)
    arena = bytearray(ARENA_BYTES)
    memory = Staging()
    sent = memory.reserve(batch.size_bytes)
    copier.copy(memory, there.batch, Direction.STORE)
    at = 0
    for _, offset, length, _ in asked(there.extents):
        arena[offset : offset + length] = sent[at : at + length]
        at += length
    assert at == batch.size_bytes
    for layer in layers:
        layer.zero_()
    memory.reserve(at)[:] = b"".join(arena[offset : offset + length] for _, offset, length, _ in asked(there.extents))
    copier.copy(memory, there.batch, Direction.LOAD)
    moved = sorted({3, 1, 4, 15, 9, 2, 6, 5})
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[moved], was[moved])
        assert not layer[[n for n in range(16) if n not in moved]].any()


def test_staging_memory_grows_to_the_largest_batch_and_is_used_again() -> None:
    memory = Staging()
    small, large = memory.reserve(100), memory.reserve(5000)
    assert (len(small), len(large)) == (100, 5000)
    large[0] = 7
    assert memory.reserve(10)[0] == 7
