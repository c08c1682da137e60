"""The way of an object out of the tier, and what becomes of one that is not what it should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import Answer, Priority, ReadObject
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Loan, Read
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.failing import FailingObjects
from kvdepot.server.tiers.workers import Hold


class Reading:
    """`refused(outcome, detail)` is told of outcomes that concern more than one object, `damaged` of each that does."""

    def __init__(
        self, medium: Medium, *, refused: Callable[[IoOutcome, str], None],
        damaged: Callable[[ObjectName, IoOutcome, str], None],
    ) -> None:  # fmt: skip
        self._medium = medium
        self._guard = guard = medium.guard
        self._refused = guard.safe("telling of a refusal", refused)
        self._damaged = guard.safe("telling of damage", damaged)
        self._failing = FailingObjects[int](medium.data.breaker)  # by sequence
        self.in_flight = 0

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        self._submit(handle, name, tuple(extents), loan, Priority.LOAD, lambda read, _: done(read))

    def verify(self, handle: int, done: Callable[[IoOutcome, bool], None]) -> None:
        """Read an object for its own sake. `done` is also told whether its handle is dead now."""
        name = self._medium.catalog.name(handle)

        self._submit(
            handle, name, None, None, Priority.TEND,
            lambda read, served: done(read.outcome, served and read.outcome in DAMAGED),
        )  # fmt: skip

    def _submit(
        self, handle: int, name: ObjectName, extents: tuple[Extent, ...] | None, loan: Loan | None,
        priority: Priority, done: Callable[[Read, bool], None],
    ) -> None:  # fmt: skip
        """Submit a job. `done` also gets whether the handle was still this object's when the answer came."""
        medium = self._medium
        sequence = medium.catalog.sequence(handle)
        job = ReadObject(medium.parts(handle), name, sequence, extents)
        medium.space.read(sequence)
        self.in_flight += 1
        overdue = False

        def finished() -> None:
            """End the read: no worker reads the object's place any more."""
            self.in_flight -= 1
            medium.space.read_done(sequence)
            medium.freed()

        def ended() -> None:
            if overdue:  # else it was not read yet, or is read again by another worker
                finished()

        def answered(answer: Answer) -> None:
            nonlocal overdue
            served = handle in medium.catalog and medium.catalog.sequence(handle) == sequence
            read = self._guard.value(
                "the end of a read", Read(IoOutcome.CANCELLED), lambda: self._judge(handle, name, answer, served=served)
            )
            overdue = answer.outcome is IoOutcome.TIMEOUT
            if not overdue:
                finished()
            self._guard.call("the answer to a read", done, read, served)

        hold = Hold(loan, ended)
        if not self._guard.call(
            "submitting a read", lambda: medium.data.submit(job, priority=priority, done=answered, loan=hold)
        ):
            answered(Answer(IoOutcome.CANCELLED))

    def _judge(self, handle: int, name: ObjectName, answer: Answer, *, served: bool) -> Read:
        catalog = self._medium.catalog
        outcome = answer.outcome
        if outcome is IoOutcome.OK:
            self._failing.read()
        if outcome is IoOutcome.OK and served and answer.stored_sum != catalog.stored_sum(handle):
            outcome = IoOutcome.CORRUPT  # whole, but not what the index says
        if outcome is IoOutcome.IO_ERROR and served and self._failing.failed(catalog.sequence(handle)):
            outcome = IoOutcome.BAD_PLACE
        if outcome in DAMAGED and served:
            outcome = self._bury(handle, name, outcome, answer.detail)
        elif outcome is IoOutcome.OK and served:
            catalog.prove(handle)
            self._failing.forget(catalog.sequence(handle))
        else:
            self._refused(outcome, answer.detail)
        return Read(outcome, answer.raw_sum if outcome is IoOutcome.OK else 0)

    def _bury(self, handle: int, name: ObjectName, outcome: IoOutcome, detail: str) -> IoOutcome:
        medium = self._medium
        if outcome is IoOutcome.BAD_PLACE:
            sequence = medium.unindex(handle, "lost", outcome)
            self._failing.forget(sequence)
            self._damaged(name, outcome, detail)
            medium.space.shun(sequence)
            medium.kill(sequence)
            return outcome
        if medium.catalog.unproven(handle):
            outcome = IoOutcome.TORN
        parts = medium.parts(handle)
        sequence = medium.unindex(handle, "lost", outcome)
        self._damaged(name, outcome, detail)
        medium.space.read(sequence)  # the copy does: an opening may kill the object while it is under way

        def left() -> None:
            medium.space.read_done(sequence)
            medium.kill(sequence)

        if not self._guard.call("quarantine", medium.quarantine.take, parts, sequence, outcome, left):
            left()
        return outcome
