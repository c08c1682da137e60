"""Boundaries with a load that has just failed: not offered to any request for a while (P8).

Otherwise every request with the same prefix could get a lookup that succeeds and a load that fails, and pay the load's
timeout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

NEGATIVE_SECONDS: Final = 2.0
"""Longer than a burst of requests with one prefix, and so short that a recovered daemon is used at once."""
ENTRIES_MAX: Final = 4096


class NegativeCache:
    """Chunk keys, each for `NEGATIVE_SECONDS`. Bounded; the oldest is forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> None:
        """Add a chunk key, or renew it."""
        self._until[key] = self._clock() + NEGATIVE_SECONDS
        self._until.move_to_end(key)
        if len(self._until) > ENTRIES_MAX:
            self._until.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        until = self._until.get(key)
        if until is not None and self._clock() >= until:
            del self._until[key]
            until = None
        return until is not None
