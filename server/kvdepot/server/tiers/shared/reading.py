"""The way of an object out of the directory, and what becomes of one that is not what it should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import Answer, Priority, ReadFile
from kvdepot.server.tiers.base import DAMAGED, IoOutcome, Loan, Read
from kvdepot.server.tiers.failing import FailingObjects
from kvdepot.server.tiers.shared.absent import name_key
from kvdepot.server.tiers.shared.directory import Directory
from kvdepot.server.tiers.shared.layout import object_file, quarantine_file


class Reading:
    """`damaged` is told of each object that is, `lost` of a handle that is dead although the answer does not say so."""

    def __init__(
        self, directory: Directory, *, damaged: Callable[[ObjectName, IoOutcome, str], None],
        lost: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._damaged = damaged
        self._lost = lost
        self._failing = FailingObjects[bytes](directory.data.breaker)  # by what makes the file's name

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        directory = self._directory
        if directory.holdings.name(handle) != name:  # another file, about which nothing is known
            directory.holdings.remove(handle)
            done(Read(IoOutcome.IDENTITY))
            return
        use = directory.holdings.use(handle)
        job = ReadFile(object_file(name), name, tuple(extents), quarantine_file(int(directory.wall_clock()), name))

        def answered(answer: Answer) -> None:
            served = handle in directory.holdings and directory.holdings.use(handle) == use
            self._answered(handle, name, answer, done, served=served)

        directory.data.submit(job, priority=Priority.LOAD, done=answered, loan=loan)

    def _answered(
        self, handle: int, name: ObjectName, answer: Answer, done: Callable[[Read], None], *, served: bool
    ) -> None:
        outcome = answer.outcome
        if outcome is IoOutcome.OK:
            self._failing.read()
            self._failing.forget(name_key(name))
            done(Read(outcome, answer.raw_sum))
            return
        if outcome is IoOutcome.IO_ERROR and self._failing.failed(name_key(name)):
            outcome = IoOutcome.BAD_PLACE
        if outcome in DAMAGED:
            self._damaged(name, outcome, answer.detail)
        if outcome in DAMAGED or outcome is IoOutcome.GONE:
            self._directory.absent.add(name)
        if served and (outcome in DAMAGED or outcome in (IoOutcome.GONE, IoOutcome.FOREIGN)):
            self._directory.holdings.remove(handle)  # a foreign file is there for those who ask as its writer did
        done(Read(outcome))
        if outcome is IoOutcome.UNREADABLE and served and handle in self._directory.holdings:
            self._lost(handle)  # of this object alone: whether all of them are is the keeper's to find out
