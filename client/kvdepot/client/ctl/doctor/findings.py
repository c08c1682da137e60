"""What a check of `kvdepotctl doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HOST: Final = "host"
DAEMON: Final = "daemon"
ENGINES: Final = "engines"
"""Subjects in addition to the names of tiers."""
RUNBOOK: Final = "docs/operations.md#"
RUNBOOKS: Final = {
    "RemoveIPC": "arena-recreated",
    "answers": "workers-hang",
    "cgroup": "too-little-memory-at-start",
    "clock": "wrong-clock",
    "directory": "missing-or-replaced-directory",
    "huge pages": "huge-pages",
    "inodes": "no-free-inodes",
    "kernel": "kernels",
    "memory": "too-little-memory-at-start",
    "mount options": "read-only-file-system-or-permission",
    "open files": "too-few-descriptors",
    "peer identity": "engine-without-a-visible-pid",
    "permissions": "read-only-file-system-or-permission",
    "room": "full-file-system",
    "sockets": "socket-permission-denied",
    "state": "tier-degraded",
    "write": "read-only-file-system-or-permission",
}
"""Anchors of operations.md, by check. For the other checks the fix says everything."""


class Outcome(StrEnum):
    """Of one check."""

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
    runbook: str = ""  # where the documents describe the failure


@dataclass(frozen=True, slots=True)
class Check:
    """Which check of what: makes its finding."""

    name: str
    subject: str

    def ok(self, message: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.OK, message)

    def warn(self, message: str, fix: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.WARN, message, fix, self._runbook())

    def fail(self, message: str, fix: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.FAIL, message, fix, self._runbook())

    def skipped(self, reason: str) -> Finding:
        return Finding(self.name, self.subject, Outcome.SKIPPED, reason)

    def _runbook(self) -> str:
        anchor = RUNBOOKS.get(self.name, "")
        if (self.name, self.subject) == ("answers", DAEMON):
            anchor = "down"
        return f"{RUNBOOK}{anchor}" if anchor else ""
