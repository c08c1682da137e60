"""Several peers as one tier: each has workers and a breaker of its own (ADR 84).

A lookup asks all that can be asked, and remembers who has what. For what none of them has, a guest may join (ADR 86). A
read asks the one of these that has the fewest reads in flight. If it has the object no more, or fails, another one is
asked. After a failure a peer is not waited for, and read from last, until it has answered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final, Protocol

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, ReadFile, StatFiles
from kvdepot.server.platform.addresses import url_address
from kvdepot.server.platform.guard import Guard, Once
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.tiers.peer.owners import Owners
from kvdepot.server.tiers.peer.path_names import PathNames
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.source import SourceWorkers
from kvdepot.server.tiers.workers import NotAsked

_ABSENT: Final = frozenset({IoOutcome.GONE, IoOutcome.FOREIGN})
_ANOTHER: Final = _ABSENT | {IoOutcome.IO_ERROR, IoOutcome.UNREADABLE, IoOutcome.CANCELLED}
"""After these outcomes another peer is asked for the object: nothing is written to the extents any more.

Not after TIMEOUT, where the worker may still write. Not after damage: nobody waits for these bytes again for a while.
"""
LATE_TIMES: Final = 4.0
LATE_SECONDS: Final = 0.05
"""A lookup waits for others so many times as long as the first answer took, and at least so long."""
GUEST_SECONDS: Final = 1.0
"""A lookup waits so long for a guest, or a peer that a request names: its workers may have to start first."""
_NOBODY: Final = "no peer was found"
_NO_CHOICE: Final[Mapping[Place, str]] = {}


class Elsewhere(Protocol):
    """What knows of places that are no peers (`seats.Seats`)."""

    def asked(self, files: Sequence[str]) -> None:
        """Take note of what a lookup asks for."""

    def seek(self, files: Sequence[str], found: Callable[[Place | None], None]) -> None:
        """Have a place join that may have these. `found` is called once, soon: None if there is none."""

    def judge(self, place: Place, useful: bool) -> None:
        """Take note of whether the place that joined had something."""


class Member:
    """A peer of the group. `itself`: it is this daemon, which a list of all nodes names too."""

    def __init__(self, place: Place, workers: SourceWorkers, number: int) -> None:
        self.place = place
        self.number = number
        self.workers = workers
        self.figures = workers.figures
        self.itself = False
        self.expected = False  # a request has named it
        self.chosen = ""  # why, where the list has more than there is room for

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
        self, make: Callable[[Place | None], SourceWorkers], *, name: str, arena_id: int,
        loop: asyncio.AbstractEventLoop, log: logging.Logger, guard: Guard,
        elsewhere: Callable[[], Elsewhere | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Build a group of nobody. `make` returns workers without processes, of nobody yet for None."""
        self._elsewhere = elsewhere
        self._paths = PathNames()
        self._guard = guard
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=loop.time)
        self._make = make
        self._name = name
        self._arena_id = arena_id
        self._loop = loop
        self._log = log
        self._members: dict[Place, Member] = {}
        self._owners = Owners[Member]()
        self._numbers = count()
        self._leaving: dict[SourceWorkers, asyncio.Task[None]] = {}  # until they are proven dead
        self._spare: SourceWorkers | None = None  # have started, for the peer that joins next
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
        if self._spare is not None:
            self._spare.renew(guard)

    async def close(self, seconds: float = 3.0) -> int:
        self._closed = True
        for task in self._leaving.values():
            task.cancel()
        workers = {member.workers for member in self._members.values()} | set(self._leaving)
        if self._spare is not None:
            workers.add(self._spare)
        self._members, self._owners, self._spare = {}, Owners(), None
        return sum(await asyncio.gather(*(one.close(seconds) for one in workers)))

    def reads_from(self, source_id: int) -> bool:
        """Return whether a peer has this arena."""
        return any(member.usable and member.workers.reads_from(source_id) for member in self._members.values())

    def expect(self, place: Place, source_id: int) -> bool:
        """Have lookups wait for the first answer of a peer. Return whether it can be asked, and may have this arena."""
        member = self._members.get(place)
        if member is None or not member.usable or member.figures.source_id not in (0, source_id):
            return False
        member.expected = True
        return True

    # Who is in the group

    def busy(self, place: Place) -> bool:
        """Return whether objects are being read from this peer."""
        return place in self._members and self._members[place].figures.reading > 0

    def use(self, places: Iterable[Place], why: Mapping[Place, str] = _NO_CHOICE, *, spare: bool = False) -> bool:
        """Have these peers from now on. Return whether one of them is new. What others read is finished.

        `why`: they were chosen, for operators. `spare`: have workers ready for another one.
        """
        joined = self._use(set(places), why)
        self._keep_spare(wanted=spare and not self._closed)
        return joined

    def _use(self, wanted: set[Place], why: Mapping[Place, str]) -> bool:
        for place, member in self._members.items():
            member.chosen = why.get(place, "")
        if self._closed or wanted == set(self._members):
            return False
        for place in set(self._members) - wanted:
            member = self._members.pop(place)
            self._owners.leave(member)
            self._leave(member.workers)
        new = wanted - set(self._members)
        for place in sorted(new):
            member = self._members[place] = Member(place, self._workers_of(place), next(self._numbers))
            self._owners.join(member)
            member.chosen = why.get(place, "")
        shown = (f"{one} ({one.chosen})" if one.chosen else str(one) for one in self._members.values())
        self._log.info("tier %s: peers: %s", self._name, ", ".join(shown) or "none")
        return bool(new)

    def _workers_of(self, place: Place) -> SourceWorkers:
        """Return workers for a peer that joins: spare ones, which have started, or others."""
        workers, self._spare = self._spare, None
        if workers is None:
            return self._started(place)
        workers.serve(place)
        return workers

    def _started(self, place: Place | None) -> SourceWorkers:
        workers = self._make(place)
        if self._token is not None:
            workers.renew(self._token)
        return workers

    def _keep_spare(self, *, wanted: bool) -> None:
        if wanted and self._spare is None:
            self._spare = self._started(None)
        elif not wanted and self._spare is not None:
            self._leave(self._spare)
            self._spare = None

    def _leave(self, workers: SourceWorkers) -> None:
        """End workers. What one that hangs was lent comes back at its death, while others serve (I6)."""
        if workers in self._leaving:
            return  # of a member that turned out to be this daemon
        task = self._leaving[workers] = self._guard.task("the end of a peer's workers", workers.leave(), self._loop)
        task.add_done_callback(lambda _: self._leaving.pop(workers))

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on."""
        for member in self._members.values():
            if not member.itself:
                member.workers.use_names(names)
        if self._spare is not None:
            self._spare.use_names(names)

    # Lookups, and probes

    def probe(self) -> None:
        """Ask peers that have not answered yet, or whose last answer was a failure."""
        for member in self._members.values() if self._token is not None else ():
            if not member.itself:
                member.workers.probe(partial(self.heard, member))

    def _ask_all(self, job: Job, priority: Priority, done: Callable[[Answer], None]) -> None:
        files = job.files if isinstance(job, StatFiles) else ()
        members = [member for member in self._members.values() if member.usable]
        if not members:
            self.note(files)
            self._loop.call_soon(done, Answer(IoOutcome.CANCELLED, self.why_unusable))
            return
        asking = _Asking(self, members, files, priority, self._loop, done)
        for member in members:
            member.workers.submit(job, priority=priority, done=partial(asking.answered, member))

    def note(self, files: Sequence[str]) -> None:
        """Let it be known what a lookup has asked for: not before its end, or the same place would join for both."""
        elsewhere = self._elsewhere()
        if files and elsewhere is not None:
            self._guard.call("noting a lookup", elsewhere.asked, files)

    def seek(
        self, files: Sequence[str], missing: Sequence[str], asked: Sequence[Member],
        visit: Callable[[Member | None], None],
    ) -> None:  # fmt: skip
        """Call `visit` once, soon, with a member that was not `asked` and may have what is missing of these files.

        It is one that has joined since, or one that joins for this. None: there is none.
        """
        new = next((one for one in self._members.values() if one.usable and one not in asked), None)
        if new is not None:
            visit(new)
            return

        def found(place: Place | None) -> None:
            member = self._members.get(place) if place is not None else None
            if place is not None and (member is None or not member.usable):
                self.judge(place, useful=False)
                member = None
            visit(member)

        elsewhere, once = self._elsewhere(), Once(found)
        paths = self._paths.of(files, missing) if elsewhere is not None else ()
        if elsewhere is None or not paths or not self._guard.call("seeking a peer", elsewhere.seek, paths, once):
            once(None)

    def judge(self, place: Place, *, useful: bool) -> None:
        """Note whether who has joined for a lookup had something."""
        elsewhere = self._elsewhere()
        if elsewhere is not None:
            self._guard.call("judging a peer", elsewhere.judge, place, useful)

    def heard(self, member: Member, answer: Answer) -> bool:
        """Note who has answered. Return whether it is another daemon."""
        if answer.source_id != self._arena_id:
            return True
        if not member.itself:
            member.itself = True
            self._log.info("tier %s: %s is this daemon", self._name, member)
            self._leave(member.workers)
        return False

    def owned(self, file: str, member: Member) -> None:
        """Note that a peer has the object of a file."""
        self._owners.add(file, member)

    def owners_of(self, file: str) -> tuple[Member, ...]:
        """Return which peers are known to have the object of a file, of those that can be asked."""
        return tuple(one for one in self._owners.of(file) or () if one.usable)

    # Reads

    def _read(
        self, job: ReadFile, priority: Priority, done: Callable[[Answer], None], loan: Loan | None,
        tried: tuple[Member, ...] = (), answer: Answer | None = None,
    ) -> None:  # fmt: skip
        """Ask a peer that has the object, and none that was `tried`. `answer`: of the last one of these.

        GONE, as `NotAsked`, if none can be asked. So nobody waits for an object of a peer that has left, or is
        disabled, and the next lookup asks the others for it.
        """
        owners = self._owners.of(job.file)
        if owners is None:  # nobody knows any more: each is asked
            owners = tuple(self._members.values())
        members = [one for one in owners if one.usable and one not in tried]
        if not members:
            answer = answer or NotAsked(IoOutcome.GONE, "no peer that had it can be asked now")
            self._loop.call_soon(done, answer)
            return
        member = min(members, key=lambda one: (one.figures.fails, one.figures.reading))

        def answered(answer: Answer) -> None:
            if answer.outcome in _ABSENT:
                self._owners.remove(job.file, member)
            if answer.outcome in _ANOTHER and not self._closed:
                self._read(job, priority, done, loan, (*tried, member), answer)
            else:
                done(answer)

        member.workers.submit(job, priority=priority, done=answered, loan=loan)


class _Asking:
    """One job that several peers have, and a guest for what none of them has."""

    def __init__(
        self, group: PeerGroup, members: Sequence[Member], files: Sequence[str], priority: Priority,
        loop: asyncio.AbstractEventLoop, done: Callable[[Answer], None],
    ) -> None:  # fmt: skip
        self._group = group
        self._members = members
        self._asked = len(members)
        self._left = set(members)
        self._awaited = {member for member in members if not member.figures.fails} or self._left
        self._files = files
        self._priority = priority
        self._lengths = [UNKNOWN] * len(files)
        self._absent = [0] * len(files)  # how many say so
        self._loop = loop
        self._began = loop.time()
        self._done: Callable[[Answer], None] | None = done
        self._late: asyncio.TimerHandle | None = None
        self._sought = False
        self._answer = Answer(IoOutcome.CANCELLED, _NOBODY)  # of one that works, or of the last one

    def answered(self, member: Member, answer: Answer) -> None:
        """Take the answer of a member."""
        self._left.discard(member)
        works = self._took(member, range(len(self._files)), answer)
        some = self._answer.outcome is IoOutcome.OK
        if some and not self._missing:
            self._end()
        elif self._sought:
            pass  # a guest has what is missing, or nobody
        elif not self._left or (some and not self._left & self._awaited):
            self._seek()
        elif works and self._late is None:
            seconds = max(LATE_TIMES * (self._loop.time() - self._began), LATE_SECONDS)
            if any(one.expected and not one.figures.source_id for one in self._left & self._awaited):
                seconds = GUEST_SECONDS
            self._late = self._loop.call_later(seconds, self._seek)

    @property
    def _missing(self) -> list[int]:
        """Return which files nobody has so far."""
        return [at for at, length in enumerate(self._lengths) if length < 0]

    def _took(self, member: Member, asked: Sequence[int], answer: Answer) -> bool:
        """Note an answer about some of the files. Return whether it is one."""
        works = answer.outcome is IoOutcome.OK and len(answer.lengths) == len(asked)
        if works and self._group.heard(member, answer):
            self._note(member, asked, answer)
        elif works:
            for at in asked:
                self._absent[at] += 1  # of itself nothing is loaded
        elif self._answer.outcome is not IoOutcome.OK:
            self._answer = answer
        return works

    def _note(self, member: Member, asked: Sequence[int], answer: Answer) -> None:
        self._answer = answer
        for at, length in zip(asked, answer.lengths, strict=True):
            if length >= 0:
                self._group.owned(self._files[at], member)
                self._lengths[at] = length
            self._absent[at] += length == ABSENT

    # A guest

    def _seek(self) -> None:
        """Have a guest join for what is missing. Without one, that is the end."""
        self._stop_waiting()
        self._sought = True
        if missing := self._missing:
            files = [self._files[at] for at in missing]
            self._group.seek(self._files, files, self._members, partial(self._visit, missing))
        else:
            self._end()

    def _visit(self, missing: Sequence[int], guest: Member | None) -> None:
        if guest is None or guest in self._members:
            self._end()
            return
        self._asked += 1
        self._late = self._loop.call_later(GUEST_SECONDS, self._end)
        job = StatFiles(tuple(self._files[at] for at in missing))
        guest.workers.submit(job, priority=self._priority, done=partial(self._visited, guest, missing))

    def _visited(self, guest: Member, missing: Sequence[int], answer: Answer) -> None:
        self._took(guest, missing, answer)
        self._end()
        self._group.judge(guest.place, useful=any(length >= 0 for length in answer.lengths) and not guest.itself)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()

    def _end(self) -> None:
        """Answer, once. What comes later is still noted."""
        done, self._done = self._done, None
        self._stop_waiting()
        if done is None:
            return
        if self._answer.outcome is not IoOutcome.OK:
            done(self._answer)
        else:
            lengths = (
                ABSENT if length < 0 and absent == self._asked else length
                for length, absent in zip(self._lengths, self._absent, strict=True)
            )
            done(Answer(IoOutcome.OK, lengths=tuple(lengths)))
        self._group.note(self._files)
