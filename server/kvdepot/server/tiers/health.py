"""Which state a tier is in and why; said in the log once for each reason, and not too often."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from kvdepot.server.io.jobs import Answer
from kvdepot.server.logs import REPEAT_SECONDS, Seldom
from kvdepot.server.tiers.base import IoOutcome

RETRY_SECONDS_MAX: Final = 60.0
"""How seldom a tier that goes wrong again and again tries to get out of it."""

STOPS_WRITING: Final = {
    IoOutcome.NO_SPACE: "the file system is full",
    IoOutcome.READ_ONLY: "the file system is read-only",
    IoOutcome.UNREADABLE: "permission denied",
}
"""Outcomes of a write after which the next one would end the same."""


def why_failed(answer: Answer) -> str:
    """Of a write, or a probe, that failed: for people."""
    return f"{STOPS_WRITING.get(answer.outcome, answer.outcome)}: {answer.detail}"


class State(StrEnum):
    OPENING = "opening"
    READY = "ready"
    DEGRADED = "degraded"  # what is shown of one that is ready, and not all that it is to be
    READ_ONLY = "read-only"
    OFFLINE = "offline"
    CLOSED = "closed"


class Health:
    """`retry_due` says when to try to get out of a bad state: after `probe_seconds`, then less and less often.

    A tier that was well for a minute starts with `probe_seconds` again.
    """

    def __init__(self, name: str, *, probe_seconds: float, clock: Callable[[], float], log: logging.Logger) -> None:
        self._name = name
        self._probe_seconds = probe_seconds
        self._clock = clock
        self._log = log
        self._retry_seconds = probe_seconds
        self._retry_at = 0.0
        self._ready_at = clock()
        self._seldom = Seldom(clock)
        self._short = ""
        self.state = State.OPENING
        self.reason = ""

    @property
    def retry_due(self) -> bool:
        return self.state in (State.READ_ONLY, State.OFFLINE) and self._clock() >= self._retry_at

    def worsen(self, state: State, reason: str) -> None:
        if self.state is State.CLOSED:
            return
        if self.state is State.READY and self._clock() - self._ready_at > REPEAT_SECONDS:
            self._retry_seconds = self._probe_seconds
        self.state, self.reason = state, reason
        self._retry_at = self._clock() + self._retry_seconds
        self._say(f"{state}: {reason}", logging.WARNING)

    def retried(self) -> None:
        """Not again for a while, whatever comes of it."""
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)

    def note(self, reason: str) -> None:
        """A reason in the same state."""
        if reason != self.reason:
            self.reason = reason
            self._say(reason, logging.WARNING)

    def short_of(self, reason: str) -> None:
        """It works, and is not all that it is to be; empty: it is again."""
        if reason and not self._short:
            self._say(f"degraded: {reason}", logging.WARNING)
        elif self._short and not reason:
            self._log.info("tier %s: no longer degraded: %s", self._name, self._short)
        self._short = reason

    @property
    def shown(self) -> State:
        return State.DEGRADED if self.state is State.READY and self._short else self.state

    def ready(self, how: str) -> None:
        self.state, self.reason = State.READY, ""
        self._ready_at = self._clock()
        self._log.info("tier %s: ready, %s", self._name, how)

    def close(self) -> None:
        self.state, self.reason = State.CLOSED, "the daemon is stopping"

    def _say(self, what: str, level: int) -> None:
        if self._seldom.due(what):
            self._log.log(level, "tier %s: %s", self._name, what)
