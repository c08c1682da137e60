"""A disk tier without a device: it decides as one does, answers at once, and keeps no byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdepot.core.allocator import Extent
from kvdepot.core.report import TierStatus
from kvdepot.server.storage.base import (
    IoOutcome,
    Loan,
    ObjectName,
    Read,
    Stored,
    TierListener,
    TierTraits,
    Written,
)

_SLOTS = 1 << 10


class VirtualDisk:
    """Implements `Tier`. An object uses its own bytes, without a header."""

    def __init__(self, name: str, capacity_bytes: int, handles_max: int) -> None:
        self.name = name
        self.handles_max = handles_max
        self.traits = TierTraits()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.readable = self.writable = True
        self.budget_spent = False
        self.write_slots = _SLOTS
        self.written_bytes = 0
        self.read_bytes = 0
        self._sizes: dict[int, int] = {}  # by handle in use
        self._free: list[int] = []  # handles that were in use

    def cost_bytes(self, raw_bytes: int) -> int:
        return raw_bytes

    def too_large(self, raw_bytes: int) -> bool:
        return raw_bytes > self.capacity_bytes

    def start(self, listener: TierListener) -> None:
        """Find nothing."""

    def tick(self) -> None:
        """Do nothing: everything was answered."""

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,  # noqa: ARG002
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        size_bytes = name.raw_bytes
        if self.used_bytes + size_bytes > self.capacity_bytes or len(self._sizes) >= self.handles_max:
            done(Written(IoOutcome.NO_SPACE))
            return
        handle = self._free.pop() if self._free else len(self._sizes)
        self._sizes[handle] = size_bytes
        self.used_bytes += size_bytes
        self.written_bytes += size_bytes
        done(Written(IoOutcome.OK, handle, raw_sum or 0, size_bytes))

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]  # noqa: ARG002
    ) -> None:  # fmt: skip
        self.read_bytes += name.raw_bytes
        done(Read(IoOutcome.OK))

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:  # noqa: ARG002
        done(IoOutcome.OK)

    def drop(self, handle: int) -> None:
        self.used_bytes -= self._sizes.pop(handle)
        self._free.append(handle)

    def stored(self, handle: int) -> Stored:
        return Stored(self._sizes[handle], 0, None)

    async def close(self) -> None:
        """Nothing is to be finished."""

    def status(self) -> TierStatus:
        return TierStatus(self.name, "disk", self.capacity_bytes, self.capacity_bytes, self.used_bytes, state="ready")
