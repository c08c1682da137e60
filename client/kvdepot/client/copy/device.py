"""Copies for KV tensors on a device with memory of its own.

A batch becomes one table of runs (`LayerTable`), and goes one of three ways. Long runs go straight between the layers
and the arena, by one call of the driver. Short runs are gathered in scratch memory on the device by one launch, and
travel as one transfer for each run of the arena. Where a device has neither, torch's indexed operations do the same.

Each direction has a queue of its own: a load does not wait for a store. At most two batches are on their way in each.
States: nothing queued; one or two batches queued. `wait` returns to the first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from kvdepot.client.copy.backend import Device, Way
from kvdepot.client.copy.base import BATCH_BYTES, CopyError, Direction, heads
from kvdepot.client.copy.indexed import IndexedCopies
from kvdepot.client.copy.pinning import PIECE_BYTES, Pinnable, Pins
from kvdepot.client.copy.runs import Runs, address_of
from kvdepot.client.copy.self_test import prove_words, self_test
from kvdepot.client.copy.table import LayerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdepot.client.copy.base import Column, CopyBatch, CopyMemory
    from kvdepot.client.copy.table import CopyTable

BATCH_RUN_BYTES: Final = 28 << 10
"""Runs of this length and more go straight: below, a gather is faster than the driver's batch call (vLLM PR 42212)."""
_IN_FLIGHT_MAX: Final = 2
_ALIGNED_BYTES: Final = 16
_PADDING_BYTES: Final = 1 << 20
"""Of scratch memory: for more transfers than a batch has, each of which begins at an aligned address there."""


class _Queue:
    """Batches on their way in one direction, and the scratch memory that they take in turn."""

    def __init__(self, device: Device, direction: Direction) -> None:
        self._device = device
        self._direction = direction
        self._marks: deque[object] = deque()
        self._used = False  # since the last wait
        self._scratch: list[torch.Tensor | None] = [None] * _IN_FLIGHT_MAX
        self._turn = 0
        self._hosts: list[memoryview] = []  # what the batches are copied from or to

    def begin(self, host: memoryview | None = None) -> None:
        """Return when one more batch may be queued, from or to `host`."""
        while len(self._marks) >= _IN_FLIGHT_MAX:
            self._device.wait(self._marks[0])
            self._marks.popleft()
        self._used = True
        if host is not None:
            self._hosts.append(host)
        self._turn = (self._turn + 1) % _IN_FLIGHT_MAX

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Return memory that no batch on its way uses. Called in a batch that has begun."""
        memory = self._scratch[self._turn]
        if memory is None or len(memory) < size_bytes:
            self._scratch[self._turn] = None  # its memory may serve again
            memory = self._scratch[self._turn] = self._device.memory(self._direction, size_bytes)
        return memory

    def reserve(self, size_bytes: int) -> None:
        """Take all scratch memory at its final size. Nothing is on its way."""
        for turn in range(_IN_FLIGHT_MAX):
            self._scratch[turn] = None
            self._scratch[turn] = self._device.memory(self._direction, size_bytes)

    def end(self) -> None:
        """Mark the batch as queued."""
        self._marks.append(self._device.mark(self._direction))

    def wait(self) -> None:
        """Return when everything has been copied, a batch of which only a part could be queued included."""
        if self._used:
            self._device.wait(self._device.mark(self._direction))
            self._used = False
            self._marks.clear()
            self._hosts.clear()


class DeviceCopier:
    """Copies blocks of tensors on `device`. Each layer is a view [num_blocks, ...] of any dtype and stride.

    A block's bytes are its elements in the view's order, whatever its strides; padding between blocks is neither read
    nor written. The tensors must outlive the copier.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        device: Device,
        log: logging.Logger | None = None,
        *,
        way: Way | None = None,
        pin_in_background: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a rank's layers. Raise CopyError for a tensor that is not made of blocks.

        With `way` None batches travel by the length of their runs, and by what the device has.
        """
        self._device = device
        self._layers = layers
        self._log = log or logging.getLogger(__name__)
        self.way = way
        self._refused: set[Way] = set()
        self._table = LayerTable(layers)
        self._indexed = IndexedCopies(layers, self._table.bounds, device)
        self._queues = {direction: _Queue(device, direction) for direction in Direction}
        self._pins = Pins(device, self._log, clock, background=pin_in_background)

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of a layer, without padding."""
        return int(self._table.bounds.block_bytes[layer])

    def overlap(self, layers: Sequence[int], blocks: Column) -> bool:
        """See LayerTable."""
        return self._table.overlap(layers, blocks)

    def enter(self) -> None:
        """See BlockCopier."""
        self._device.enter()

    def prove(self, mark: object) -> None:
        """See BlockCopier: by each way that a batch may take here. A way that the device refuses is not used.

        No later batch takes memory or builds a kernel.
        """
        self.after(mark)
        self._device.wait(self._device.mark(Direction.LOAD))  # torch's own copies use another stream
        self._take_scratch()
        for way in Way:
            if not self._may_take(way):
                continue
            try:
                self_test(self, self._layers, way)
                if way is Way.GATHER:
                    prove_words(self._device, self._queues[Direction.LOAD].scratch(0))
            except CopyError:
                raise
            except Exception as error:
                if self.way is not None or way is Way.TORCH:
                    raise
                self._refused.add(way)
                self._log.warning("kvdepot: copies on this device do not use %s, which failed: %s", way, error)

    @property
    def ways(self) -> frozenset[Way]:
        """Return the ways that the device has and has not refused."""
        return self._device.ways - self._refused

    def _may_take(self, way: Way) -> bool:
        """Return whether a batch may go this way, by the setting and what the device has."""
        if way not in self.ways:
            return False
        if way is Way.TORCH:
            return self.way is Way.TORCH or Way.GATHER not in self.ways
        return self.way in (None, way) or (way is Way.GATHER and self.way is Way.BATCH)

    def _take_scratch(self) -> None:
        """Take scratch memory at its final size: not in the middle of a request.

        Also where long runs go straight. A batch that is not pinned goes by it, and so does a load that is read back.
        """
        block_bytes = int(self._table.bounds.block_bytes.max())
        for queue in self._queues.values():
            queue.reserve(BATCH_BYTES + block_bytes + _PADDING_BYTES)

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:
        """See BlockCopier. Reads back by torch's indexed operations, which share no address with the other ways."""
        read = np.empty(batch.size_bytes, dtype=np.uint8)
        there = np.frombuffer(arena.buffer, dtype=np.uint8)
        queue = self._queues[Direction.LOAD]
        queue.begin(read.data)
        packed = batch.end_to_end()
        self._run(Direction.LOAD, *self._indexed.copy(read.data, packed, Direction.STORE))
        queue.end()
        queue.wait()
        first = heads(batch.offsets[1:] == (batch.offsets + batch.lengths)[:-1])
        sizes = np.add.reduceat(batch.lengths, first)
        places = zip(packed.offsets[first].tolist(), batch.offsets[first].tolist(), sizes.tolist(), strict=True)
        return all(np.array_equal(read[at : at + size], there[offset : offset + size]) for at, offset, size in places)

    def zero(self, layers: Sequence[int], blocks: Column) -> None:
        """Zero these blocks of these layers, and wait for it."""
        queue = self._queues[Direction.LOAD]
        queue.begin()
        self._device.run(Direction.LOAD, self._indexed.zero(layers, blocks))
        queue.end()
        queue.wait()

    def release(self) -> None:
        """Wait, and unpin everything at the rate of the background: minutes for a large arena."""
        self.wait()
        never = threading.Event()
        while (pause := self._pins.prepare(None)) is not None and self._pins.has_former:
            never.wait(pause)

    def leave(self) -> None:
        """See BlockCopier."""
        self.release()
        self._device.leave()

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
        self._table.bounds.check(batch, len(host))
        table = self._table.table(batch, PIECE_BYTES)
        pinned = self._pins.touch(host, table.offsets)
        queue = self._queues[direction]
        queue.begin(host)
        match self._way_of(table, pinned=pinned):
            case Way.BATCH:
                places = table.offsets + address_of(host)
                self._device.transfer(direction, _runs(direction, table.addresses, places, table.lengths), pinned=True)
            case Way.GATHER:
                self._gather(table, address_of(host), direction, pinned=pinned)
            case Way.TORCH:
                work, size_bytes = self._indexed.copy(host, batch, direction)
                self._run(direction, work, size_bytes)
        queue.end()

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """See BlockCopier. In the queue of loads."""
        self._table.bounds.check_move(layers, sources, targets)
        if not len(layers) or not len(sources):
            return
        queue = self._queues[Direction.LOAD]
        queue.begin()
        if self.way in (None, Way.GATHER) and Way.GATHER in self.ways:
            self._device.shuffle(Direction.LOAD, self._table.moves(layers, sources, targets))
        else:
            self._run(Direction.LOAD, *self._indexed.move(layers, sources, targets))
        queue.end()

    def wait(self, direction: Direction | None = None) -> None:
        """See BlockCopier."""
        for one, queue in self._queues.items():
            if direction in (None, one):
                queue.wait()

    def prepare(self, arena: Pinnable | None, *, at_once: bool = False) -> float | None:
        """Pin or unpin a piece of the arena. What is not pinned is copied too, by way of memory of the driver."""
        return self._pins.pin_at_once(arena) if at_once else self._pins.prepare(arena)

    def _way_of(self, table: CopyTable, *, pinned: bool) -> Way:
        """Return how a batch travels. A batch call takes pinned memory only."""
        ways = self.ways
        wanted = self.way
        if wanted is None:
            middle = len(table) // 2
            long = np.partition(table.lengths, middle)[middle] >= BATCH_RUN_BYTES
            wanted = Way.BATCH if long and pinned and Way.BATCH in ways else Way.GATHER
        if wanted is Way.BATCH and not (pinned and Way.BATCH in ways):
            wanted = Way.GATHER
        return wanted if wanted in ways else Way.TORCH

    def _gather(self, table: CopyTable, base: int, direction: Direction, *, pinned: bool) -> None:
        """Copy by way of scratch memory, in which runs that follow each other in the arena do so too."""
        ends = table.offsets + table.lengths
        first = heads((table.offsets[1:] == ends[:-1]) & (table.offsets[1:] % PIECE_BYTES != 0))
        sizes = np.add.reduceat(table.lengths, first)
        room = -(-sizes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        begins = np.cumsum(room) - room
        memory = self._queues[direction].scratch(int(room.sum()))
        begins += memory.data_ptr()
        shifts = np.repeat(begins - table.offsets[first], np.diff([*first, len(table)]))
        there = table.offsets + shifts
        transfers = _runs(direction, begins, table.offsets[first] + base, sizes)
        shuffled = _runs(direction, table.addresses, there, table.lengths)
        if direction is Direction.STORE:
            self._device.shuffle(direction, shuffled)
            self._device.transfer(direction, transfers, pinned=pinned)
        else:
            self._device.transfer(direction, transfers, pinned=pinned)
            self._device.shuffle(direction, shuffled)

    def _run(self, direction: Direction, work: Callable[[torch.Tensor], None], size_bytes: int) -> None:
        """Queue tensor operations on scratch memory."""
        memory = self._queues[direction].scratch(size_bytes)

        def run() -> None:
            with torch.inference_mode():  # the engine's tensors may have been made in it, and only in it be written
                work(memory)

        self._device.run(direction, run)


def _runs(direction: Direction, device: Column, other: Column, lengths: Column) -> Runs:
    """Return runs from `device` to `other` for a store, and the other way round for a load."""
    return Runs(device, other, lengths) if direction is Direction.STORE else Runs(other, device, lengths)
