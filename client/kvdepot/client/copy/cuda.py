"""A GPU as `DeviceCopier` uses it: two streams of its own, events, pinned host memory. NVIDIA's, and AMD's by HIP.

torch's interfaces for any accelerator do what they can. CUDA's own are left where those have nothing: streams that the
driver made, and events whose wait gives the core away. The rest is the driver's (`driver.py`): pinning, batch calls,
capture modes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from kvdepot.client.copy.backend import Device, Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.driver import ANY_ORDER, STREAM_ORDER, Driver, load_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.copy.runs import Runs

_ORDERS: Final = {Direction.STORE: STREAM_ORDER, Direction.LOAD: ANY_ORDER}
"""A store's source is what the engine has just written; a load's has been there since before its lookup."""


class CudaDevice(Device):
    """`device` is that of the layers. All calls but `engine_mark` come from the thread that called `enter`.

    That thread sets its device once. Without that, a rank's copies on another device than the first would make a
    context there, of half a GiB. It also captures in the relaxed mode: in the default one, pinning, waiting and
    allocating here would break a graph that the engine captures meanwhile.

    torch and Triton take the stream from the thread, and no argument says another one. So `run` and `shuffle` enter the
    direction's stream, once a batch. A batch call, and a copy of the driver, name it instead.
    """

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device = device
        self._driver = driver
        self._handles: list[int] = []
        self._streams: dict[Direction, Any] = {}
        self._move: Callable[[Any, int, int], None] | None = None

    @property
    def ways(self) -> frozenset[Way]:
        """See Device."""
        batches = self._driver is not None and self._driver.has_batches
        return frozenset([Way.TORCH] + [Way.BATCH] * batches + [Way.GATHER] * (self._move is not None))

    def enter(self) -> None:
        """Set the thread's device and capture mode, and make the streams. Raise OSError without a driver."""
        torch.accelerator.set_device_index(self._device)
        if self._driver is None:
            self._driver = load_driver(hip=torch.version.hip is not None)
        self._driver.relax_capture()
        for direction in Direction:
            # Not one of torch's, of which there are 32 for everybody: the engine may have the same.
            self._handles.append(self._driver.stream())
            self._streams[direction] = torch.cuda.ExternalStream(self._handles[-1], self._device)
        try:
            from kvdepot.client.copy.gather import move
        except ImportError:
            return  # without Triton torch's own operations do it
        self._move = move

    def leave(self) -> None:
        """See Device."""
        self._streams.clear()
        while self._handles and self._driver is not None:
            self._driver.destroy_stream(self._handles.pop())

    def engine_mark(self) -> torch.Event:
        """Return an event after all that is queued on the calling thread's current stream."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def run_after(self, mark: Any) -> None:
        """Let the streams wait for the event. This thread does not wait."""
        for stream in self._streams.values():
            stream.wait_event(mark)

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        """Launch on the direction's stream."""
        with self._streams[direction]:
            work()

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        """Queue all runs by one call if the driver has it, else by a call a run. Raise DriverError if it refuses."""
        assert self._driver is not None
        stream = self._streams[direction].cuda_stream
        if pinned and self._driver.has_batches:
            self._driver.copy_batch(runs, stream, _ORDERS[direction])
        else:
            self._driver.copy(runs, stream, to_host=direction is Direction.STORE)

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        """Launch a Triton kernel once for all runs."""
        assert self._move is not None
        with self._streams[direction]:
            table = self.numbers(np.stack([runs.sources, runs.targets, runs.lengths]))
            self._move(table, len(runs), runs.word_bytes)

    def mark(self, direction: Direction) -> torch.cuda.Event:
        """Return an event after all that was queued."""
        # Without `blocking` a wait takes a whole core. torch.Event has the argument too, and takes no notice of it.
        event = torch.cuda.Event(blocking=True)
        event.record(self._streams[direction])
        return event

    def wait(self, mark: Any) -> None:
        """Wait for the event. Raise torch.AcceleratorError after a failure: nothing proves that copies have ended.

        A device that hangs holds the thread for ever: only the end of the copy, or of the process, ends a write.
        """
        mark.synchronize()

    def memory(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        """Take memory from torch's allocator, for this stream. Dropped memory serves again after its last use."""
        with self._streams[direction]:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Copy numbers by way of torch's pinned memory. From other memory, this call would wait for the queue."""
        there = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return there.to(self._device, non_blocking=True)

    def pin(self, host: memoryview) -> bool:
        """Pin memory. Return False if the driver refuses, as without room for its page tables: copies are slower."""
        assert self._driver is not None
        return self._driver.register(host)

    def unpin(self, host: memoryview) -> None:
        """Unpin memory. The caller has waited for every transfer to it."""
        assert self._driver is not None
        self._driver.unregister(host)
