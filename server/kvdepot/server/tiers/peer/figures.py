"""What is known of a peer by its answers: to show it, and to choose the one to read from."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.jobs import Answer, Job, ReadFile, StatFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.workers import Workers

FAILURES: Final = frozenset({IoOutcome.TIMEOUT, IoOutcome.IO_ERROR, IoOutcome.UNREADABLE})
"""Outcomes that speak against the peer. After another one it works as before."""


class PeerFigures:
    """The figures of one peer. `asked` and `answered` are called for each of its jobs."""

    def __init__(self) -> None:
        self.source_id = 0
        """The id of the arena of the daemon that answered last. An address may be another daemon tomorrow."""
        self.reading = 0
        """Loads that have no answer yet."""
        self.fails = False
        """Whether the last answer was a failure."""
        self._why = ""  # it failed
        self._lane = ""
        self._loaded = self._loaded_bytes = self._lookups = 0
        self._load_seconds = self._lookup_seconds = 0.0
        self._failed: Counter[str] = Counter()

    def asked(self, job: Job) -> None:
        self.reading += isinstance(job, ReadFile)

    def answered(self, job: Job, answer: Answer) -> bool:
        """Note an answer. Return whether the peer is back after a failure, or another daemon than before."""
        works = answer.outcome is IoOutcome.OK
        is_another = self.source_id and answer.source_id not in (0, self.source_id)
        is_back = works and bool(self.fails or is_another)
        self.source_id = answer.source_id or self.source_id
        if works or answer.outcome in FAILURES:
            self.fails, self._why = not works, answer.detail or answer.outcome.value
        if isinstance(job, ReadFile):
            self.reading -= 1
            if works:
                self._lane = answer.lane or self._lane
                self._loaded += 1
                self._loaded_bytes += answer.stored_bytes
                self._load_seconds += answer.seconds
            else:
                self._failed[answer.outcome.value] += 1
        elif isinstance(job, StatFiles) and works:
            self._lookups += 1
            self._lookup_seconds += answer.seconds
        return is_back

    def status(self, address: str, workers: Workers, *, itself: bool = False) -> PeerStatus:
        """Return the status of the peer at this address, which has these workers."""
        why = "" if itself else workers.why_unusable.removeprefix("disabled: ")  # as the state says
        failing = self._why if self.fails and not itself else ""
        if itself:
            state = "itself"
        elif why:
            state = "disabled"
        elif failing:
            state = "failing"
        else:
            state = "ready" if self.source_id else "new"
        return PeerStatus(
            address, state, why or failing, self.source_id, workers.breaker.state, self._lane, self.reading,
            self._loaded, self._loaded_bytes, self._load_seconds, dict(self._failed),
            self._lookups, self._lookup_seconds,
        )  # fmt: skip
