"""Where the blocks of a rank's layers lie in memory, and a batch as one table of runs: what native calls are given.

A run is a number of bytes that lie together both in the layers and in the arena. A batch is turned into runs by
operations on whole columns. Nothing here is done block by block: 32 MiB of small blocks are thousands of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from kvdepot.client.copy.base import Bounds, CopyError, heads
from kvdepot.client.copy.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from kvdepot.client.copy.base import Column, CopyBatch

ADDRESS, BLOCKS, STRIDE_BYTES, BLOCK_BYTES, RUN_BYTES, FIRST_RUN, LAYER_WORDS = range(7)
"""A layer: where its first block lies; how many there are, and from one to the next; a block's bytes, which are runs
of `RUN_BYTES`, and where in the table of runs its first one is, whose entries say where in the block they lie."""

_UNCUT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Runs to copy, as columns of equal length: addresses in the layers, offsets in the arena, bytes."""

    addresses: Column
    offsets: Column
    lengths: Column

    def __len__(self) -> int:
        return len(self.lengths)


class LayerTable:
    """The layers of one rank. Each is a view [num_blocks, ...] of any dtype and stride, which must outlive the table.

    A block's bytes are its elements in the view's order, whatever its strides. Padding between blocks belongs to none.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """Raise CopyError for a tensor that is not made of blocks."""
        self.words: Column = np.zeros((len(layers), LAYER_WORDS), dtype=np.int64)
        begins: list[Column] = []
        for tensor, words in zip(layers, self.words, strict=True):
            if tensor.dim() < 1:
                raise CopyError(f"a layer of {tensor.dim()} dimensions: expected [num_blocks, ...]")
            words[ADDRESS] = tensor.data_ptr()
            words[BLOCKS] = tensor.shape[0]
            words[STRIDE_BYTES] = tensor.stride(0) * tensor.element_size()
            words[BLOCK_BYTES] = tensor.element_size() * math.prod(tensor.shape[1:])
            words[FIRST_RUN] = sum(map(len, begins))
            words[RUN_BYTES], run_begins = _runs(tensor)
            begins.append(run_begins)
        self.begins: Column = np.concatenate([*begins, np.zeros(0, dtype=np.int64)])
        self.bounds = Bounds(self.words[:, BLOCKS], self.words[:, BLOCK_BYTES])

    def table(self, batch: CopyBatch, piece_bytes: int = _UNCUT) -> CopyTable:
        """Return the runs of `batch`, in its order, as long as they can be.

        No run crosses a multiple of `piece_bytes` in the arena. The batch has been checked against `bounds`.
        """
        words = self.words[batch.layers]
        blocks = words[:, ADDRESS] + words[:, STRIDE_BYTES] * batch.blocks
        run_bytes = words[:, RUN_BYTES]
        first = batch.skips // run_bytes
        last = (batch.skips + batch.lengths - 1) // run_bytes
        layers, offsets, lengths = batch.layers, batch.offsets, batch.lengths
        if (first == last).all():
            addresses = blocks + self.begins[words[:, FIRST_RUN] + first] + batch.skips - first * run_bytes
        else:
            piece, number = _expanded(first, last)
            begin = np.maximum(batch.skips[piece], number * run_bytes[piece])
            end = np.minimum((batch.skips + lengths)[piece], (number + 1) * run_bytes[piece])
            run_begins = self.begins[words[piece, FIRST_RUN] + number]
            addresses = blocks[piece] + run_begins + begin - number * run_bytes[piece]
            layers, offsets, lengths = layers[piece], offsets[piece] + begin - batch.skips[piece], end - begin
        return _cut(_joined(layers, addresses, offsets, lengths), piece_bytes)

    def moves(self, layers: Sequence[int], sources: Column, targets: Column) -> Runs:
        """Return the runs of blocks `sources` to `targets` within these layers."""
        chosen = np.array(layers, dtype=np.int64)
        runs = self.words[chosen, BLOCK_BYTES] // self.words[chosen, RUN_BYTES]
        layer, number = _expanded(np.zeros_like(runs), runs - 1)
        words = self.words[chosen[layer]]
        begins = words[:, ADDRESS] + self.begins[words[:, FIRST_RUN] + number]
        strides = words[:, STRIDE_BYTES]
        from_addresses = (begins[:, None] + strides[:, None] * sources).ravel()
        to_addresses = (begins[:, None] + strides[:, None] * targets).ravel()
        return Runs(from_addresses, to_addresses, np.repeat(words[:, RUN_BYTES], len(sources)))

    def overlap(self, layers: Sequence[int], blocks: Column) -> bool:
        """Return whether one of these blocks of one layer shares a byte with another one of another layer.

        Layers of different groups of a hybrid model do: they lie in the same pages.
        """
        runs = self.moves(layers, blocks, blocks)
        order = np.argsort(runs.sources)
        return bool((runs.sources[order][1:] < (runs.sources + runs.lengths)[order][:-1]).any())


def _runs(layer: torch.Tensor) -> tuple[int, Column]:
    """Return the bytes of a block's runs, which are all alike, and where they begin, in the view's order."""
    run = layer.element_size()
    dims = [(n, s * layer.element_size()) for n, s in zip(layer.shape[1:], layer.stride()[1:], strict=True) if n != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    begins: Column = np.zeros(1, dtype=np.int64)
    for n, stride in dims:
        begins = (begins[:, None] + np.arange(n) * stride).ravel()
    return run, begins


def _expanded(first: Column, last: Column) -> tuple[Column, Column]:
    """Return (row, number): for each row the numbers `first` to `last`, both included."""
    counts = last - first + 1
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)


def _joined(layers: Column, addresses: Column, offsets: Column, lengths: Column) -> CopyTable:
    """Join neighbours on both sides. Not those of two layers: a driver refuses copies over two allocations."""
    together = (
        (addresses[1:] == addresses[:-1] + lengths[:-1])
        & (offsets[1:] == offsets[:-1] + lengths[:-1])
        & (layers[1:] == layers[:-1])
    )
    if not together.any():
        return CopyTable(addresses, offsets, lengths)
    first = heads(together)
    return CopyTable(addresses[first], offsets[first], np.add.reduceat(lengths, first))


def _cut(table: CopyTable, piece_bytes: int) -> CopyTable:
    first = table.offsets // piece_bytes
    last = (table.offsets + table.lengths - 1) // piece_bytes
    if (first == last).all():
        return table
    row, number = _expanded(first, last)
    begin = np.maximum(table.offsets[row], number * piece_bytes)
    end = np.minimum((table.offsets + table.lengths)[row], (number + 1) * piece_bytes)
    return CopyTable(table.addresses[row] + begin - table.offsets[row], begin, end - begin)
