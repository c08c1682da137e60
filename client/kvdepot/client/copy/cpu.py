"""Copies for KV tensors in host memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from kvdepot.client.copy import native
from kvdepot.client.copy.base import Bounds, CopyError, Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdepot.client.copy.base import Arena, Column, CopyBatch, CopyMemory


def _runs(layer: torch.Tensor) -> tuple[int, Column]:
    """Bytes of the runs in which a block lies, all alike, and where in it they begin, in the view's order."""
    run = layer.element_size()
    dims = [(n, s * layer.element_size()) for n, s in zip(layer.shape[1:], layer.stride()[1:], strict=True) if n != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    begins: Column = np.zeros(1, dtype=np.int64)
    for n, stride in dims:
        begins = (begins[:, None] + np.arange(n) * stride).ravel()
    return run, begins


class CpuCopier:
    """Copies blocks of CPU tensors. Each layer is a view [num_blocks, ...] of any dtype and stride.

    A block's bytes are its elements in the view's order, whatever its strides; padding
    between blocks is neither read nor written.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """Raises CopyError for a tensor that is not on the CPU."""
        self._tensors = tuple(layers)  # their memory is reached by address
        self._layers: Column = np.zeros((len(layers), native.LAYER_WORDS), dtype=np.int64)
        begins: list[Column] = []
        for tensor, words in zip(layers, self._layers, strict=True):
            if tensor.device.type != "cpu" or tensor.dim() < 1:
                raise CopyError(
                    f"a layer on {tensor.device} with {tensor.dim()} dimensions; this copies [num_blocks, ...] on cpu"
                )
            words[native.ADDRESS] = tensor.data_ptr()
            words[native.BLOCKS] = tensor.shape[0]
            words[native.STRIDE_BYTES] = tensor.stride(0) * tensor.element_size()
            words[native.BLOCK_BYTES] = tensor.element_size() * math.prod(tensor.shape[1:])
            words[native.FIRST_RUN] = sum(map(len, begins))
            words[native.RUN_BYTES], run_begins = _runs(tensor)
            begins.append(run_begins)
        self._runs: Column = np.concatenate([*begins, np.zeros(0, dtype=np.int64)])
        self._bounds = Bounds(self._layers[:, native.BLOCKS], self._layers[:, native.BLOCK_BYTES])

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        return int(self._bounds.block_bytes[layer])

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """Copy one batch on this thread. Raises CopyError before any byte moved if a piece is out of range."""
        if not len(batch):
            return
        memory = np.frombuffer(arena.buffer, dtype=np.uint8)
        pieces = np.array((batch.layers, batch.blocks, batch.skips, batch.offsets, batch.lengths), np.int64)
        base, size_bytes, store = memory.ctypes.data, len(memory), direction is Direction.STORE
        if native.copy(self._layers, self._runs, pieces, base, arena.data_offset, size_bytes, store) >= 0:
            raise CopyError(self._bounds.what_is_wrong(batch, arena.data_offset, size_bytes))

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """On this thread. Raises CopyError before any byte moved for a block out of range."""
        self._bounds.check_move(layers, sources, targets)
        native.move(self._layers, self._runs, *(np.array(column, np.int64) for column in (layers, sources, targets)))

    def mark(self) -> None:
        """Nothing: what was given to a CPU is done."""

    def after(self, mark: object) -> None:
        """Likewise."""

    def wait(self) -> None:
        """Nothing is ever left running."""

    def prepare(self, arena: Arena | None) -> None:
        """Nothing to prepare."""
