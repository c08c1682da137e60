"""What a verdict on a daemon says: one word, and problems with codes. `kvdepot.core.health` has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from kvdepot.core.bounds import Count, Explanation

PROBLEMS_MAX: Final = 64
"""Problems that a verdict names, the most important ones first."""


class Verdict(StrEnum):
    """How the daemon is. Unknown: it is older than the verdict."""

    OK = "HEALTH_OK"
    WARN = "HEALTH_WARN"
    ERR = "HEALTH_ERR"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why the verdict is not OK."""

    code: str
    error: bool
    message: Explanation  # what it is about, and figures
    fix: Explanation = ""  # what to do, where that is one step

    @property
    def anchor(self) -> str:
        """Return the anchor in docs/operations.md."""
        return self.code.lower().replace("_", "-")

    @property
    def alert(self) -> str:
        return "KVDepot" + self.code.title().replace("_", "")


@dataclass(frozen=True, slots=True)
class Health:
    """The verdict and its problems, errors first."""

    verdict: Verdict = Verdict.UNKNOWN
    problems: Annotated[tuple[Problem, ...], Count(PROBLEMS_MAX)] = ()
