"""The verdict (`kvdepot.core.health`), for which counters are remembered. Bounded: a sample a minute, for a day.

Samples of families that count faults are kept for a day, and are shared while nothing changes. Samples of families that
count traffic are kept for 15 minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from kvdepot.core.health import DAY, EVENTS, FLOWS, LATE_SECONDS, MINUTES_15, health
from kvdepot.core.report import DaemonStatus
from kvdepot.core.verdict import Health
from kvdepot.server.depot.counters import BUCKETS_SECONDS, Counters, Histogram
from kvdepot.server.observe.metrics import by_family

SAMPLE_SECONDS: Final = 60.0
_NO_TICK: Final = Histogram()

Figures = Mapping[str, Mapping[str, float]]
"""Counters by family, then by label."""


class History:
    """The counters of some families, as they were in the last `seconds`. They are 0 at the start.

    `every`: seconds between two samples, so at most `seconds / every + 2` are kept.
    """

    def __init__(
        self, families: Iterable[str], seconds: float, clock: Callable[[], float], every: float = SAMPLE_SECONDS
    ) -> None:
        self._families = tuple(families)
        self._seconds = seconds
        self._clock = clock
        self._every = every
        self._samples: deque[tuple[float, Figures]] = deque([(clock(), {})])

    @property
    def due(self) -> bool:
        """Whether it is time for the next sample."""
        return self._clock() - self._samples[-1][0] >= self._every

    def note(self, figures: Figures) -> None:
        """Take a sample, and drop those that are too old."""
        now, (_, last) = self._clock(), self._samples[-1]
        sample = {family: dict(figures[family]) for family in self._families if family in figures}
        self._samples.append((now, last if sample == last else sample))
        while self._samples[1][0] <= now - self._seconds:
            self._samples.popleft()

    def steps(self, figures: Figures) -> Iterator[tuple[float, dict[str, dict[str, float]]]]:
        """Yield the growth between each two samples, up to `figures`: how many seconds ago it ended, and by family."""
        now, (_, before) = self._clock(), self._samples[0]
        for at, sample in (*islice(self._samples, 1, None), (now, figures)):
            grown = {}
            for family in self._families if sample is not before else ():
                former = before.get(family, {})
                labels = {label: value - former.get(label, 0.0) for label, value in sample.get(family, {}).items()}
                grown[family] = {label: value for label, value in labels.items() if value > 0}
            yield now - at, grown
            before = sample

    def growth(self, figures: Figures, family: str, seconds: float) -> dict[str, float]:
        """Return by label how much the family's counters have grown since `seconds` ago, or a minute longer."""
        earliest = self._clock() - seconds
        before = next((sample for at, sample in reversed(self._samples) if at <= earliest), self._samples[0][1])
        of_family = before.get(family, {})
        grown = {label: value - of_family.get(label, 0.0) for label, value in figures.get(family, {}).items()}
        return {label: value for label, value in grown.items() if value > 0}


class Verdicts:
    """Gives the verdict on a status, with what its counters did lately."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        events, flows = History(EVENTS, DAY, clock), History(FLOWS, MINUTES_15, clock)
        self._histories = (events, flows)
        self._by_family = dict.fromkeys(EVENTS, events) | dict.fromkeys(FLOWS, flows)

    def note(self) -> None:
        """Take samples of counters, where they are due. Called more often than once a minute."""
        for history in self._histories:
            if history.due:
                history.note(self._figures(self._counters.snapshot()))

    def health(self, status: DaemonStatus) -> Health:
        """Return the verdict."""
        figures = self._figures(status.counters)
        return health(status, lambda family, seconds: self._by_family[family].growth(figures, family, seconds))

    def _figures(self, counters: Mapping[str, float]) -> Figures:
        """Return the counters by family, and the ticks of the loop by whether they were late."""
        ticks = self._counters.histograms().get("loop_lag_seconds", _NO_TICK).cumulative()
        in_time = ticks[BUCKETS_SECONDS.index(LATE_SECONDS)]
        return {**by_family(counters), "loop_ticks": {"in_time": in_time, "late": ticks[-1] - in_time}}
