"""The way of an object into the tier: room, sequence, bytes, PUT, and only then a handle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.server.io.jobs import Answer, Priority, WriteObject
from kvdepot.server.platform.guard import Once
from kvdepot.server.storage.base import IoOutcome, Loan, Written
from kvdepot.server.tiers.disk.growth import Growth
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.disk.records import SNAPSHOT_HEADER_BYTES, Put, record_bytes
from kvdepot.server.tiers.wall_time import unix_seconds
from kvdepot.server.tiers.workers import Hold

_RECORD_BYTES: Final = record_bytes(4)
"""What is kept free in the index for a write that is under way: more fragments are rare."""


@dataclass(eq=False, slots=True)
class _Write:
    name: ObjectName
    cost_bytes: int
    extents: tuple[Extent, ...]
    loan: Loan
    raw_sum: int | None
    done: Once[Written]
    until: float  # when it has waited for room long enough
    sequence: int = 0
    overdue: bool = False  # answered TIMEOUT: its place is free when its worker is gone
    appending: bool = False  # the journal has its PUT, or may have: an opening says whose its place is


class Writing:
    """`refused(outcome, detail)` is told of outcomes that concern more than one object.

    A write that something raised for is answered CANCELLED, and `_fail` decides about its place.
    """

    def __init__(
        self, medium: Medium, growth: Growth, *, clock: Callable[[], float], refused: Callable[[IoOutcome, str], None]
    ) -> None:
        self._medium = medium
        self._growth = growth
        self._clock = clock
        self._guard = medium.guard
        self._refused = self._guard.safe("telling of a refusal", refused)
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._writing: set[_Write] = set()
        self._writing_bytes = 0
        self.open = False
        """False: nothing that is written now can be put into the index."""

    @property
    def in_flight(self) -> int:
        return len(self._writing) + len(self._waiting)

    @property
    def in_flight_bytes(self) -> int:
        return self._writing_bytes + self._waiting_bytes

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        until = self._clock() + self._medium.config.deadline_seconds
        write = _Write(name, object_bytes(name.raw_bytes), tuple(extents), loan, raw_sum, Once(done), until)
        if not self._has_room(write.cost_bytes):
            done(Written(IoOutcome.NO_SPACE))
            return
        self._waiting.append(write)
        self._waiting_bytes += write.cost_bytes
        self.pump()

    def pump(self) -> None:
        """Begin the writes that there is room for now, in order. Not during an opening, which counts the segments."""
        space = self._medium.space
        while self.open and self._waiting and self._waiting[0].cost_bytes <= space.free_bytes:
            self._begin(self._unqueue())
        if self.open:
            self._guard.call("growth", self._growth.run_once, self._waiting_bytes)

    def expire(self) -> None:
        """End the waiting of those for which room was expected, and did not come; for the others, see to it."""
        while self._waiting and (self._waiting[0].until <= self._clock() or not self._could_come()):
            self._end(self._unqueue(), Written(IoOutcome.NO_SPACE))
        if self.open and self._waiting:
            self._growth.run_once(self._waiting_bytes)

    def stop(self) -> None:
        """Begin nothing more. What is under way fails when its worker answers."""
        self.open = False
        self.cancel_waiting()

    def cancel_waiting(self) -> None:
        while self._waiting:
            self._end(self._unqueue(), Written(IoOutcome.CANCELLED))

    def _has_room(self, cost_bytes: int) -> bool:
        medium = self._medium
        handles = medium.catalog.count + self.in_flight
        record_room = medium.layout.snapshot_bytes - SNAPSHOT_HEADER_BYTES - medium.catalog.record_bytes
        return (
            handles < medium.catalog.handles_max
            and (1 + self.in_flight) * _RECORD_BYTES <= record_room
            and cost_bytes <= self._room_bytes() - self._waiting_bytes
        )

    def _room_bytes(self) -> int:
        space = self._medium.space
        return space.free_bytes + space.coming_bytes + self._growth.left_bytes

    def _could_come(self) -> bool:
        return self._waiting[0].cost_bytes <= self._room_bytes()

    def _unqueue(self) -> _Write:
        write = self._waiting.popleft()
        self._waiting_bytes -= write.cost_bytes
        return write

    def _begin(self, write: _Write) -> None:
        if not self._guard.call("the begin of a write", self._submit, write):
            self._fail(write)

    def _end(self, write: _Write, written: Written) -> None:
        self._guard.call("the answer to a write", write.done, written)

    def _fail(self, write: _Write) -> None:
        """End a write on whose way something was raised."""
        if write in self._writing and not write.overdue:
            if write.appending:
                self._over(write)
                self._medium.space.unsure(write.sequence)
            else:
                self._give_up(write)
        self._end(write, Written(IoOutcome.CANCELLED))

    def _submit(self, write: _Write) -> None:
        medium = self._medium
        created_at = unix_seconds(medium.wall_clock)
        write.sequence = medium.take_sequence()
        fragments = medium.space.allocate(write.sequence, write.cost_bytes)
        if fragments is None:  # free, but in too many pieces
            self._end(write, Written(IoOutcome.NO_SPACE))
            return
        self._began(write)
        job = WriteObject(
            medium.layout.parts(fragments, write.cost_bytes), write.name, write.sequence, medium.config.codec,
            created_at, write.extents, write.raw_sum, medium.config.fsync,
        )  # fmt: skip

        def ended() -> None:
            if write.overdue:
                self._give_up(write)

        def answered(answer: Answer) -> None:
            if not self._guard.call("the end of a write", self._answered, write, job, answer):
                self._fail(write)

        medium.data.submit(job, priority=Priority.STORE, done=answered, loan=Hold(write.loan, ended))

    def _answered(self, write: _Write, job: WriteObject, answer: Answer) -> None:
        if answer.outcome is IoOutcome.OK and self.open:
            self._put(write, job, answer)
            return
        outcome = IoOutcome.CANCELLED if answer.outcome is IoOutcome.OK else answer.outcome
        if outcome is IoOutcome.TIMEOUT:
            write.overdue = True
        else:
            self._give_up(write, shunned=outcome is IoOutcome.IO_ERROR)
        self._refused(outcome, answer.detail)
        self._end(write, Written(outcome))

    def _began(self, write: _Write) -> None:
        self._writing.add(write)
        self._writing_bytes += write.cost_bytes

    def _over(self, write: _Write) -> None:
        if write in self._writing:
            self._writing.remove(write)
            self._writing_bytes -= write.cost_bytes

    def _give_up(self, write: _Write, *, shunned: bool = False) -> None:
        self._over(write)
        self._medium.space.abandon(write.sequence, shunned=shunned)
        self._medium.freed()

    def _put(self, write: _Write, job: WriteObject, answer: Answer) -> None:
        medium = self._medium
        medium_bytes = object_bytes(answer.stored_bytes)
        medium.budget.spend(medium_bytes)
        stored_as = job.codec if answer.stored_bytes < write.name.raw_bytes else 0
        put = Put(
            write.name, write.sequence, medium.journal.generation, stored_as, answer.stored_bytes, answer.stored_sum,
            answer.raw_sum, job.created_at, medium.space.trim(write.sequence, medium_bytes),
        )  # fmt: skip

        def appended(outcome: IoOutcome) -> None:
            if not self._guard.call("the end of a PUT", self._appended, write, put, outcome):
                self._fail(write)

        write.appending = True
        medium.journal.append(put, appended)

    def _appended(self, write: _Write, put: Put, outcome: IoOutcome) -> None:
        medium = self._medium
        if outcome is not IoOutcome.OK:
            self._over(write)
            medium.space.unsure(put.sequence)
            self._end(write, Written(outcome))
            return
        handle = medium.catalog.add(put)
        medium.space.keep(put.sequence)
        self._over(write)
        medium.tell("durable", put.sequence, put.name)
        self._end(write, Written(IoOutcome.OK, handle, put.raw_sum, put.stored_bytes))
