"""What a daemon did between two looks at it, a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdepot.core.report import DaemonStatus


@dataclass(frozen=True, slots=True)
class Rates:
    """`seconds` by the daemon's own clock: how late an answer comes changes nothing."""

    seconds: float
    grown: Mapping[str, float]  # by counter, of those that grew

    @classmethod
    def between(cls, before: DaemonStatus, after: DaemonStatus) -> Rates:
        """Of another daemon run: since that one began, for its counters began then."""
        same = before.pid == after.pid and before.run == after.run and before.uptime_seconds <= after.uptime_seconds
        seconds = after.uptime_seconds - (before.uptime_seconds if same else 0.0)
        counters = before.counters if same else {}
        grown = {name: value - counters.get(name, 0.0) for name, value in after.counters.items()}
        return cls(seconds, {name: value for name, value in grown.items() if value > 0})

    def of(self, name: str) -> float:
        return self.grown.get(name, 0.0) / self.seconds if self.seconds > 0 else 0.0

    def by_label(self, beginning: str) -> dict[str, float]:
        """Return rates by the rest of the name, of counters with this beginning, the fastest first."""
        found = {name.removeprefix(beginning): self.of(name) for name in self.grown if name.startswith(beginning)}
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
