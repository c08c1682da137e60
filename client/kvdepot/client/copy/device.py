"""Copies for KV tensors on a device with memory of its own.

A batch goes by way of scratch memory on the device, in which its pieces lie in the arena's order: blocks are gathered
into it (or scattered out of it) by one indexed operation for each run of a layer's blocks, and all that lies end to
end in the arena too is one transfer. The device's queue alone orders them. There are two pieces of scratch memory: one
batch is worked out and queued here while the one before travels, and no more than two are ever on their way.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from kvdepot.client.copy.base import Bounds, CopyError, Direction

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, Column, CopyBatch, CopyMemory

PIN_PIECE_BYTES: Final = 32 << 20
"""Pinned at once, some milliseconds in which the engine's thread may wait for the driver. No transfer crosses the end
of a piece: a driver refuses a transfer over memory that was pinned in two calls."""
PREPARE_AGAIN_SECONDS: Final = 0.5
_BUFFERS: Final = 2
_ALIGNED_BYTES: Final = 16
_NUMBERS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes


class Device(Protocol):
    """A device and a queue of it that only copies use. One thread, except `engine_mark`."""

    def engine_mark(self) -> object:
        """What the engine has queued until now, on the calling thread's queue."""

    def run_after(self, mark: object) -> None:
        """What is run from now on begins after `mark`."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue the tensor operations of `work`; they may happen after the return."""

    def mark(self) -> object:
        """What was run until now."""

    def wait(self, mark: object) -> None:
        """Return when it is done. Raises when the device cannot say so any more."""

    def memory(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes] on the device, for use in `run`; `wait` before it is dropped."""

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """int64 on the device. Within `run`; the values are taken at once."""

    def pin(self, host: memoryview) -> bool:
        """Let the device reach whole pages of host memory by itself. False: it will not."""

    def unpin(self, host: memoryview) -> None: ...


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


def _as_numbers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes as the largest whole numbers that fit: an indexed operation changes no bit, and has fewer to move.

    Raises CopyError.
    """
    own = layer.element_size()
    if layer.dim() < 1 or own not in _NUMBERS:
        raise CopyError(f"a layer of {layer.dtype} with {layer.dim()} dimensions; this copies [num_blocks, ...]")
    if layer.dim() > 1 and layer.stride(-1) == 1:
        places = (layer.shape[-1], layer.storage_offset(), *layer.stride()[:-1])
        for size, dtype in _NUMBERS.items():
            if size > own and not layer.data_ptr() % size and not any(place * own % size for place in places):
                return layer.view(dtype)
    return layer.view(_NUMBERS[own])


class _Scratch:
    """Device memory for one batch; `busy` is the mark after which it is free."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.busy: object = None


class DeviceCopier:
    """Copies blocks of tensors on `device`. Each layer is a view [num_blocks, ...] of any dtype and stride.

    A block's bytes are its elements in the view's order, whatever its strides; padding between blocks is neither read
    nor written. The tensors must outlive the copier.
    """

    def __init__(self, layers: Sequence[torch.Tensor], device: Device, log: logging.Logger | None = None) -> None:
        """Raises CopyError for a layer that is none."""
        self._device = device
        self._log = log or logging.getLogger(__name__)
        self._layers = [_as_numbers(layer) for layer in layers]
        self._bounds = Bounds(
            np.array([len(layer) for layer in layers], dtype=np.int64),
            np.array([layer.element_size() * math.prod(layer.shape[1:]) for layer in layers], dtype=np.int64),
        )
        self._scratch = itertools.cycle([_Scratch() for _ in range(_BUFFERS)])
        self._started = False  # something may be on its way,
        self._hosts: list[memoryview] = []  # to or from this memory
        self._pinned: list[memoryview] = []  # pieces of the arena with this id, in order
        self._pinned_arena: int | None = None
        self._refused = False  # another piece of it

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        return int(self._bounds.block_bytes[layer])

    @property
    def pinned_bytes(self) -> int:
        """How much of the arena the device reaches by itself."""
        return sum(map(len, self._pinned))

    def mark(self) -> object:
        """See BlockCopier."""
        return self._device.engine_mark()

    def after(self, mark: object) -> None:
        """See BlockCopier."""
        self._device.run_after(mark)

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """Start copying one batch. Waits while two are on their way. Raises CopyError before any byte moved."""
        if not len(batch):
            return
        host = arena.buffer
        self._bounds.check(batch, arena.data_offset, len(host))
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

        self._hosts.append(host)
        self._run(store if direction is Direction.STORE else load, size_bytes)

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """See BlockCopier. By way of scratch memory, layer after layer."""
        self._bounds.check_move(layers, sources, targets)
        if not layers or not len(sources):
            return
        runs = [_Run(layer, 0, len(sources), 0, whole=True) for layer in layers]

        def work(memory: torch.Tensor) -> None:
            from_blocks, to_blocks = self._device.numbers(sources), self._device.numbers(targets)
            for run in runs:
                self._gather(run, from_blocks, memory)
                self._scatter(run, to_blocks, memory)

        self._run(work, len(sources) * max(map(self.block_bytes, layers)))

    def wait(self) -> None:
        """See BlockCopier."""
        if self._started:
            self._device.wait(self._device.mark())
            self._started = False
            self._hosts.clear()

    def prepare(self, arena: Arena | None) -> float | None:
        """Pin a piece of the arena. What is not pinned is copied too, by way of memory of the driver."""
        if arena is None or arena.arena_id != self._pinned_arena:
            self._unpin()
        if arena is None:
            return PREPARE_AGAIN_SECONDS
        there = arena.pinnable
        begin = len(self._pinned) * PIN_PIECE_BYTES
        end = min(begin + PIN_PIECE_BYTES, arena.size_bytes)
        if self._refused or begin >= end or len(there) < end:
            return PREPARE_AGAIN_SECONDS  # or there is another arena by then
        piece = there[begin:end]
        self._pinned_arena = arena.arena_id
        self._refused = not self._device.pin(piece)
        if self._refused:
            pinned, all_bytes = self.pinned_bytes, arena.size_bytes
            self._log.warning("kvdepot: %d of the arena's %d bytes can be pinned; copies are slower", pinned, all_bytes)
        else:
            self._pinned.append(piece)
        return 0.0

    def _unpin(self) -> None:
        """Let go of what is pinned, once nothing travels to or from it."""
        if self._pinned:
            self.wait()
        while self._pinned:
            self._device.unpin(self._pinned.pop())
        self._pinned_arena, self._refused = None, False

    def _run(self, work: Callable[[torch.Tensor], None], size_bytes: int) -> None:
        """Queue `work` on the next scratch memory, once that is free."""
        scratch = next(self._scratch)
        if scratch.busy is not None:
            self._device.wait(scratch.busy)
        if scratch.tensor is None or len(scratch.tensor) < size_bytes:
            scratch.tensor = None  # its memory may serve again
            scratch.tensor = self._device.memory(size_bytes)
        memory = scratch.tensor
        self._started = True

        def run() -> None:
            with torch.inference_mode():  # the engine's tensors may have been made in it, and only in it be written
                work(memory)

        self._device.run(run)
        scratch.busy = self._device.mark()

    def _plan(self, batch: CopyBatch) -> tuple[list[_Run], list[_Transfer], int]:
        """Where everything goes, and how many bytes of scratch memory that takes."""
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
                end_at = at + (end - first) * self.block_bytes(block[0])
                if not whole:
                    in_parts[block] = at
            self._add(transfers, at + skips[first], offsets[first], sum(lengths[first:end]))
        return runs, transfers, end_at

    @staticmethod
    def _add(transfers: list[_Transfer], at: int, offset: int, length: int) -> None:
        """One more transfer, or the last one longer; cut where a pinned piece ends."""
        if transfers:
            last = transfers[-1]
            if last.at + last.length == at and last.offset + last.length == offset:
                transfers.pop()
                at, offset, length = last.at, last.offset, last.length + length
        while length:
            part = min(length, PIN_PIECE_BYTES - offset % PIN_PIECE_BYTES)
            transfers.append(_Transfer(at, offset, part))
            at, offset, length = at + part, offset + part, length - part

    def _place(self, run: _Run, memory: torch.Tensor) -> torch.Tensor:
        """The run's blocks in scratch memory, [n, ...] as in the layer."""
        layer = self._layers[run.layer]
        count = run.end - run.first
        flat = memory[run.at : run.at + count * self.block_bytes(run.layer)]
        return flat.view(layer.dtype).view(count, *layer.shape[1:])

    def _gather(self, run: _Run, blocks: torch.Tensor, memory: torch.Tensor) -> None:
        torch.index_select(self._layers[run.layer], 0, blocks[run.first : run.end], out=self._place(run, memory))

    def _scatter(self, run: _Run, blocks: torch.Tensor, memory: torch.Tensor) -> None:
        self._layers[run.layer].index_copy_(0, blocks[run.first : run.end], self._place(run, memory))
