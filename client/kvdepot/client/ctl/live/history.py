"""What `top` has seen of a daemon since it started."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.rates import Rates

if TYPE_CHECKING:
    from kvdepot.core.records import RequestRecord
    from kvdepot.core.report import DaemonStatus

RECENT_SECONDS: Final = 300.0
_STEPS_MAX: Final = 600
"""Of the history: more than a screen has columns for."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the daemon answers at one time: its state and its latest requests, the latest first."""

    status: DaemonStatus
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a screen shows. `steps`: between each two looks, the earliest first.

    `recent_steps`: those of the last minutes; `recent`: what they say together.
    """

    look: Look
    steps: tuple[Rates, ...]
    recent_steps: tuple[Rates, ...]
    recent: Rates

    @property
    def now(self) -> Rates | None:
        """Return the rates between the last two looks."""
        return self.steps[-1] if self.steps else None


class History:
    """The last looks at a daemon. Its memory is bounded."""

    def __init__(self, first: Look) -> None:
        self._look = first
        self._steps: deque[Rates] = deque(maxlen=_STEPS_MAX)

    def add(self, look: Look) -> None:
        self._steps.append(Rates.between(self._look.status, look.status))
        self._look = look

    def figures(self) -> Figures:
        steps = tuple(self._steps)
        ages = accumulate(step.seconds for step in reversed(steps))
        count = next((number for number, seconds in enumerate(ages, 1) if seconds >= RECENT_SECONDS), len(steps))
        recent = steps[len(steps) - count :]
        return Figures(self._look, steps, recent, Rates.over(recent))
