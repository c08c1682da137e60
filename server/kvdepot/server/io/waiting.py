"""Waiting for one descriptor, whatever its number: a child's are those that they are in the daemon."""

from __future__ import annotations

import select
from typing import Protocol


class HasFileno(Protocol):
    """A file object, a socket, or whatever else has a descriptor."""

    def fileno(self) -> int: ...


def readable(file: HasFileno, seconds: float | None) -> bool:
    """Return whether there is something to read, or the end, within this time. None: wait as long as it takes.

    This uses poll(2): select(2) ends at descriptor 1023.
    """
    waiting = select.poll()
    waiting.register(file.fileno(), select.POLLIN)
    return bool(waiting.poll(None if seconds is None else max(seconds, 0) * 1000))
