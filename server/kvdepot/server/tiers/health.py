"""Which state a tier is in and why; said in the log once for each reason, and not too often."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from kvdepot.server.io.breaker import DOUBT_SECONDS, Breaker
from kvdepot.server.platform.file_room import NO_INODES
from kvdepot.server.platform.logs import REPEAT_SECONDS, LogThrottle
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.workers import Workers

RETRY_SECONDS_MAX: Final = 60.0
"""How rarely a tier that fails again and again tries to recover."""

STOPS_WRITING: Final = {
    IoOutcome.NO_SPACE: "the file system is full",
    IoOutcome.READ_ONLY: "the file system is read-only",
    IoOutcome.UNREADABLE: "permission denied",
}
"""Outcomes of a write after which the next one would end the same."""
FAILING_WRITES: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.UNREADABLE})
"""Outcomes of a write that say something of the next one where several end so in a row."""
_PERMISSION: Final = tuple(f"[Errno {number}]" for number in (errno.EPERM, errno.EACCES))
_STOPS_MIN: Final = 2


def why_failed(outcome: IoOutcome, detail: str) -> str:
    """Return why a write or a probe failed, for people."""
    if outcome is IoOutcome.NO_SPACE and NO_INODES in detail:
        return detail
    if outcome is IoOutcome.READ_ONLY and detail.startswith(_PERMISSION):  # a probe could read
        outcome = IoOutcome.UNREADABLE
    return f"{STOPS_WRITING.get(outcome, outcome)}: {detail}"


class State(StrEnum):
    """The state of a tier."""

    OPENING = "opening"
    READY = "ready"
    DEGRADED = "degraded"  # what is shown of one that is ready, and not all that it is to be
    READ_ONLY = "read-only"
    OFFLINE = "offline"
    CLOSED = "closed"


class Health:
    """The state of a tier, and why. `retry_due` says when to try to leave a bad state: first after `probe_seconds`.

    Each further retry comes later. A tier that was well for a minute starts with `probe_seconds` again. A tier whose
    probe worked, and whose next write did not, is not well. `doubt` says so until a write works, or none has failed
    for a while.
    """

    def __init__(
        self, name: str, *, probe_seconds: float, failures_max: int, clock: Callable[[], float], log: logging.Logger
    ) -> None:
        """Start in the state OPENING. `failures_max`: as many in a row disable a path."""
        self._name = name
        self._probe_seconds = probe_seconds
        self._failures_max = failures_max
        self._clock = clock
        self._log = log
        self._retry_seconds = probe_seconds
        self._retry_at = 0.0
        self._ready_at = clock()
        self._throttle = LogThrottle(clock)
        self._short = ""
        self._failed_writes = self._failed_reads = 0  # in a row
        self._failed_read = ""  # why the last one did
        self._failed_read_at = 0.0
        self._stops = 0  # in a row, without a write that worked
        self._stopped = ""  # why the last time
        self.state = State.OPENING
        self.reason = ""

    @property
    def retry_due(self) -> bool:
        return self.state in (State.READ_ONLY, State.OFFLINE) and self._clock() >= self._retry_at

    def worsen(self, state: State, reason: str) -> None:
        if self.state is State.CLOSED:
            return
        if self.state is State.READY and self._clock() - self._ready_at > REPEAT_SECONDS and self._stops < _STOPS_MIN:
            self._retry_seconds = self._probe_seconds
        if self.state is State.READY and state is State.READ_ONLY:
            self._stops, self._stopped = self._stops + 1, reason
        self.state, self.reason = state, reason
        self._retry_at = self._clock() + self._retry_seconds
        self._log_state(f"{state}: {reason}")

    def read_refused(self, outcome: IoOutcome, detail: str) -> None:
        """Count a refused read. It may concern one object only.

        A process that may not read one file of several owners may well read the others.
        """
        self._failed_reads += 1
        self._failed_read = why_failed(outcome, detail)
        self._failed_read_at = self._clock()

    def read_worked(self) -> None:
        self._failed_reads = 0

    def write_failed(self, outcome: IoOutcome, detail: str, breaker: Breaker) -> str:
        """Count a failed write. Return why nothing more is to be written; empty if writes may continue.

        So many failures in a row stop the writing, whatever reads do. So do errors that have disabled the path.
        """
        if outcome not in FAILING_WRITES:
            return ""
        self._failed_writes += 1
        if self._failed_writes < self._failures_max or (outcome is IoOutcome.IO_ERROR and not breaker.closed):
            return ""
        return f"writes fail: {why_failed(outcome, detail)}"

    def write_worked(self) -> None:
        self._failed_writes = self._stops = 0

    @property
    def doubt(self) -> str:
        """Return why the tier is not well, although it is ready; empty if it is well."""
        since = self._clock() - DOUBT_SECONDS
        if self._stops >= _STOPS_MIN and (self.state is not State.READY or self._ready_at >= since):
            return f"no write has worked since: {self._stopped}"
        if self._failed_reads >= self._failures_max and self._failed_read_at >= since:
            return f"reads fail: {self._failed_read}"
        return ""

    def retried(self) -> None:
        """Put off the next retry, whatever comes of this one. The interval doubles, up to RETRY_SECONDS_MAX."""
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)

    def note(self, reason: str) -> None:
        """Change the reason within the same state."""
        if reason != self.reason:
            self.reason = reason
            self._log_state(reason)

    def short_of(self, reason: str) -> None:
        """Take note that the tier works, but with less than it is to have. Empty: no longer so."""
        if reason and not self._short:
            self._log_state(f"degraded: {reason}")
        elif self._short and not reason:
            self._log.info("tier %s: no longer degraded: %s", self._name, self._short)
        self._short = reason

    @property
    def shown(self) -> State:
        return State.DEGRADED if self.state is State.READY and (self._short or self.doubt) else self.state

    def ready(self, how: str) -> None:
        self.state, self.reason = State.READY, ""
        self._failed_writes = 0
        self._ready_at = self._clock()
        self._log.info("tier %s: ready, %s", self._name, how)

    def close(self) -> None:
        self.state, self.reason = State.CLOSED, "the daemon is stopping"

    def _log_state(self, what: str) -> None:
        """Log a change. The same trouble with another file or another number counts as a repetition."""
        if self._throttle.due(_without_details(what)):
            self._log.warning("tier %s: %s", self._name, what)


def _without_details(what: str) -> str:
    return re.sub(r"'[^']*'|[0-9][0-9.]*[A-Za-z]*", "", what)


def shown(health: Health, data: Workers, *others: Workers) -> State:
    """Return the state for people.

    A tier that is ready is degraded if it is disabled again after a probe worked, or if no worker serves a pool of it
    whose breaker is closed.
    """
    unserved = any(pool.breaker.closed and not pool.usable for pool in (data, *others))
    return State.DEGRADED if health.shown is State.READY and (unserved or data.breaker.doubt) else health.shown
