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

    def enter(self) -> None:
        """Make the calling thread one that queues work as the engine does."""

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return what queues all of `work` at once, again and again, as an engine replays a CUDA graph."""

    def wait(self) -> None:
        """Wait for what this thread has queued, not for copies."""

    def synchronize(self) -> None:
        """Wait for all that was queued."""

    def close(self) -> None: ...


class Gpu:
    """A CUDA device."""

    stands_in = False

    def __init__(self, number: int = 0) -> None:
        self.device = torch.device("cuda", number)
        self.enter()
        self.name = torch.cuda.get_device_name(self.device)

    def copies(self) -> Device:
        return CudaDevice(self.device)

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # noqa: SLF001 - torch has no other delay

    def on_engine(self, work: Callable[[], object]) -> None:
        work()

    def enter(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # vLLM's workers do not use the default stream either

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        work()  # what is loaded at a first use is no part of a graph
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None: ...


def machine_of(*, stand_in: bool, number: int = 0) -> Machine:
    """Return the machine to try. The calling thread is the engine's."""
    if not stand_in:
        return Gpu(number)
    from benchmarks.day_one.stand_in import StandIn

    return StandIn()
