"""How much may be used a day (UTC): bytes that a device's endurance allows, requests and bytes that cost money."""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.server.tiers.wall_time import unix_seconds

_DAY_SECONDS = 86_400


class DailyBudget:
    """Counts what is used this day, within a limit or without one.

    `name`: of what is counted, for people, such as "write budget".
    """

    def __init__(self, name: str, limit: int | None, wall_clock: Callable[[], float]) -> None:
        self._name = name
        self._limit = limit
        self._wall_clock = wall_clock
        self._day = 0
        self._used = 0
        self._refused = False

    @property
    def used(self) -> int:
        """Return what was used today."""
        self._turn()
        return self._used

    @property
    def spent(self) -> bool:
        return not self.allows(1) or self._refused

    @property
    def reason(self) -> str:
        """Return why nothing more is done; empty unless the budget is spent."""
        return f"the {self._name} of this day is spent" if self.spent else ""

    def allows(self, amount: int) -> bool:
        """Return whether the limit allows that much more."""
        return self._limit is None or self.used + amount <= self._limit

    def refuse(self) -> None:
        """Count as spent although less would be allowed, until the day ends or something is taken back."""
        self._turn()
        self._refused = True

    def spend(self, amount: int) -> None:
        """Count a use. What is taken back has a negative amount, and may be of the day before."""
        self._turn()
        self._refused = self._refused and amount >= 0
        self._used = max(self._used + amount, 0)

    def recover(self, day: int, used: int) -> None:
        """Take over a count of a day that was kept. If this process has itself counted more today, its count stays."""
        self._turn()
        if day == self._day:
            self._used = max(self._used, used)

    def _turn(self) -> None:
        day = unix_seconds(self._wall_clock) // _DAY_SECONDS
        if day != self._day:
            self._day, self._used, self._refused = day, 0, False
