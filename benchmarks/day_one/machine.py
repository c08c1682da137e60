"""What the kit runs on: a GPU, or a stand-in for one in host memory.

The kit is the engine. It queues work for the device, and kvdepot's copies run beside that on queues of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from kvdepot.client.copy.backend import Device
from kvdepot.client.copy.cuda import CudaDevice

_CYCLES_A_SECOND = 1.7e9  # of a GPU's clock, about


class Machine(Protocol):
    """One device, and the queue that the engine uses of it. Made on the engine's thread."""

    name: str
    device: torch.device
    stands_in: bool

    def copies(self) -> Device:
        """Return a device for a copier of its own."""

    def delay(self, seconds: float) -> None:
        """Queue idle time: what the engine has queued behind it happens late."""

    def on_engine(self, work: Callable[[], object]) -> None:
        """Queue tensor operations."""

    def synchronize(self) -> None:
        """Wait for all that was queued."""

    def close(self) -> None: ...


class Gpu:
    """A CUDA device."""

    stands_in = False

    def __init__(self, number: int = 0) -> None:
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # vLLM's workers do not use the default stream either
        self.name = torch.cuda.get_device_name(self.device)

    def copies(self) -> Device:
        return CudaDevice(self.device)

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # noqa: SLF001 - torch has no other delay

    def on_engine(self, work: Callable[[], object]) -> None:
        work()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None: ...


def machine_of(*, stand_in: bool, number: int = 0) -> Machine:
    """Return the machine to try. The calling thread is the engine's."""
    if not stand_in:
        return Gpu(number)
    from benchmarks.day_one.stand_in import StandIn

    return StandIn()
