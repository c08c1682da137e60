"""Copies for KV tensors in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from kvdepot.client.copy import native
from kvdepot.client.copy.base import CopyError, Direction
from kvdepot.client.copy.table import LayerTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from kvdepot.client.copy.base import Arena, Column, CopyBatch, CopyMemory


class CpuCopier:
    """Copies blocks of CPU tensors. Each layer is a view [num_blocks, ...] of any dtype and stride.

    A block's bytes are its elements in the view's order, whatever its strides; padding
    between blocks is neither read nor written.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """Take a rank's layers. Raise CopyError for a tensor that is not on the CPU."""
        self._tensors = tuple(layers)  # their memory is reached by address
        for tensor in layers:
            if tensor.device.type != "cpu":
                raise CopyError(f"a layer on {tensor.device}: this copies layers in host memory")
        self._table = LayerTable(layers)

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        return int(self._table.bounds.block_bytes[layer])

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """Copy one batch on this thread. Raises CopyError before any byte moved if a piece is out of range."""
        if not len(batch):
            return
        memory = np.frombuffer(arena.buffer, dtype=np.uint8)
        pieces = np.array((batch.layers, batch.blocks, batch.skips, batch.offsets, batch.lengths), np.int64)
        base, size_bytes, store = memory.ctypes.data, len(memory), direction is Direction.STORE
        if native.copy(self._table.words, self._table.begins, pieces, base, size_bytes, store) >= 0:
            raise CopyError(self._table.bounds.what_is_wrong(batch, size_bytes))

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """On this thread. Raises CopyError before any byte moved for a block out of range."""
        self._table.bounds.check_move(layers, sources, targets)
        native.move(
            self._table.words,
            self._table.begins,
            *(np.array(column, np.int64) for column in (layers, sources, targets)),
        )

    def enter(self) -> None:
        """Nothing to set up."""

    def prove(self, mark: object) -> None:
        """Nothing to prove: the native copy is tested on every platform that it runs on."""

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:  # noqa: ARG002
        """Likewise."""
        return True

    def leave(self) -> None:
        """Likewise."""

    def mark(self) -> None:
        """Nothing: what was given to a CPU is done."""

    def after(self, mark: object) -> None:
        """Likewise."""

    def wait(self, direction: Direction | None = None) -> None:
        """Nothing is ever left running."""

    def prepare(self, arena: Arena | None, *, at_once: bool = False) -> None:
        """Nothing to prepare."""
