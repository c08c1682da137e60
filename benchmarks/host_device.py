"""A device in host memory that does at once what it is given: rehearses what is written for a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kvdepot.client.copy.backend import Device, Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.runs import Runs


class HostDevice(Device):
    """Copies by memmove, run by run."""

    ways = frozenset(Way)

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def engine_mark(self) -> object: ...
    def run_after(self, mark: object) -> None: ...
    def mark(self, direction: Direction) -> object: ...
    def wait(self, mark: object) -> None: ...
    def unpin(self, host: memoryview) -> None: ...

    def run(self, _direction: Direction, work: Callable[[], None]) -> None:
        work()

    def transfer(self, _direction: Direction, runs: Runs, *, pinned: bool) -> None:  # noqa: ARG002
        for source, target, length in zip(
            runs.sources.tolist(), runs.targets.tolist(), runs.lengths.tolist(), strict=True
        ):
            ctypes.memmove(target, source, length)

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        self.transfer(direction, runs, pinned=True)

    def memory(self, _direction: Direction, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).clone()

    def pin(self, _host: memoryview) -> bool:
        return True
