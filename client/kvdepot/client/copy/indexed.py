"""Copies by torch's indexed operations: for devices that have neither a batch call nor Triton, and as the reference.

Blocks are gathered into scratch memory (or scattered out of it) by one indexed operation for each run of a layer's
blocks. In it the pieces lie in the arena's order, and all that lies end to end in the arena too is one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from kvdepot.client.copy.base import CopyError, Direction
from kvdepot.client.copy.pinning import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdepot.client.copy.backend import Device
    from kvdepot.client.copy.base import Bounds, Column, CopyBatch

_ALIGNED_BYTES: Final = 16
_NUMBERS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


@dataclass(frozen=True, slots=True)
class _Run:
    """One indexed operation. Places in scratch memory, bytes."""

    layer: int
    first: int  # pieces of the batch whose blocks it is about
    end: int
    at: int
    whole: bool  # or some parts of one block


@dataclass(frozen=True, slots=True)
class _Transfer:
    at: int  # in scratch memory
    offset: int  # in the arena
    length: int


def as_numbers(layer: torch.Tensor) -> torch.Tensor:
    """View the bytes as the largest integers that fit: an indexed operation changes no bit, and moves fewer numbers.

    Raise CopyError for numbers of another size.
    """
    own = layer.element_size()
    if own not in _NUMBERS:
        raise CopyError(f"a layer of {layer.dtype}: expected numbers of {', '.join(map(str, _NUMBERS))} bytes")
    if layer.dim() > 1 and layer.stride(-1) == 1:
        places = (layer.shape[-1], layer.storage_offset(), *layer.stride()[:-1])
        for size, dtype in _NUMBERS.items():
            if size > own and not layer.data_ptr() % size and not any(place * own % size for place in places):
                return layer.view(dtype)
    return layer.view(_NUMBERS[own])


class IndexedCopies:
    """Works a batch out on this thread, as operations for the device's queue."""

    def __init__(self, layers: Sequence[torch.Tensor], bounds: Bounds, device: Device) -> None:
        """Raise CopyError for a layer that is not made of blocks of numbers."""
        self._layers = [as_numbers(layer) for layer in layers]
        self._bounds = bounds
        self._device = device

    def copy(
        self, host: memoryview, batch: CopyBatch, direction: Direction
    ) -> tuple[Callable[[torch.Tensor], None], int]:
        """Return what copies the batch by way of scratch memory, and how many bytes of that it takes."""
        runs, transfers, size_bytes = self._plan(batch)
        target = torch.frombuffer(host, dtype=torch.uint8)
        in_parts = [run for run in runs if not run.whole]

        def store(memory: torch.Tensor) -> None:
            blocks = self._device.numbers(batch.blocks)
            for run in runs:
                self._gather(run, blocks, memory)
            for one in transfers:
                target[one.offset : one.offset + one.length].copy_(
                    memory[one.at : one.at + one.length], non_blocking=True
                )

        def load(memory: torch.Tensor) -> None:
            blocks = self._device.numbers(batch.blocks)
            for run in in_parts:  # the rest of their blocks stays
                self._gather(run, blocks, memory)
            for one in transfers:
                memory[one.at : one.at + one.length].copy_(
                    target[one.offset : one.offset + one.length], non_blocking=True
                )
            for run in runs:
                self._scatter(run, blocks, memory)

        return store if direction is Direction.STORE else load, size_bytes

    def move(
        self, layers: Sequence[int], sources: Column, targets: Column
    ) -> tuple[Callable[[torch.Tensor], None], int]:
        """Return the same for copies from block to block within layers, layer after layer."""
        runs = [_Run(layer, 0, len(sources), 0, whole=True) for layer in layers]

        def work(memory: torch.Tensor) -> None:
            from_blocks, to_blocks = self._device.numbers(sources), self._device.numbers(targets)
            for run in runs:
                self._gather(run, from_blocks, memory)
                self._scatter(run, to_blocks, memory)

        return work, len(sources) * max(int(self._bounds.block_bytes[layer]) for layer in layers)

    def zero(self, layers: Sequence[int], blocks: Column) -> Callable[[], None]:
        """Return what zeroes these blocks of these layers."""

        def work() -> None:
            with torch.inference_mode():
                numbers = self._device.numbers(blocks)
                for layer in layers:
                    self._layers[layer].index_fill_(0, numbers, 0)

        return work

    def _plan(self, batch: CopyBatch) -> tuple[list[_Run], list[_Transfer], int]:
        """Return where everything goes, and how many bytes of scratch memory that takes."""
        runs: list[_Run] = []
        transfers: list[_Transfer] = []
        in_parts: dict[tuple[int, int], int] = {}  # where a block of a layer lies, of which more than one piece comes
        end_at = 0
        layers, blocks, skips, offsets, lengths = (
            column.tolist() for column in (batch.layers, batch.blocks, batch.skips, batch.offsets, batch.lengths)
        )
        for first, end, whole in self._bounds.runs(batch):
            block = (layers[first], blocks[first])
            at = -1 if whole else in_parts.get(block, -1)
            if at < 0:
                at = end_at
                if not whole or at % self._layers[block[0]].element_size():
                    at = -(-at // _ALIGNED_BYTES) * _ALIGNED_BYTES
                runs.append(_Run(block[0], first, end, at, whole))
                end_at = at + (end - first) * self._block_bytes(block[0])
                if not whole:
                    in_parts[block] = at
            self._add(transfers, at + skips[first], offsets[first], sum(lengths[first:end]))
        return runs, transfers, end_at

    @staticmethod
    def _add(transfers: list[_Transfer], at: int, offset: int, length: int) -> None:
        """Add a transfer, or make the last one longer. Cut it where a pinned piece ends."""
        if transfers:
            last = transfers[-1]
            if last.at + last.length == at and last.offset + last.length == offset:
                transfers.pop()
                at, offset, length = last.at, last.offset, last.length + length
        while length:
            part = min(length, PIECE_BYTES - offset % PIECE_BYTES)
            transfers.append(_Transfer(at, offset, part))
            at, offset, length = at + part, offset + part, length - part

    def _place(self, run: _Run, memory: torch.Tensor) -> torch.Tensor:
        """Return the run's blocks in scratch memory, [n, ...] as in the layer."""
        layer = self._layers[run.layer]
        count = run.end - run.first
        flat = memory[run.at : run.at + count * self._block_bytes(run.layer)]
        return flat.view(layer.dtype).view(count, *layer.shape[1:])

    def _gather(self, run: _Run, blocks: torch.Tensor, memory: torch.Tensor) -> None:
        torch.index_select(self._layers[run.layer], 0, blocks[run.first : run.end], out=self._place(run, memory))

    def _scatter(self, run: _Run, blocks: torch.Tensor, memory: torch.Tensor) -> None:
        self._layers[run.layer].index_copy_(0, blocks[run.first : run.end], self._place(run, memory))

    def _block_bytes(self, layer: int) -> int:
        return int(self._bounds.block_bytes[layer])
