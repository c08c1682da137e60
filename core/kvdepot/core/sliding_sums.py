"""Sums by name over the last seconds, in steps of a twelfth of the window."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

_PARTS: Final = 12


class SlidingSums:
    """Whole numbers by name, of the last `seconds`. What leaves the window leaves it in steps of a twelfth."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._parts: deque[tuple[float, Counter[str]]] = deque([(now, Counter())])  # with its start, the earliest first
        self._closed: Counter[str] = Counter()  # of all parts but the last

    def add(self, now: float, **amounts: int) -> None:
        """Add to the part that is filled now. A time before its start counts there, too."""
        self._advance(now)
        self._parts[-1][1].update(amounts)

    def sums(self, now: float) -> Counter[str]:
        """Return the sum of each name. A name that was never added has 0."""
        self._advance(now)
        return self._closed + self._parts[-1][1]

    def seconds(self, now: float) -> float:
        """Return how many seconds the sums cover, at most those of the window."""
        self._advance(now)
        return min(now - self._parts[0][0], self._seconds)

    def _advance(self, now: float) -> None:
        each, parts = self._seconds / _PARTS, self._parts
        if now >= parts[-1][0] + each:
            self._closed.update(parts[-1][1])
            parts.append((now, Counter()))
        while len(parts) > 1 and parts[0][0] + each <= now - self._seconds:
            self._closed.subtract(parts.popleft()[1])
