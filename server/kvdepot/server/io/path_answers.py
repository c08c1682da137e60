"""What the answers of workers say about their path: counts, whether it takes O_DIRECT, whether it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.server.io.breaker import Breaker, Done
from kvdepot.server.io.jobs import Answer, Append, Job, PublishFile, ReadFile, ReadObject, WriteObject
from kvdepot.server.storage.base import DAMAGED, IoOutcome

FAILING: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE})
"""Outcomes that speak against the path, not against an object."""
READS: Final = ReadObject | ReadFile
WRITES: Final = WriteObject | PublishFile
_PROVING: Final = DAMAGED | {IoOutcome.OK}
"""Outcomes of what was done to its end."""


class PathAnswers:
    """What the answers say of a path. `changed` is called when the path turned out to take no O_DIRECT."""

    def __init__(
        self, breaker: Breaker, path: Path, *, failing: frozenset[IoOutcome], log: logging.Logger,
        count: Callable[[str, float], None], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.direct = True
        """False: the path refused O_DIRECT, or it is not safe there; its files go through the page cache."""
        self.path = path
        self._breaker = breaker
        self._failing = failing
        self._log = log
        self._count = count
        self._changed = changed

    def judge(self, job: Job, outcome: IoOutcome, why: str) -> bool:
        """Tell the breaker. Return whether that opened it."""
        done = Done.READ if isinstance(job, READS) else Done.WRITE if isinstance(job, WRITES | Append) else Done.OTHER
        if outcome not in self._failing:
            self._breaker.worked(done if outcome in _PROVING else Done.OTHER)
            return False
        return self._breaker.failed(f"{outcome}: {why}" if why else outcome, done)

    def note(self, job: Job, answer: Answer) -> None:
        """Count what was done, and look whether it went through the page cache."""
        reads, writes = isinstance(job, READS), isinstance(job, WRITES)
        self._count(f"io_seconds.{'read' if reads else 'write' if writes else 'other'}", answer.seconds)
        if answer.outcome is IoOutcome.OK and (reads or writes or isinstance(job, Append)) and not answer.already_there:
            self._count("io_bytes.read" if reads else "io_bytes.written", answer.stored_bytes)
        if answer.direct:
            return
        self._count("io_buffered_jobs", 1)
        if self.direct:
            self.direct = False
            self._log.warning("%s: no O_DIRECT here, its files go through the page cache", self.path)
            self._changed()
