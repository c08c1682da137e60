"""The source's daemon gathers for summaries which chunks it could lend (ADR 85).

It does so in slices between which the loop does other things, rarely, and only when a peer asks. The process that sends
makes the filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from kvdepot.server.depot.loads.peer_leases import PeerChunks, PeerLeases
from kvdepot.server.io.peer_wire import Gathered, SummaryWords
from kvdepot.server.platform.guard import Guard
from kvdepot.server.platform.paced import Paced

GATHER_SECONDS: Final = 30.0
"""At most so often for each tenant. A summary is of some use for longer: most conversations last for minutes."""
SLICE: Final = 1 << 13
"""Places that are looked at before the loop does something else: 1 ms, or 1.5 ms with many disks."""
_UNSENT_SECONDS: Final = 0.01
"""Between two looks whether the process has taken in a slice."""
_Done = Callable[[Gathered], None]


class PeerSummaries:
    """What is sent to one process after another. Everything runs on the loop's thread."""

    def __init__(
        self, leases: PeerLeases, send: Callable[[SummaryWords], None], *, unsent: Callable[[], bool], arena_id: int,
        questions: Paced, loop: asyncio.AbstractEventLoop, guard: Guard, every_seconds: float,
    ) -> None:  # fmt: skip
        """Gather nothing yet.

        `unsent`: whether the process has not yet taken in all that was sent. `questions`: what slices share their part
        of the loop's time with.
        """
        self._unsent = unsent
        self._leases = leases
        self._send = send
        self._arena_id = arena_id
        self._questions = questions
        self._loop = loop
        self._guard = guard
        self._every_seconds = every_seconds
        self._numbers: dict[str | None, int] = {}  # of tenants, for the process
        self._gathered_at: dict[int, float] = {}
        self._waiting: dict[int, list[_Done]] = {}  # for what is being gathered
        self._run = 0

    def ask(self, tenant: str | None, done: _Done) -> bool:
        """Call `done` when the process has all words of the tenant. Return whether they are gathered for this."""
        number = self._numbers.setdefault(tenant, len(self._numbers))
        if number in self._waiting:
            self._waiting[number].append(done)
            return False
        if self._loop.time() < self._gathered_at.get(number, -self._every_seconds) + self._every_seconds:
            done(Gathered(number, self._arena_id))
            return False
        self._waiting[number] = [done]
        self._slice(self._run, number, self._leases.chunks(tenant), 0)
        return True

    def forget(self) -> None:
        """Gather again for the next process: the one of before has ended."""
        self._run += 1
        self._gathered_at.clear()
        self._waiting.clear()

    def _slice(self, run: int, number: int, chunks: PeerChunks, start: int) -> None:
        if run == self._run and not self._guard.call("peers", self._gather, run, number, chunks, start):
            self._waiting.pop(number, None)  # who waits hears nothing, and asks again later

    def _gather(self, run: int, number: int, chunks: PeerChunks, start: int) -> None:
        stop = min(start + SLICE, chunks.places)
        last = stop == chunks.places
        self._send(SummaryWords(number, chunks.words(start, stop).tobytes(), start == 0, last))
        if last:
            self._gathered_at[number] = self._loop.time()
            for done in self._waiting.pop(number):
                done(Gathered(number, self._arena_id))
        else:
            self._go_on(run, partial(self._slice, run, number, chunks, stop))

    def _go_on(self, run: int, following: Callable[[], None]) -> None:
        """Make the following slice in another turn of the loop, when the last one is sent.

        What is kept to be sent is copied again with each part of it, which would hold the loop for longer.
        """
        if run != self._run:
            return
        if self._unsent():
            self._loop.call_later(_UNSENT_SECONDS, self._go_on, run, following)
        else:
            self._loop.call_soon(self._questions.call, following)
