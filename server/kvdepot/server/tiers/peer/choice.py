"""Which of the listed places are peers of a tier: those whose summaries have what is asked for, then by hash (ADR 85).

To exchange a peer costs a start of its workers. So it is done rarely, one at a time, and never while one is read from.

A *guest* is a place that joins for a lookup, because its summary has what no member has (ADR 86). It is one member more
than there are seats. If it has nothing, it leaves. Otherwise a useless member leaves for it, as soon as one may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from math import inf
from typing import Final

from kvdepot.server.tiers.peer.places import Place

EXCHANGE_SECONDS: Final = 5.0
"""At least between two exchanges, and so long a guest stays at least."""
GUESTS_AT_ONCE: Final = 4
GUEST_SECONDS: Final = 1.0
"""So many guests may come one after the other, and then one in so many seconds: each costs a start of workers."""
SHUNNED_SECONDS: Final = 30.0
"""A guest that had nothing, or did not answer, is not chosen again for so long, whatever its summary says."""


NAMED: Final = 0
"""The names of a guest that a request has named."""


class Guest(StrEnum):
    """What a guest had. The values are labels of counters."""

    USEFUL = "useful"  # something of what it was asked for
    USELESS = "useless"  # nothing, or it did not answer
    NAMED = "named"  # a request named it, so it may have something soon


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
        self.guest: Place | None = None
        """A member of which nobody knows yet whether it has something."""
        self._invited: dict[Place, tuple[float, int]] = {}  # since when, and for how many names
        self._shunned_until: dict[Place, float] = {}
        self._invites_from = -inf
        self.members: tuple[Place, ...] = ()

    @property
    def listed(self) -> tuple[Place, ...]:
        """All places, the first one by hash first."""
        return self._listed

    @property
    def full(self) -> bool:
        """Return whether all seats are taken, and that of a guest too."""
        return len(self.members) > self._most

    @property
    def invites(self) -> bool:
        """Return whether `invite` may return True now. Several lookups may have the same guest."""
        return self.guest is not None or (not self.full and self._invites_from <= self._clock())

    def why(self, place: Place) -> str:
        """Return why this place is a member."""
        if place in self._useful:
            return f"by summary: {self._useful[place]} names"
        if place not in self._invited:
            return "by hash"
        names = self._invited[place][1]
        return "by name" if names == NAMED else f"by lookup: {names} names"

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
        wanted = next((place for place in self._useful if place not in self.members and self._may_join(place)), None)
        if self.full and self.guest is None and (idle := self._idle()):
            self._take_out(idle[-1])
        if self.full:
            return True
        if wanted is None or not self._useless():
            return False
        if self._clock() < self._exchange_at + self._exchange_seconds:
            return True
        if idle := self._idle():
            self._exchange_at = self._clock()
            self._take_out(idle[-1])
            self.members = self._ordered({*self.members, wanted})
        return True

    def invite(self, place: Place, names: int) -> bool:
        """Have a place as a guest that may have so many names of a lookup. Return whether it is a member now."""
        if place in self.members:
            return True
        if self.guest is not None or not self.invites or not self._may_join(place):
            return False
        now = self._clock()
        credit = (GUESTS_AT_ONCE - 1) * GUEST_SECONDS
        self._invites_from = max(self._invites_from, now - credit) + GUEST_SECONDS
        self.guest = place
        self._invited[place] = now, names
        self.members = self._ordered({*self.members, place})
        return True

    def judge(self, *, useful: bool) -> None:
        """Note whether the guest has answered with something. Otherwise it leaves."""
        assert self.guest is not None
        place, self.guest = self.guest, None
        if useful:
            self._invited[place] = self._clock(), self._invited[place][1]  # its answer may have taken long
        else:
            self._shunned_until[place] = self._clock() + SHUNNED_SECONDS
            self._take_out(place)

    def _may_join(self, place: Place) -> bool:
        there = place in self._listed and place not in self._itself
        return there and self._shunned_until.get(place, -inf) <= self._clock()

    def _take_out(self, place: Place) -> None:
        self._invited.pop(place, None)
        self.members = tuple(one for one in self.members if one != place)

    def _idle(self) -> Sequence[Place]:
        """Return the useless members that may leave now, the last one by hash last."""
        since = self._clock() - self._exchange_seconds
        stays = {self.guest, *(place for place, (at, _) in self._invited.items() if at > since)}
        return [place for place in self._useless() if place not in stays and not self._busy(place)]

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
        self._invited = {place: how for place, how in self._invited.items() if place in members}
        self._shunned_until = {place: until for place, until in self._shunned_until.items() if place in there}
        if self.guest not in members:
            self.guest = None

    def _ordered(self, places: Iterable[Place]) -> tuple[Place, ...]:
        return tuple(sorted(places, key=self._order))
