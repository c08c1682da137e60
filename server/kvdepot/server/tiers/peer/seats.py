"""Who is in the group of a tier: it brings the list of places, the scout and the group together (ADR 85)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvdepot.server.io.scout_wire import Ranked, Useful
from kvdepot.server.platform.guard import Guard
from kvdepot.server.tiers.peer.choice import NAMED, Choice, Guest
from kvdepot.server.tiers.peer.group import PeerGroup
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.scout import Scout

_LOOK_SECONDS: Final = 0.5
"""Between two looks whether an exchange may be made now."""


class Seats:
    """Everything runs on the loop's thread. No scout runs while all listed places have a seat."""

    def __init__(
        self, choice: Choice, group: PeerGroup, scout: Callable[[Callable[[Ranked], None]], Scout], *, most: int,
        loop: asyncio.AbstractEventLoop, joined: Callable[[], None], count: Callable[[str, float], None], guard: Guard,
    ) -> None:  # fmt: skip
        """Take nobody in yet. `scout` makes one that calls what it is given. `joined`: there is another member.

        Counts `peer_guests.` and what they had.
        """
        self._count = count
        self._guard = guard
        self._seat_safely = guard.safe("choosing peers", self._seat)
        self._choice = choice
        self._group = group
        self._most = most
        self._loop = loop
        self._joined = joined
        self._timer: asyncio.TimerHandle | None = None
        self.scout = scout(guard.safe("choosing peers", self._ranked))

    def list(self, places: Sequence[Place]) -> None:
        """Choose from these from now on."""
        self._choice.list(places)
        if len(self._choice.listed) <= self._most:
            self.scout.close()
            self._choice.rank((), ())
        self._seat()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.scout.close()

    # Lookups, and guests for them

    def asked(self, files: Sequence[str]) -> None:
        """Tell the scout what a lookup asks for."""
        self.scout.want(files)

    def seek(self, files: Sequence[str], found: Callable[[Place | None], None]) -> None:
        """Have a place join as a guest that may have these. `found` is called once, soon: None if there is none."""
        if self._choice.invites:
            self.scout.find(files, partial(self._found, found))
        else:
            found(None)

    def _found(self, found: Callable[[Place | None], None], useful: Sequence[Useful]) -> None:
        found(self._guard.value("inviting a peer", None, self._invited, useful))

    def _invited(self, useful: Sequence[Useful]) -> Place | None:
        for one in useful:
            place = one.place.host, one.place.port
            if self._choice.invite(place, one.names):
                self._use()
                return place
        return None

    def named(self, source_id: int) -> bool:
        """Have the place with this arena join, because a request names it. Return whether it can be asked now.

        The engine there may still be storing. So its first answer does not count against it, as it would for a guest.
        """
        place = self.scout.place_of(source_id)
        if place is None:
            return False
        if place not in self._choice.members:
            if not self._choice.invite(place, NAMED):
                return False
            self._count(f"peer_guests.{Guest.NAMED}", 1)
            self._choice.judge(useful=True)
            self._seat()
        return self._group.expect(place, source_id)

    def judge(self, place: Place, useful: bool) -> None:
        """Note whether a place had something, if it is the guest: another lookup may have shown that already."""
        if place != self._choice.guest:
            return
        self._count(f"peer_guests.{Guest.USEFUL if useful else Guest.USELESS}", 1)
        self._choice.judge(useful=useful)
        self._seat()
        if useful:
            self._joined()

    def _ranked(self, ranked: Ranked) -> None:
        useful = [((one.place.host, one.place.port), one.names) for one in ranked.useful]
        self._choice.rank(useful, [(at.host, at.port) for at in ranked.itself])
        self._seat()

    def _seat(self) -> None:
        """Have the members that are chosen, and let the scout know them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._choice.exchange():
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._seat_safely)
        if self._use():
            self._joined()

    def _use(self) -> bool:
        """Let the group and the scout know who the members are. Return whether one of them is new."""
        choice = self._choice
        there_is_a_choice = len(choice.listed) > self._most
        why = {place: choice.why(place) for place in choice.members} if there_is_a_choice else {}
        joined = self._group.use(choice.members, why, spare=there_is_a_choice and not choice.full)
        if there_is_a_choice:
            self.scout.watch(choice.listed, choice.members)
        return joined
