"""Who is in the group of a tier: it brings the list of places, the scout and the group together (ADR 85)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.server.io.scout_wire import Ranked
from kvdepot.server.platform.guard import Guard
from kvdepot.server.tiers.peer.choice import Choice
from kvdepot.server.tiers.peer.group import PeerGroup
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.scout import Scout

_LOOK_SECONDS: Final = 0.5
"""Between two looks whether an exchange may be made now."""


class Seats:
    """Everything runs on the loop's thread. No scout runs while all listed places have a seat."""

    def __init__(
        self, choice: Choice, group: PeerGroup, scout: Callable[[Callable[[Ranked], None]], Scout], *, most: int,
        loop: asyncio.AbstractEventLoop, joined: Callable[[], None], guard: Guard,
    ) -> None:  # fmt: skip
        """Take nobody in yet. `scout` makes one that calls what it is given. `joined`: there is another member."""
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
        members, names, listed = self._choice.members, self._choice.names, self._choice.listed
        why = {one: f"by summary: {names[one]} names" if one in names else "by hash" for one in members}
        there_is_a_choice = len(listed) > self._most
        joined = self._group.use(members, why if there_is_a_choice else {})
        if there_is_a_choice:
            self.scout.watch(listed, members)
        if joined:
            self._joined()
