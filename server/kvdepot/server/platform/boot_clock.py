"""The clock for what others decide meanwhile: it runs while the machine sleeps, unlike CLOCK_MONOTONIC."""

from __future__ import annotations

import time


def boot_seconds() -> float:
    """Return a time that runs while the machine sleeps, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
