"""A device that does nothing until it is waited for: what reads too early, or uses memory again too early, shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvdepot.client.copy.device import Device


@dataclass
class EngineWork:
    """What the engine has queued before a copy; `run_after` makes the copies' queue do it first."""

    work: Callable[[], None]
    done: bool = False

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self.work()


@dataclass
class LateDevice(Device):
    """Layers are CPU tensors. `waits` counts the host's waits; `lost` makes them fail, as a broken device does."""

    engine: EngineWork = field(default_factory=lambda: EngineWork(lambda: None))
    pins_refused: bool = False
    waits: int = 0
    lost: bool = False
    pinned: list[int] = field(default_factory=list)
    ran: int = 0
    _queue: list[Callable[[], None]] = field(default_factory=list)
    _queued: int = 0

    def engine_mark(self) -> object:
        return self.engine

    def run_after(self, mark: object) -> None:
        assert isinstance(mark, EngineWork)
        self.run(mark.finish)

    def run(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._queued += 1

    def mark(self) -> object:
        return self._queued

    def wait(self, mark: object) -> None:
        assert isinstance(mark, int)
        self.waits += 1
        if self.lost:
            raise RuntimeError("the device is lost")
        while self.ran < mark:
            self._queue.pop(0)()
            self.ran += 1

    def memory(self, size_bytes: int) -> torch.Tensor:
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
        return self._queued - self.ran
