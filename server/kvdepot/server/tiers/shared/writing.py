"""The way of an object into the directory: quota grant, temporary, rename, and only then a handle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.server.io.jobs import Answer, Priority, PublishFile
from kvdepot.server.platform.guard import Once
from kvdepot.server.storage.base import IoOutcome, Loan, Written
from kvdepot.server.storage.shared_layout import object_file, quarantine_file, temporary_file
from kvdepot.server.tiers.shared.absent import name_key
from kvdepot.server.tiers.shared.directory import Directory
from kvdepot.server.tiers.shared.quota_grant import file_cost_bytes
from kvdepot.server.tiers.wall_time import unix_seconds
from kvdepot.server.tiers.workers import Hold

_LEFT_ALONE: Final = frozenset({IoOutcome.FOREIGN, IoOutcome.UNKNOWN_KEY})
"""Another file has the place of the object, and stays: nothing was written."""


@dataclass(eq=False, slots=True)
class _Write:
    name: ObjectName
    cost_bytes: int
    done: Once[Written]
    node: str  # whose quota grant it began under
    overdue: bool = False  # answered TIMEOUT: over when its worker is gone
    over: bool = False


class Writing:
    """`refused(outcome, detail)` is told of what failed, `kept(name)` of names that have a handle now.

    `damaged(name, outcome, detail)` is told of files that were in the place of an object, and are in quarantine now.

    Counts `shared_publications.written` and `.already_there`. A write that something raised for is answered CANCELLED,
    and costs what it may have cost.
    """

    def __init__(
        self, directory: Directory, *, refused: Callable[[IoOutcome, str], None], kept: Callable[[ObjectName], None],
        damaged: Callable[[ObjectName, IoOutcome, str], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._guard = guard = directory.guard
        self._refused = guard.safe("telling of a refusal", refused)
        self._kept = guard.safe("telling of a handle", kept)
        self._damaged = guard.safe("telling of damage", damaged)
        self._names: set[bytes] = set()
        self._numbers = 0
        self._begun: Counter[str] = Counter()  # writes that are not over, by node

    @property
    def settled(self) -> str:
        """Return this node if all that began under earlier nodes of this daemon run is complete; else an empty text."""
        return self._directory.node if self._begun.keys() <= {self._directory.node} else ""

    @property
    def in_flight(self) -> int:
        return len(self._names)

    def writes(self, name: ObjectName) -> bool:
        return name_key(name) in self._names

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        directory = self._directory
        cost_bytes = file_cost_bytes(name.raw_bytes)
        self._numbers += 1
        now = unix_seconds(directory.wall_clock)
        job = PublishFile(
            object_file(name), temporary_file(directory.node, self._numbers), directory.device, name,
            directory.config.codec, now, tuple(extents), raw_sum, directory.config.fsync, quarantine_file(now, name),
            directory.keys,
        )  # fmt: skip
        if directory.holdings.room <= self.in_flight or not directory.grant.begin(cost_bytes):
            done(Written(IoOutcome.NO_SPACE))
            return
        write = _Write(name, cost_bytes, Once(done), directory.node)
        self._begun[write.node] += 1
        self._names.add(name_key(name))

        def ended() -> None:
            if write.overdue:
                self._over(write, write.cost_bytes)

        hold = Hold(loan, ended)

        def answered(answer: Answer) -> None:
            self._names.discard(name_key(name))
            if not self._guard.call("the end of a write", self._answered, write, hold.tries, answer):
                if not write.overdue:
                    self._over(write, write.cost_bytes)
                self._end(write, Written(IoOutcome.CANCELLED))

        if not self._guard.call(
            "submitting a write",
            lambda: directory.data.submit(job, priority=Priority.STORE, done=answered, loan=hold),
        ):
            answered(Answer(IoOutcome.CANCELLED))

    def _end(self, write: _Write, written: Written) -> None:
        self._guard.call("the answer to a write", write.done, written)

    def _answered(self, write: _Write, tries: int, answer: Answer) -> None:
        """End a write. `tries`: the number of workers that had the job.

        What an earlier worker has left counts, whatever the last one answers.
        """
        directory, name = self._directory, write.name
        if answer.replaced is not IoOutcome.OK:
            directory.count(f"tier_damaged_objects.{answer.replaced}", 1)
            self._damaged(name, answer.replaced, answer.detail)
        if answer.outcome is IoOutcome.OK:
            written_bytes = 0 if answer.already_there else answer.stored_bytes
            untouched = answer.already_there and tries <= 1
            self._over(write, 0 if untouched else file_cost_bytes(answer.stored_bytes))
            directory.budget.spend(0 if untouched else object_bytes(answer.stored_bytes))
            directory.count("shared_publications.already_there" if answer.already_there else
                            "shared_publications.written", 1)  # fmt: skip
            self._kept(name)
            handle = directory.holdings.add(name, answer.stored_bytes, int(directory.clock()))
            self._end(write, Written(IoOutcome.OK, handle, answer.raw_sum, written_bytes))
            return
        if answer.outcome is IoOutcome.TIMEOUT:
            write.overdue = True
        else:
            # One that failed may lie there all the same: its removal failed too, or only its folder's sync did.
            untouched = not tries or (answer.outcome in _LEFT_ALONE and tries == 1)
            self._over(write, 0 if untouched else write.cost_bytes)
        self._refused(answer.outcome, answer.detail)
        self._end(write, Written(answer.outcome))

    def _over(self, write: _Write, spent_bytes: int) -> None:
        if write.over:
            return
        write.over = True
        self._directory.grant.end(write.cost_bytes, spent_bytes)
        self._begun[write.node] -= 1
        if not self._begun[write.node]:
            del self._begun[write.node]
