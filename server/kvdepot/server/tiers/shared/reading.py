"""The way of an object out of the directory, and what becomes of one that is not what it should be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import DOUBTFUL_MAX, Answer, Priority, ReadFile
from kvdepot.server.storage.base import DAMAGED, OTHER_KEYS, IoOutcome, Loan, Read
from kvdepot.server.storage.shared_layout import object_file, quarantine_file
from kvdepot.server.tiers.failing import FailingObjects
from kvdepot.server.tiers.shared.absent import name_key
from kvdepot.server.tiers.shared.directory import Directory
from kvdepot.server.tiers.wall_time import unix_seconds
from kvdepot.server.tiers.workers import NotAsked

_DEAD: Final = DAMAGED | {IoOutcome.GONE, IoOutcome.FOREIGN}
"""The handle cannot be used after it. A foreign file is there for those who ask as its writer did."""
_OTHER_KEYS_SECONDS: Final = 60.0
"""For so long nobody waits again for an object that this node has no key of."""


_DOUBTED_MAX: Final = 1024
"""Objects of which checksums are remembered."""


class Reading:
    """`answered` is told of every read, `damaged` of each object that is.

    `lost` is told of handles that are dead although the answer does not say so. `met_doubtful` is told of an object of
    which a load has refused the bytes in doubt.
    """

    def __init__(
        self, directory: Directory, *, answered: Callable[[Answer], None],
        damaged: Callable[[ObjectName, IoOutcome, str], None],
        lost: Callable[[Sequence[int]], None],
        met_doubtful: Callable[[ObjectName, Sequence[int]], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._guard = guard = directory.guard
        self._answered = guard.safe("telling of an answer", answered)
        self._damaged = guard.safe("telling of damage", damaged)
        self._lost = guard.safe("telling what is lost", lost)
        self._met_doubtful = guard.safe("telling of doubtful bytes", met_doubtful)
        self._failing = FailingObjects[bytes](directory.data.breaker)  # by what makes the file's name
        self._doubtful: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # checksums, by the same

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        directory = self._directory
        if directory.holdings.name(handle) != name:  # another file, about which nothing is known
            directory.holdings.remove(handle)
            done(Read(IoOutcome.IDENTITY))
            return

        def answered(answer: Answer, served: bool) -> None:
            outcome = self._guard.value("the end of a read", IoOutcome.CANCELLED, self._judge, name, answer)
            if served and outcome in _DEAD:
                directory.holdings.remove(handle)
            read = Read(outcome, answer.raw_sum if outcome is IoOutcome.OK else 0)
            self._guard.call("the answer to a read", done, read)
            if outcome is IoOutcome.UNREADABLE and served and handle in directory.holdings:
                self._lost([handle])  # of this object alone: whether all of them are is the coordinator's to find out
            if outcome in DAMAGED - OTHER_KEYS and (raw_sums := self._doubtful.get(name_key(name))):
                self._met_doubtful(name, raw_sums)

        self._submit(handle, name, tuple(extents), loan, Priority.LOAD, answered)

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        """Read an object for its own sake."""
        name = self._directory.holdings.name(handle)

        def answered(answer: Answer, served: bool) -> None:
            outcome = self._guard.value("the end of a read", IoOutcome.CANCELLED, self._judge, name, answer)
            if served and outcome in _DEAD:
                if outcome in DAMAGED:
                    self._directory.count(f"tier_damaged_objects.{outcome}", 1)
                self._lost([handle])
            done(outcome)

        self._submit(handle, name, None, None, Priority.TEND, answered)

    def doubt(self, name: ObjectName, raw_sums: Sequence[int]) -> tuple[int, ...]:
        """Take bytes with these checksums for damaged whenever they are read. Return all such checksums of the name."""
        known = self._doubtful.pop(name_key(name), ())
        doubtful = self._doubtful[name_key(name)] = tuple(dict.fromkeys((*raw_sums, *known)))[:DOUBTFUL_MAX]
        if len(self._doubtful) > _DOUBTED_MAX:
            self._doubtful.popitem(last=False)
        return doubtful

    def _trust(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """End the doubt about these checksums of a name."""
        doubtful = self._doubtful.pop(name_key(name), ())
        if left := tuple(one for one in doubtful if one not in raw_sums):
            self._doubtful[name_key(name)] = left

    def quarantine(
        self, name: ObjectName, raw_sums: Sequence[int], *, failed: Callable[[ObjectName, Answer], None]
    ) -> None:
        """Move the file of this name aside if its payload has one of these sums. It is not looked up meanwhile.

        A job can wait for longer than a name counts as absent, and can fail. So reads refuse these bytes until it is
        known that the file does not have them.
        """
        directory = self._directory
        doubtful = self.doubt(name, raw_sums)
        directory.absent.add(name, damaged=True)

        def answered(answer: Answer) -> None:
            outcome = self._guard.value("the end of a read", IoOutcome.CANCELLED, self._judge, name, answer)
            if outcome is IoOutcome.OK or outcome is IoOutcome.FOREIGN:
                directory.absent.discard(name)  # the file is another one
            elif outcome in DAMAGED - OTHER_KEYS:
                directory.count(f"tier_damaged_objects.{outcome}", 1)
            elif outcome is not IoOutcome.GONE:
                self._guard.call("telling of a failure", failed, name, answer)
                return
            self._trust(name, doubtful)

        directory.data.submit(self._job(name, None, doubtful), priority=Priority.TEND, done=answered)

    def _job(self, name: ObjectName, extents: tuple[Extent, ...] | None, doubtful: tuple[int, ...] = ()) -> ReadFile:
        aside = quarantine_file(unix_seconds(self._directory.wall_clock), name)
        return ReadFile(object_file(name), name, extents, aside, doubtful, self._directory.keys)

    def _submit(
        self, handle: int, name: ObjectName, extents: tuple[Extent, ...] | None, loan: Loan | None,
        priority: Priority, done: Callable[[Answer, bool], None],
    ) -> None:  # fmt: skip
        """Submit a job. `done` also gets whether the handle was still this object's when the answer came."""
        directory = self._directory
        use = directory.holdings.use(handle)

        def answered(answer: Answer) -> None:
            done(answer, handle in directory.holdings and directory.holdings.use(handle) == use)

        job = self._job(name, extents, self._doubtful.get(name_key(name), ()))
        directory.data.submit(job, priority=priority, done=answered, loan=loan)

    def _judge(self, name: ObjectName, answer: Answer) -> IoOutcome:
        outcome = answer.outcome
        self._answered(answer)
        if outcome is IoOutcome.OK:
            self._failing.read()
            self._failing.forget(name_key(name))
        elif outcome is IoOutcome.IO_ERROR and self._directory.config.gives_up and self._failing.failed(name_key(name)):
            outcome = IoOutcome.BAD_PLACE
        if outcome in DAMAGED:
            self._damaged(name, outcome, answer.detail)
        if outcome in DAMAGED or (outcome is IoOutcome.GONE and not isinstance(answer, NotAsked)):
            seconds = _OTHER_KEYS_SECONDS if outcome in OTHER_KEYS else 0.0
            self._directory.absent.add(name, seconds, damaged=outcome in DAMAGED)
        return outcome
