"""What this node may write, as its coordinator says, and what it has begun (ADR 0018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES, object_bytes

OVERHEAD_BYTES: Final = 4 * PAGE_BYTES
"""Of a file apart from its bytes, at most: its entry in a folder that grows, two new folders, a `namespace.json`."""
OBJECT_SHARE: Final = 8
"""Of the capacity: an object that may take more is not written. Several nodes may each be waiting for room for one."""


def file_cost_bytes(stored_bytes: int) -> int:
    """Return the bytes that an object uses of the directory's capacity at most."""
    return object_bytes(stored_bytes) + OVERHEAD_BYTES


class QuotaGrant:
    """What this node may still write. A write takes the most it may cost at its begin, and its real cost at its end."""

    def __init__(self, boot_clock: Callable[[], float]) -> None:
        """Begin without room. `boot_clock` runs while the machine sleeps, as that of other nodes does."""
        self._boot_clock = boot_clock
        self.limit_bytes = 0
        """Of all writes of this daemon run."""
        self.until: float | None = None
        """By `boot_clock`: after it, other nodes may have what is left. None: they cannot."""
        self.over_bytes = 0
        """What writes that are over have cost."""
        self._begun_bytes = 0
        self._wanted_bytes = 1  # of what was refused

    @property
    def left_bytes(self) -> int:
        if self.until is not None and self._boot_clock() > self.until:
            return 0
        return self.limit_bytes - self.over_bytes - self._begun_bytes

    @property
    def suffices(self) -> bool:
        """Return whether there is enough for what was refused last."""
        return self.left_bytes >= self._wanted_bytes

    @property
    def wanted_bytes(self) -> int:
        """Return the bytes that would be enough for what was refused, with what has begun. 0: there is enough."""
        return 0 if self.suffices else self._begun_bytes + self._wanted_bytes

    def begin(self, cost_bytes: int) -> bool:
        """Begin a write. Return False if it is refused; nothing is taken then."""
        if cost_bytes > self.left_bytes:
            self._wanted_bytes = cost_bytes
            return False
        self._wanted_bytes = 1
        self._begun_bytes += cost_bytes
        return True

    def end(self, cost_bytes: int, spent_bytes: int) -> None:
        """End a write. `cost_bytes`: as it began. `spent_bytes`: what it did cost, or may have cost if it failed."""
        self._begun_bytes -= cost_bytes
        self.over_bytes += spent_bytes
