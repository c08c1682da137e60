"""What a check of `kvdepotctl doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HOST: Final = "host"
DAEMON: Final = "daemon"
ENGINES: Final = "engines"
"""Subjects beside the names of tiers."""


class Outcome(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is what to do; empty where there is nothing to do."""

    check: str
    subject: str
    outcome: Outcome
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Which check of what: makes its finding."""

    name: str
    subject: str

    def ok(self, message: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.OK, message)

    def warn(self, message: str, fix: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.WARN, message, fix)

    def fail(self, message: str, fix: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.FAIL, message, fix)

    def skipped(self, reason: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.SKIPPED, reason)
