"""A device that does nothing until it is waited for: what reads too early, or uses memory again too early, shows.

Its queues are as late as they may be, one without the other. What a driver would copy by address, `memmove` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvdepot.client.copy.backend import Device, Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.driver import DESCRIPTORS_MAX
from kvdepot.client.copy.runs import Runs


@dataclass
class EngineWork:
    """What the engine has queued before a copy; `run_after` makes the copies' queues do it first."""

    work: Callable[[], None]
    done: bool = False

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.work()


@dataclass
class LateQueue:
    """`ran` of what was queued has been done."""

    work: list[Callable[[], None]] = field(default_factory=list)
    ran: int = 0
    marked: int = 0

    @property
    def queued(self) -> int:
        return self.ran + len(self.work)


Mark = tuple[Direction, int]


@dataclass
class LateDevice(Device):
    """Layers are CPU tensors. `waits` counts the host's waits; `lost` makes them fail, as a broken device does."""

    engine: EngineWork = field(default_factory=lambda: EngineWork(lambda: None))
    ways: frozenset[Way] = frozenset(Way)
    pins_refused: bool = False
    waits: int = 0
    lost: bool = False
    entered: bool = False
    left: bool = False
    pinned: list[int] = field(default_factory=list)
    transfers: list[tuple[bool, int]] = field(default_factory=list)  # pinned, runs
    shuffles: list[int] = field(default_factory=list)  # runs
    words: set[int] = field(default_factory=set)  # bytes: each size is a kernel to build
    taken: list[int] = field(default_factory=list)  # bytes of memory
    ran: int = 0  # batches, in both directions
    started: int = 0
    queues: dict[Direction, LateQueue] = field(default_factory=lambda: {one: LateQueue() for one in Direction})

    def enter(self) -> None:
        self.entered = True

    def leave(self) -> None:
        self.left = True

    def engine_mark(self) -> object:
        return self.engine

    def run_after(self, mark: object) -> None:
        assert isinstance(mark, EngineWork)
        for direction in Direction:
            self._queue(direction, mark.finish)

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        self._queue(direction, work)

    def _queue(self, direction: Direction, work: Callable[[], None]) -> None:
        self.queues[direction].work.append(work)

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        self.transfers.append((pinned, len(runs)))
        for part in runs.split(DESCRIPTORS_MAX):
            self._queue(direction, lambda part=part: moved(part))  # type: ignore[misc]

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        self.shuffles.append(len(runs))
        self.words.add(runs.word_bytes)
        table = self.numbers(np.stack([runs.sources, runs.targets, runs.lengths]))
        self._queue(direction, lambda: moved(Runs(*table.numpy())))

    def mark(self, direction: Direction) -> Mark:
        queue = self.queues[direction]
        if queue.queued > queue.marked:
            self._queue(direction, self._batch_done)
            self.started += 1
            queue.marked = queue.queued
        return direction, queue.queued

    def _batch_done(self) -> None:
        self.ran += 1

    def wait(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        direction, until = mark
        self.waits += 1
        if self.lost:
            raise RuntimeError("the device is lost")
        queue = self.queues[direction]
        while queue.ran < until:
            queue.work.pop(0)()
            queue.ran += 1

    def memory(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        self.taken.append(size_bytes)
        return torch.full((size_bytes,), 0xDD, dtype=torch.uint8)

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.array(values))

    def pin(self, host: memoryview) -> bool:
        if not self.pins_refused:
            self.pinned.append(len(host))
        return not self.pins_refused

    def unpin(self, host: memoryview) -> None:
        self.pinned.remove(len(host))

    @property
    def in_flight(self) -> int:
        """Batches that were queued and have not been done."""
        return self.started - self.ran


def moved(runs: Runs) -> None:
    """What a driver's batch call and the kernel do, in an order that neither promises."""
    for source, target, length in zip(
        runs.sources[::-1].tolist(), runs.targets[::-1].tolist(), runs.lengths[::-1].tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)
