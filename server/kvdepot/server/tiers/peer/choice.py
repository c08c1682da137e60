"""Which of the listed places are peers of a tier: those whose summaries have what is asked for, then by hash (ADR 85).

To exchange a peer costs a start of its workers. So it is done rarely, one at a time, and never while one is read from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvdepot.server.tiers.peer.places import Place

EXCHANGE_SECONDS: Final = 5.0
"""At least between two exchanges."""


class Choice:
    """At most `most` of the places. Nothing is chosen before `list`."""

    def __init__(
        self, most: int, *, order: Callable[[Place], bytes], busy: Callable[[Place], bool],
        clock: Callable[[], float], exchange_seconds: float = EXCHANGE_SECONDS,
    ) -> None:  # fmt: skip
        """Choose nothing yet. `order`: of places by hash. `busy`: whether one is read from now."""
        self._most = most
        self._order = order
        self._busy = busy
        self._clock = clock
        self._exchange_seconds = exchange_seconds
        self._exchange_at = -exchange_seconds
        self._listed: tuple[Place, ...] = ()
        self._itself: frozenset[Place] = frozenset()
        self._useful: dict[Place, int] = {}
        self.members: tuple[Place, ...] = ()

    @property
    def listed(self) -> tuple[Place, ...]:
        """All places, the first one by hash first."""
        return self._listed

    @property
    def names(self) -> Mapping[Place, int]:
        """Return about how many names that were asked for lately each useful member adds."""
        return {place: self._useful[place] for place in self.members if place in self._useful}

    def list(self, places: Iterable[Place]) -> None:
        """Choose from these from now on."""
        self._listed = tuple(sorted(set(places), key=self._order))
        self._settle()

    def rank(self, useful: Iterable[tuple[Place, int]], itself: Iterable[Place]) -> None:
        """Prefer these, the most useful one first, and never choose this daemon itself."""
        self._itself = frozenset(itself)
        self._useful = {place: names for place, names in useful if place not in self._itself}
        self._settle()

    def exchange(self) -> bool:
        """Exchange one member if it is time. Return whether another exchange waits for its time."""
        wanted = next((place for place in self._useful if place in self._listed and place not in self.members), None)
        if wanted is None or not self._useless():
            return False
        if self._clock() < self._exchange_at + self._exchange_seconds:
            return True
        idle = [place for place in self._useless() if not self._busy(place)]
        if idle:
            self._exchange_at = self._clock()
            self.members = self._ordered({*self.members, wanted} - {idle[-1]})
        return True

    def _useless(self) -> tuple[Place, ...]:
        """Return the members that are not among the useful places, the last one by hash last."""
        return tuple(place for place in self.members if place not in self._useful)

    def _settle(self) -> None:
        """Let go of who has left, and fill the places that are free."""
        there = [place for place in self._listed if place not in self._itself]
        members = [place for place in self.members if place in there]
        for place in (*(one for one in self._useful if one in there), *there):
            if len(members) < self._most and place not in members:
                members.append(place)
        self.members = self._ordered(members)

    def _ordered(self, places: Iterable[Place]) -> tuple[Place, ...]:
        return tuple(sorted(places, key=self._order))
