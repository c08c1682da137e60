"""Several peers as one tier: each has workers and a breaker of its own (ADR 84).

A lookup asks all that can be asked, and remembers who has what. A read asks the one of these that has the fewest reads
in flight. If it has the object no more, or fails, another one is asked. After a failure a peer is not waited for, and
read from last, until it has answered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, Probe, ReadFile, StatFiles
from kvdepot.server.platform.addresses import url_address
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.source import SourceWorkers

_ABSENT: Final = frozenset({IoOutcome.GONE, IoOutcome.FOREIGN})
_ANOTHER: Final = _ABSENT | {IoOutcome.IO_ERROR, IoOutcome.UNREADABLE, IoOutcome.CANCELLED}
"""After these outcomes another peer is asked for the object: nothing is written to the extents any more.

Not after TIMEOUT, where the worker may still write. Not after damage: nobody waits for these bytes again for a while.
"""
LATE_TIMES: Final = 4.0
LATE_SECONDS: Final = 0.05
"""A lookup waits for others so many times as long as the first answer took, and at least so long."""
OWNERS_MAX: Final = 65_536
"""Objects of which it is known who has them, the latest ones. For others each peer is asked in turn."""
_NOBODY: Final = "no peer was found"
_NO_CHOICE: Final[Mapping[Place, str]] = {}


class Member:
    """A peer of the group. `itself`: it is this daemon, which a list of all nodes names too."""

    def __init__(self, place: Place, workers: SourceWorkers) -> None:
        self.place = place
        self.workers = workers
        self.figures = workers.figures
        self.itself = False
        self.chosen = ""  # why, where the list has more than there is room for
        self.probed = False  # a probe has no answer yet

    @property
    def usable(self) -> bool:
        return not self.itself and self.workers.usable

    def status(self) -> PeerStatus:
        return replace(self.workers.status(itself=self.itself), chosen=self.chosen)

    def __str__(self) -> str:
        return url_address(*self.place)


class PeerGroup:
    """`Workers` that are those of several peers. Its breaker never opens: each peer has one of its own."""

    def __init__(
        self, make: Callable[[Place], SourceWorkers], *, name: str, arena_id: int,
        loop: asyncio.AbstractEventLoop, log: logging.Logger, guard: Guard,
        asked: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Build a group of nobody. `make` returns workers without processes. `asked` gets the files of each lookup."""
        self._asked = guard.safe("noting a lookup", asked)
        self._guard = guard
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=loop.time)
        self._make = make
        self._name = name
        self._arena_id = arena_id
        self._loop = loop
        self._log = log
        self._members: dict[Place, Member] = {}
        self._owners: OrderedDict[str, tuple[Member, ...]] = OrderedDict()
        self._leaving: set[asyncio.Task[int]] = set()
        self._token: str | None = None  # workers are made, and admitted with it
        self._closed = False

    # What a tier asks

    @property
    def usable(self) -> bool:
        return not self._closed and any(member.usable for member in self._members.values())

    @property
    def why_unusable(self) -> str:
        """Return why no jobs are taken; empty while they are taken."""
        if self._closed:
            return "the tier is closed"
        return "" if self.usable else self.trouble or _NOBODY

    @property
    def trouble(self) -> str:
        """Return which peers cannot be asked, and why; empty if all can."""
        others = [member for member in self._members.values() if not member.itself]
        return "; ".join(f"{member}: {why}" for member in others if (why := member.workers.why_unusable))

    def statuses(self) -> tuple[PeerStatus, ...]:
        return tuple(member.status() for member in self._members.values())

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        if isinstance(job, ReadFile):
            self._read(job, priority, done, loan)
        else:
            self._ask_all(job, priority, done)

    def renew(self, guard: str) -> None:
        self._token = guard
        for member in self._members.values():
            if not member.itself:
                member.workers.renew(guard)

    async def close(self, seconds: float = 3.0) -> int:
        self._closed = True
        members, self._members = list(self._members.values()), {}
        left = await asyncio.gather(*(member.workers.close(seconds) for member in members), *self._leaving)
        return sum(left)

    def reads_from(self, source_id: int) -> bool:
        """Return whether a peer has this arena."""
        return any(member.usable and member.workers.reads_from(source_id) for member in self._members.values())

    # Who is in the group

    def busy(self, place: Place) -> bool:
        """Return whether objects are being read from this peer."""
        return place in self._members and self._members[place].figures.reading > 0

    def use(self, places: Iterable[Place], why: Mapping[Place, str] = _NO_CHOICE) -> bool:
        """Have these peers from now on. Return whether one of them is new. What others read is finished.

        `why`: they were chosen, for operators.
        """
        wanted = set(places)
        for place, member in self._members.items():
            member.chosen = why.get(place, "")
        if self._closed or wanted == set(self._members):
            return False
        for place in set(self._members) - wanted:
            self._leave(self._members.pop(place))
        new = wanted - set(self._members)
        for place in sorted(new):
            member = self._members[place] = Member(place, self._make(place))
            member.chosen = why.get(place, "")
            if self._token is not None:
                member.workers.renew(self._token)
        shown = (f"{one} ({one.chosen})" if one.chosen else str(one) for one in self._members.values())
        self._log.info("tier %s: peers: %s", self._name, ", ".join(shown) or "none")
        return bool(new)

    def _leave(self, member: Member) -> None:
        task = self._guard.task("the end of a peer's workers", member.workers.close(), self._loop)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on."""
        for member in self._members.values():
            if not member.itself:
                member.workers.use_names(names)

    # Lookups, and probes

    def probe(self) -> None:
        """Ask peers that have not answered yet, or whose last answer was a failure.

        Otherwise the next lookup would not wait for them, although they may have recovered while nobody asked.
        """
        for member in self._members.values() if self._token is not None else ():
            doubtful = member.figures.fails or not member.figures.source_id
            if doubtful and member.usable and not member.probed:
                member.probed = True
                member.workers.submit(Probe(PROBE), priority=Priority.TEND, done=partial(self._probed, member))

    def _probed(self, member: Member, answer: Answer) -> None:
        member.probed = False
        if answer.outcome is IoOutcome.OK:
            self.heard(member, answer)

    def _ask_all(self, job: Job, priority: Priority, done: Callable[[Answer], None]) -> None:
        files = job.files if isinstance(job, StatFiles) else ()
        if files:
            self._asked(files)
        members = [member for member in self._members.values() if member.usable]
        if not members:
            self._loop.call_soon(done, Answer(IoOutcome.CANCELLED, self.why_unusable))
            return
        asking = _Asking(self, members, files, self._loop, done)
        for member in members:
            member.workers.submit(job, priority=priority, done=asking.of(member))

    def heard(self, member: Member, answer: Answer) -> bool:
        """Note who has answered. Return whether it is another daemon."""
        if answer.source_id != self._arena_id:
            return True
        if not member.itself:
            member.itself = True
            self._log.info("tier %s: %s is this daemon", self._name, member)
            self._leave(member)
        return False

    def owned(self, file: str, member: Member) -> None:
        """Note that a peer has the object of a file."""
        owners = self._owners.pop(file, ())
        self._owners[file] = owners if member in owners else (*owners, member)
        if len(self._owners) > OWNERS_MAX:
            self._owners.popitem(last=False)

    def owners_of(self, file: str) -> tuple[Member, ...]:
        """Return which peers are known to have the object of a file, of those that can be asked."""
        return tuple(one for one in self._owners.get(file, ()) if one.usable and self._members.get(one.place) is one)

    # Reads

    def _read(
        self, job: ReadFile, priority: Priority, done: Callable[[Answer], None], loan: Loan | None,
        tried: tuple[Member, ...] = (), answer: Answer | None = None,
    ) -> None:  # fmt: skip
        """Ask a peer that has the object, and none that was `tried`. `answer`: of the last one of these.

        GONE if none can be asked. So nobody waits for an object of a peer that has left, or is disabled.
        """
        owners = self._owners.get(job.file, self._members.values())  # nobody knows any more: each is asked
        members = [one for one in owners if one.usable and self._members.get(one.place) is one and one not in tried]
        if not members:
            answer = answer or Answer(IoOutcome.GONE, "no peer that had it can be asked now")
            self._loop.call_soon(done, answer)
            return
        member = min(members, key=lambda one: (one.figures.fails, one.figures.reading))

        def answered(answer: Answer) -> None:
            if answer.outcome in _ABSENT and job.file in self._owners:
                self._owners[job.file] = tuple(one for one in self._owners[job.file] if one is not member)
            if answer.outcome in _ANOTHER and not self._closed:
                self._read(job, priority, done, loan, (*tried, member), answer)
            else:
                done(answer)

        member.workers.submit(job, priority=priority, done=answered, loan=loan)


class _Asking:
    """One job that several peers have."""

    def __init__(
        self, group: PeerGroup, members: Sequence[Member], files: Sequence[str], loop: asyncio.AbstractEventLoop,
        done: Callable[[Answer], None],
    ) -> None:  # fmt: skip
        self._group = group
        self._asked = len(members)
        self._left = set(members)
        self._awaited = {member for member in members if not member.figures.fails} or self._left
        self._files = files
        self._lengths = [UNKNOWN] * len(files)
        self._absent = [0] * len(files)  # how many say so
        self._loop = loop
        self._began = loop.time()
        self._done: Callable[[Answer], None] | None = done
        self._late: asyncio.TimerHandle | None = None
        self._answer = Answer(IoOutcome.CANCELLED, _NOBODY)  # of one that works, or of the last one

    def of(self, member: Member) -> Callable[[Answer], None]:
        """Return what takes the answer of this peer."""
        return lambda answer: self._answered(member, answer)

    def _answered(self, member: Member, answer: Answer) -> None:
        self._left.discard(member)
        works = answer.outcome is IoOutcome.OK and len(answer.lengths) == len(self._files)
        if works and self._group.heard(member, answer):
            self._note(member, answer)
        elif works:
            self._absent = [count + 1 for count in self._absent]  # of itself nothing is loaded
        elif self._answer.outcome is not IoOutcome.OK:
            self._answer = answer
        some = self._answer.outcome is IoOutcome.OK
        if not self._left or (some and (all(one >= 0 for one in self._lengths) or not self._left & self._awaited)):
            self._end()
        elif works and self._late is None:
            seconds = max(LATE_TIMES * (self._loop.time() - self._began), LATE_SECONDS)
            self._late = self._loop.call_later(seconds, self._end)

    def _note(self, member: Member, answer: Answer) -> None:
        self._answer = answer
        for at, (file, length) in enumerate(zip(self._files, answer.lengths, strict=True)):
            if length >= 0:
                self._group.owned(file, member)
                self._lengths[at] = length
            self._absent[at] += length == ABSENT

    def _end(self) -> None:
        """Answer, once. What comes later is still noted."""
        done, self._done = self._done, None
        if self._late is not None:
            self._late.cancel()
        if done is None:
            return
        if self._answer.outcome is not IoOutcome.OK:
            done(self._answer)
            return
        lengths = (
            ABSENT if length < 0 and absent == self._asked else length
            for length, absent in zip(self._lengths, self._absent, strict=True)
        )
        done(Answer(IoOutcome.OK, lengths=tuple(lengths)))
