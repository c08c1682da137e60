"""What a device has to offer, so that `DeviceCopier` can copy its layers."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from kvdepot.client.copy.base import Direction
    from kvdepot.client.copy.runs import Runs


class Way(StrEnum):
    """How a batch travels."""

    BATCH = "batch"
    GATHER = "gather"
    TORCH = "torch"


class Device(Protocol):
    """A device, and two queues of it that only copies use. One thread, except `engine_mark`."""

    @property
    def ways(self) -> frozenset[Way]:
        """Return the ways that the device has: `Way.TORCH` always, the others after `enter`."""

    def enter(self) -> None:
        """Make the calling thread the one that copies."""

    def leave(self) -> None:
        """End the copying of this thread, which has waited for all copies."""

    def engine_mark(self) -> object:
        """Return a mark of what the engine has queued until now, on the calling thread's queue."""

    def run_after(self, mark: object) -> None:
        """Let all that is queued from now on, in both directions, begin after `mark`."""

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        """Queue the tensor operations of `work`; they may happen after the return."""

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        """Queue copies between the device and the host. `pinned`: the device reaches all of this host memory."""

    def shuffle(self, direction: Direction, runs: Runs) -> None:
        """Queue copies within the device, by one launch."""

    def mark(self, direction: Direction) -> object:
        """Return a mark of what was queued until now in one direction."""

    def wait(self, mark: object) -> None:
        """Return when it is done. Raises when the device cannot say so any more."""

    def memory(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] on the device, for use in this queue. `wait` before it is dropped."""

    def numbers(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Return int64 on the device. Called within `run`. The values are copied at once."""

    def pin(self, host: memoryview) -> bool:
        """Let the device reach whole pages of host memory directly. Return False if it cannot."""

    def unpin(self, host: memoryview) -> None: ...
