"""What a step is given, and how it says what it found.

A step passes, misses an aim, finds a wrong byte, fails, or is not run for a reason. Nothing that was not tried passes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from benchmarks.day_one.machine import Machine
from benchmarks.report import Report

Case = TypeVar("Case")


class Status(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    MISSED = "missed an aim"
    WRONG = "WRONG BYTES"
    FAILED = "failed"
    NOT_RUN = "not run"


class WrongByteError(Exception):
    """A copy put other bytes than it should have. The kit ends here."""


class NotRunError(Exception):
    """The machine cannot do this, or there is no time for it. The message says why."""


@dataclass
class Context:
    """Of one step. Figures have aims on a real device only: those of a stand-in mean nothing."""

    machine: Machine
    out: Path
    seed: int
    until: float = 0.0  # time.monotonic()
    cases: int | None = None  # of each step that draws them; None: all
    report: Report = field(default_factory=lambda: Report("step"))

    def left(self) -> float:
        """Seconds that this step may still take."""
        return self.until - time.monotonic()

    def drawn(self, cases: Sequence[Case]) -> list[Case]:
        """Return all cases of the step; in a rehearsal that is given a number, so many, by the seed."""
        if self.cases is None or self.cases >= len(cases):
            return list(cases)
        self.note("cases drawn", f"{self.cases} of {len(cases)}")
        return random.Random(self.seed).sample(cases, self.cases)

    def case(self, done: int, cases: int) -> None:
        """Before case `done` of so many: end the step if its time is over."""
        if self.left() < 0:
            raise NotRunError(f"the time was over after {done} of {cases} cases")

    def figure(
        self, key: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Report a figure with its aim."""
        if self.machine.stands_in:
            at_least = at_most = None
        self.report.figure(key, value, unit, at_least=at_least, at_most=at_most)

    def note(self, key: str, value: object) -> None:
        """Report something that is no figure."""
        self.report.note(key, value)


@dataclass(frozen=True)
class Step:
    """`share`: of the time that is left, compared with the shares of the steps that follow."""

    number: int
    title: str
    share: float
    run: Callable[[Context], None]


@dataclass(frozen=True)
class Result:
    """Of one step."""

    step: Step
    status: Status
    seconds: float
    reason: str
    report: Report
