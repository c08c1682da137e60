"""How many bytes may be written a day (UTC): what a device's endurance allows."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.server.tiers.wall_time import unix_seconds

_DAY_SECONDS = 86_400


class WriteBudget:
    """Counts every write of this day; what the journal knows of it survives a restart."""

    def __init__(self, limit_bytes: int | None, wall_clock: Callable[[], float]) -> None:
        self._limit_bytes = limit_bytes
        self._wall_clock = wall_clock
        self._day = 0
        self._bytes = 0

    @property
    def written_bytes(self) -> int:
        """Return the bytes written today."""
        self._turn()
        return self._bytes

    @property
    def spent(self) -> bool:
        return self._limit_bytes is not None and self.written_bytes >= self._limit_bytes

    @property
    def reason(self) -> str:
        """Return why nothing is written; empty unless the budget is spent."""
        return "the write budget of this day is spent" if self.spent else ""

    def spend(self, size_bytes: int) -> None:
        self._turn()
        self._bytes += size_bytes

    def recover(self, day: int, size_bytes: int) -> None:
        """Take over the index's count for a day. If this process has itself counted more today, its count stays."""
        self._turn()
        if day == self._day:
            self._bytes = max(self._bytes, size_bytes)

    def _turn(self) -> None:
        day = unix_seconds(self._wall_clock) // _DAY_SECONDS
        if day != self._day:
            self._day, self._bytes = day, 0
