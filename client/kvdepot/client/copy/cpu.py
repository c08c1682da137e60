"""Copies for KV tensors in host memory.

Each layer's storage is seen as one array of units: the largest run of
bytes (the greatest common divisor of everything that addresses a block) that lets a
block be named by a few indices. A run of blocks then is one `take` (store) or one
indexed assignment (load) of numpy: no temporary, no Python per block, no OpenMP
threads, and the GIL is released while the bytes move. Tried by hand against
`torch.index_select`/`index_copy_`, `torch._foreach_copy_`, `process_vm_readv` and
`preadv` of the arena file at blocks of 24 and 64 KiB: it was the only one near memcpy
in both directions. Large runs go through memmove itself: at 1 MiB the few microseconds
that numpy spends around each piece are 5 % of it, below 512 KiB memmove is the slower
one. What it reaches in the whole path: docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from kvdepot.client.copy.base import Bounds, CopyError, Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdepot.client.copy.base import Arena, Column, CopyBatch, CopyMemory

Bytes = npt.NDArray[np.uint8]
_MEMMOVE_BYTES_MIN: Final = 512 << 10
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
UNIT_BYTES_MIN = 512
"""Below this an index costs more than the bytes it names: such layers go block by block."""


def _runs_of(layer: torch.Tensor) -> tuple[list[int], list[int], int]:
    """Shape and byte strides of what remains of a block when its contiguous end is one run, and that run's bytes."""
    run = layer.element_size()
    dims = [(n, s * layer.element_size()) for n, s in zip(layer.shape[1:], layer.stride()[1:], strict=True) if n != 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    return [n for n, _ in dims], [s for _, s in dims], run


class _Layer:
    """One layer: where its blocks lie in its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.dim() < 1:
            raise CopyError(
                f"a layer on {tensor.device} with {tensor.dim()} dimensions; this copies [num_blocks, ...] on cpu"
            )
        self.blocks = int(tensor.shape[0])
        self.block_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
        start = tensor.storage_offset() * tensor.element_size()
        stride = tensor.stride(0) * tensor.element_size()
        shape, strides, run = _runs_of(tensor)
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        # Where blocks are large single runs of bytes: address of the first one, and from one to the next.
        self.large_runs = run == self.block_bytes >= _MEMMOVE_BYTES_MIN
        self.address = tensor.data_ptr()
        self.stride_bytes = stride
        void = np.dtype(f"V{run}")
        self.view = np.ndarray((self.blocks, *shape), void, storage, start, (stride, *strides))
        self.unit_bytes = math.gcd(start, stride, run, *strides)
        self.units: npt.NDArray[np.void] | None = None
        if self.unit_bytes >= UNIT_BYTES_MIN:
            count = len(storage) // self.unit_bytes
            self.units = storage[: count * self.unit_bytes].view(f"V{self.unit_bytes}")
            inner: Column = np.zeros(1, dtype=np.int64)
            for n, s in zip((*shape, run // self.unit_bytes), (*strides, self.unit_bytes), strict=True):
                inner = (inner[:, None] + np.arange(n) * (s // self.unit_bytes)).ravel()
            self._inner: Column = inner + start // self.unit_bytes
            self._step: int = stride // self.unit_bytes

    def copy(self, blocks: Column, extent: Bytes, direction: Direction) -> None:
        """Whole blocks that lie together in the arena: one native call where the layout allows."""
        if self.units is None:
            self._copy_one_by_one(blocks, extent, direction)
            return
        indices = self._indices(blocks)
        if direction is Direction.STORE:
            # "clip" because numpy buffers the output of any other mode; the indices were checked.
            self.units.take(indices, out=extent.view(self.units.dtype), mode="clip")
        else:
            self.units[indices] = extent.view(self.units.dtype)

    def _indices(self, blocks: Column) -> Column:
        """Where the units of these blocks lie."""
        return ((blocks * self._step)[:, None] + self._inner).ravel()

    def move(self, sources: Column, targets: Column) -> None:
        """Whole blocks from one place of the layer to another."""
        if self.units is None:
            self.view[targets] = self.view[sources]
        else:
            self.units[self._indices(targets)] = self.units.take(self._indices(sources), mode="clip")

    def _copy_one_by_one(self, blocks: Column, extent: Bytes, direction: Direction) -> None:
        shaped = extent.view(self.view.dtype).reshape(len(blocks), *self.view.shape[1:])
        for number, block in enumerate(blocks.tolist()):
            if direction is Direction.STORE:
                shaped[number] = self.view[block]
            else:
                self.view[block] = shaped[number]

    def copy_part(self, block: int, skip: int, extent: Bytes, direction: Direction) -> None:
        """A piece of a block (a fragment ends inside it), by way of a private copy of the block."""
        private = np.empty(self.block_bytes, dtype=np.uint8)
        shaped = private.view(self.view.dtype).reshape(self.view.shape[1:])
        shaped[...] = self.view[block]
        if direction is Direction.STORE:
            extent[:] = private[skip : skip + len(extent)]
        else:
            private[skip : skip + len(extent)] = extent
            self.view[block] = shaped


class CpuCopier:
    """Copies blocks of CPU tensors. Each layer is a view [num_blocks, ...] of any dtype and stride.

    A block's bytes are its elements in the view's order, whatever its strides; padding
    between blocks is neither read nor written. The tensors must outlive the copier.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """Raises CopyError for a tensor that is not on the CPU."""
        self._layers = [_Layer(layer) for layer in layers]
        self._bounds = Bounds(
            np.array([layer.blocks for layer in self._layers], dtype=np.int64),
            np.array([layer.block_bytes for layer in self._layers], dtype=np.int64),
        )
        self._large_runs = np.array([layer.large_runs for layer in self._layers], dtype=np.bool_)

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        return int(self._bounds.block_bytes[layer])

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """Copy one batch on this thread. Raises CopyError before any byte moved if a piece is out of range."""
        if not len(batch):
            return
        target = np.frombuffer(arena.buffer, dtype=np.uint8)
        if self._large_runs.take(batch.layers, mode="clip").all():  # clipped: numbers are checked next, either way
            self._copy_runs(target, arena.data_offset, batch, direction)
            return
        self._bounds.check(batch, arena.data_offset, len(target))
        begins = batch.offsets.tolist()
        layers = batch.layers.tolist()
        for start, end, whole in self._bounds.runs(batch):
            layer = self._layers[layers[start]]
            extent = target[begins[start] : begins[end - 1] + int(batch.lengths[end - 1])]
            if whole:
                layer.copy(batch.blocks[start:end], extent, direction)
            else:
                layer.copy_part(int(batch.blocks[start]), int(batch.skips[start]), extent, direction)

    def _copy_runs(self, target: Bytes, data_offset: int, batch: CopyBatch, direction: Direction) -> None:
        """One memmove a piece, whole or part of its block.

        There are few of them, so they are checked one by one: `Bounds.check` takes 0.2 ms beside copies, which leave
        nothing in the caches, of the 5 ms in which a batch moves.
        """
        moves: list[tuple[int, int, int]] = []
        base, arena_bytes, layers = target.ctypes.data, len(target), self._layers
        columns = (batch.layers, batch.blocks, batch.skips, batch.offsets, batch.lengths)
        for number, block, skip, offset, length in zip(*(column.tolist() for column in columns), strict=True):
            layer = layers[number] if 0 <= number < len(layers) else None
            if (
                layer is None
                or not 0 <= block < layer.blocks
                or not 0 <= skip < skip + length <= layer.block_bytes
                or not data_offset <= offset <= arena_bytes - length
            ):
                raise CopyError(self._bounds.what_is_wrong(batch, data_offset, arena_bytes))
            moves.append((base + offset, layer.address + layer.stride_bytes * block + skip, length))
        if direction is Direction.STORE:
            for in_arena, in_layer, length in moves:
                _memmove(in_arena, in_layer, length)
        else:
            for in_arena, in_layer, length in moves:
                _memmove(in_layer, in_arena, length)

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """On this thread, by way of a private copy. Raises CopyError before any byte moved for a block out of range."""
        self._bounds.check_move(layers, sources, targets)
        for layer in layers:
            self._layers[layer].move(sources, targets)

    def mark(self) -> None:
        """Nothing: what was given to a CPU is done."""

    def after(self, mark: object) -> None:
        """Likewise."""

    def wait(self) -> None:
        """Nothing is ever left running."""

    def prepare(self, arena: Arena | None) -> None:
        """Nothing to prepare."""
