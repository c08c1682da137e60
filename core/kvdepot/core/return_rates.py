"""Whether what was used often comes back more often after its eviction than what was used rarely."""

from __future__ import annotations

import math
from typing import Final

_PRIOR: Final = 8.0
"""Evictions that each class starts with, with the rate of return of both."""
_START, _START_RATE = 2.0, 0.15
"""Evictions of both, and their rate of return, before anything is known."""
_RATE_MAX: Final = 0.95
_MEAN_OF: Final = 20
"""Evictions that the mean of uses covers."""


class ReturnRates:
    """Counts evictions, and of these the ones that came back, in two classes: few uses (0) and many uses (1)."""

    def __init__(self) -> None:
        self._evicted = [0.0, 0.0]
        self._returned = [0.0, 0.0]
        self._mean_uses = 1.0

    def evict(self, uses: int) -> int:
        """Count an eviction. Return its class: many are more uses than the latest evicted ones had on average."""
        self._mean_uses += (uses - self._mean_uses) / _MEAN_OF
        many = int(uses > self._mean_uses)
        self._evicted[many] += 1
        return many

    def come_back(self, many: int) -> None:
        """Count the return of an eviction of this class."""
        self._returned[many] += 1

    def forget(self, kept: float) -> None:
        """Let all that was counted count by this factor only."""
        self._evicted = [kept * count for count in self._evicted]
        self._returned = [kept * count for count in self._returned]

    def errors(self) -> float:
        """Return by how many standard errors the rate of the many-used is higher than that of the others.

        The error is that of two classes with one rate (the pooled two-proportion z-test).
        """
        rate = (sum(self._returned) + _START * _START_RATE) / (sum(self._evicted) + _START)
        rate = min(rate, _RATE_MAX)  # one eviction may come back several times, as parts of it do
        few, many = (
            (returned + _PRIOR * rate) / (evicted + _PRIOR)
            for returned, evicted in zip(self._returned, self._evicted, strict=True)
        )
        spread = sum(1 / (evicted + _PRIOR) for evicted in self._evicted)
        return (many - few) / math.sqrt(rate * (1 - rate) * spread)
