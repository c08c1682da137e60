"""Token buckets: how often each user may do what costs the host much."""

from __future__ import annotations

from collections.abc import Callable


class TokenBuckets:
    """A bucket for each key, full at first. A bucket that is full again is forgotten, so few are kept."""

    def __init__(self, *, per_second: float, burst: int, clock: Callable[[], float]) -> None:
        """Make buckets of `burst` tokens that each gain `per_second` of them."""
        self._per_second = per_second
        self._clock = clock
        self.burst = burst
        self._full_at: dict[int, float] = {}  # by key

    def take(self, key: int) -> bool:
        """Take a token. Return False if there is none."""
        now = self._clock()
        self._full_at = {one: at for one, at in self._full_at.items() if at > now}
        full_at = self._full_at.get(key, now) + 1 / self._per_second
        if full_at > now + self.burst / self._per_second:
            return False
        self._full_at[key] = full_at
        return True
