"""Waiting for one descriptor, whatever its number: a child's are those that they are in the daemon."""

from __future__ import annotations

import select
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(file: HasFileno, seconds: float | None) -> bool:
    """Whether there is something to read, or its end, within this time; None: however long. select(2) ends at 1023."""
    waiting = select.poll()
    waiting.register(file.fileno(), select.POLLIN)
    return bool(waiting.poll(None if seconds is None else max(seconds, 0) * 1000))
