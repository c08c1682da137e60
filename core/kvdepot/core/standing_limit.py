"""How long a unit may stay without a use, by what such units are worth next to what is evicted."""

from __future__ import annotations

import math
from typing import Final

_WORTHS_MIN, _WORTHS_MAX = 2.0, 32.0
"""The limits of the limit, in mean worths."""
_OLD_WORTHS: Final = 2.0
"""What was not used for so many mean worths is old, or ..."""
_OLD_SHARE: Final = 0.6
"""... for so large a part of the limit: else a low limit would leave nothing old to learn from."""
_RETURN: Final = 0.5
"""A return counts half a hit: of a prompt that comes back, up to two evictions do, and one unit is hit."""
_SIGNIFICANT: Final = 0.5
"""Standard errors (of a Poisson count) between the two before the limit moves."""
_LOWER, _RAISE = 0.7, 1.2
"""Factors of the limit at one look."""


class StandingLimit:
    """The limit of a standing (what a score is above the clock of the unit's last use), in mean worths.

    A use every few turns of the cache makes a standing of many mean worths right. If the workload changes, it keeps
    what nobody uses any more for as many turns. So two rates are compared: how often a place in memory is hit that an
    old unit has, and how often what was evicted comes back, which would have been hit in such a place.
    """

    def __init__(self) -> None:
        self.worths = _WORTHS_MAX
        self.old_worths = _OLD_WORTHS  # what was not used for longer is old
        self._seen = 0.0  # candidates, and of them the old ones
        self._old = 0.0
        self._hits = 0.0  # of old units
        self._returned = 0.0  # of what was evicted

    def see(self, *, old: bool) -> None:
        """Count a candidate. Call it for all candidates in turn."""
        self._seen += 1
        if old:
            self._old += 1

    def hit_old(self) -> None:
        """Count a hit of an old unit."""
        self._hits += 1

    def come_back(self) -> None:
        """Count the return of an eviction."""
        self._returned += 1

    def adapt(self, kept: float) -> None:
        """Move the limit, and let all that was counted count by the factor `kept` from now on."""
        expected = _RETURN * self._returned * self._old / max(self._seen, 1.0)  # were old units hit as often
        error = _SIGNIFICANT * math.sqrt(max(expected, self._hits) + 1)
        if expected > self._hits + error:
            self.worths = max(self.worths * _LOWER, _WORTHS_MIN)
        elif self._hits > expected + error:
            self.worths = min(self.worths * _RAISE, _WORTHS_MAX)
        self.old_worths = min(_OLD_WORTHS, _OLD_SHARE * self.worths)
        self._seen, self._old = kept * self._seen, kept * self._old
        self._hits, self._returned = kept * self._hits, kept * self._returned
