"""Finding out which names are there: lookups share jobs, and are answered in time and parents first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.objectfile import HEADER_BYTES, ObjectName
from kvdepot.server.io.jobs import ABSENT, FILES_PER_STAT, UNKNOWN, Answer, Priority, StatFiles
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.shared.absent import AbsentNames, name_key
from kvdepot.server.tiers.workers import Workers

ASKED_MAX: Final = 65_536
"""Names in jobs at once; what is asked beyond is answered as not found, and not remembered as absent."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A name in a job, for all that wait for it."""

    name: ObjectName
    length: int = UNKNOWN
    answered: bool = False
    told: bool = False
    users: int = 0  # lookups that are not over
    waiting: list[_LookUp] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _LookUp:
    names: list[_Asked]  # parents first
    missing: int  # answers
    until: float
    done: Callable[[], None] | None  # None: it was called


class LookUps:
    """Counts `shared_probes.asked`, `.found`, `.absent`, `.remembered` (as absent), `.failed`, of names.

    `tell` is called with what is there and was not told before: names and the bytes after the header of each.
    """

    def __init__(
        self, data: Workers, absent: AbsentNames, *, deadline_seconds: float, clock: Callable[[], float],
        tell: Callable[[list[tuple[ObjectName, int]]], None], writing: Callable[[ObjectName], bool],
        count: Callable[[str, float], None], guard: Guard,
    ) -> None:  # fmt: skip
        """Start without lookups. `writing` returns whether this node is about to have a handle for a name anyway."""
        self._data = data
        self._absent = absent
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._guard = guard
        self._tell = guard.safe("telling what is found", tell)
        self._writing = writing
        self._count = count
        self._asked: dict[bytes, _Asked] = {}
        self._look_ups: dict[_LookUp, None] = {}  # the oldest first

    def look_up(self, names: Sequence[ObjectName], done: Callable[[], None], *, again: bool = False) -> None:
        """Call `done` when it is known which are there.

        `again`: names that were absent are asked for again, but for those whose objects were damaged.
        """
        wanted, new = [], []
        for name in names:
            if self._absent.damaged(name) if again else name in self._absent:
                self._count("shared_probes.remembered", 1)
                continue
            asked = self._asked.get(name_key(name))
            if asked is None and len(self._asked) < ASKED_MAX:
                asked = self._asked[name_key(name)] = _Asked(name)
                new.append(asked)
            if asked is not None:
                wanted.append(asked)
        look_up = _LookUp(wanted, 0, self._clock() + self._deadline_seconds, done)
        self._look_ups[look_up] = None
        for asked in wanted:
            asked.users += 1
            if not asked.answered:
                look_up.missing += 1
                asked.waiting.append(look_up)
        for start in range(0, len(new), FILES_PER_STAT):
            batch = new[start : start + FILES_PER_STAT]
            if not self._guard.call("asking for names", self._submit, batch):
                self._answered(batch, Answer(IoOutcome.CANCELLED))
        self._settle(look_up)

    def settle(self, name: ObjectName) -> None:
        """Report this name to nobody: it has a handle now."""
        asked = self._asked.get(name_key(name))
        if asked is not None:
            asked.told = True

    def expire(self) -> None:
        """Answer those whose time is up with what is known by now."""
        while self._look_ups and next(iter(self._look_ups)).until <= self._clock():
            self._end(next(iter(self._look_ups)))

    def cancel(self) -> None:
        """Answer all of them."""
        while self._look_ups:
            self._end(next(iter(self._look_ups)))

    def _submit(self, batch: list[_Asked]) -> None:
        self._count("shared_probes.asked", len(batch))
        job = StatFiles(tuple(object_file(asked.name) for asked in batch))
        self._data.submit(job, priority=Priority.LOAD, done=lambda answer: self._answered(batch, answer))

    def _answered(self, batch: list[_Asked], answer: Answer) -> None:
        answered = answer.outcome is IoOutcome.OK and len(answer.lengths) == len(batch)
        lengths = answer.lengths if answered else (UNKNOWN,) * len(batch)
        for asked, length in zip(batch, lengths, strict=True):
            asked.length = length
            asked.answered = True
            if length == ABSENT and not asked.told:
                self._guard.call("remembering a name", self._absent.add, asked.name)
            elif length >= 0 and not self._absent.damaged(asked.name):
                self._absent.discard(asked.name)  # it was asked for again
        absent, failed = lengths.count(ABSENT), lengths.count(UNKNOWN)
        self._count("shared_probes.found", len(batch) - absent - failed)
        self._count("shared_probes.absent", absent)
        self._count("shared_probes.failed", failed)
        for asked in batch:
            waiting, asked.waiting = asked.waiting, []
            self._release(asked, 0)
            for look_up in waiting:
                look_up.missing -= 1
                self._settle(look_up)

    def _settle(self, look_up: _LookUp) -> None:
        if not look_up.missing:
            self._end(look_up)

    def _end(self, look_up: _LookUp) -> None:
        done, look_up.done = look_up.done, None
        self._look_ups.pop(look_up, None)
        if done is None:
            return
        found = []
        for asked in look_up.names:
            if asked.length >= 0 and not asked.told and not self._writing(asked.name):
                asked.told = True
                found.append((asked.name, max(asked.length - HEADER_BYTES, 0)))
            self._release(asked, 1)
        if found:
            self._tell(found)
        self._guard.call("the answer to a lookup", done)

    def _release(self, asked: _Asked, users: int) -> None:
        asked.users -= users
        if asked.answered and not asked.users:
            self._asked.pop(name_key(asked.name), None)
