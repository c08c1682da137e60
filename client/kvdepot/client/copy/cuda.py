"""A CUDA device as `DeviceCopier` uses it: a stream of its own, events, pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kvdepot.client.copy.device import Device


class CudaDevice(Device):
    """`device` is that of the layers. Made before the engine serves; its first use may be on another thread.

    Nothing here may run while CUDA graphs are captured, which refuse allocations by any thread: the copying thread
    begins with the first step's message, after all of that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def engine_mark(self) -> torch.cuda.Event:
        """An event behind all that is queued on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def run_after(self, mark: Any) -> None:
        """The stream waits for the event; this thread does not."""
        self._stream.wait_event(mark)

    def run(self, work: Callable[[], None]) -> None:
        """Launch on the stream. Scratch memory made here belongs to it too."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        """An event behind what was launched."""
        event = torch.cuda.Event(blocking=True)  # or waiting for it would take a whole core
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        """Raises torch.AcceleratorError once the device has failed: then nothing proves that a copy has ended."""
        mark.synchronize()

    def memory(self, size_bytes: int) -> torch.Tensor:
        """From torch's allocator, for this stream: what was dropped is used again behind what still reads it."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """By way of pinned memory of torch's, used again only behind this transfer: from any other, this would wait."""
        there = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return there.to(self._device, non_blocking=True)

    def pin(self, host: memoryview) -> bool:
        """False where the driver refuses, as under a limit of locked memory: copies then take a second way."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            error = torch.cuda.cudart().cudaHostRegister(_address(host), len(host), 0)
            if error.value == 0:
                return True
            with contextlib.suppress(RuntimeError):  # the next launch of this thread raises the error again, once
                torch.zeros(1, device=self._device)
            return False

    def unpin(self, host: memoryview) -> None:
        """The caller has waited for every transfer to it."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(_address(host))


def _address(host: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))
