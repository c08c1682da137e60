"""The time of day as devices store it."""

from __future__ import annotations

from collections.abc import Callable


def unix_seconds(wall_clock: Callable[[], float]) -> int:
    """Return the whole seconds since 1970; 0 while the clock stands before it, as with a dead RTC battery.

    Formats and file names have no room for a sign.
    """
    return max(int(wall_clock()), 0)
