"""What a daemon did between two looks at it, a second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.client.ctl.durations import Durations

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdepot.core.report import DaemonStatus, TierStatus


@dataclass(frozen=True, slots=True)
class Rates:
    """`seconds` by the daemon's own clock: how late an answer comes changes nothing."""

    seconds: float
    grown: Mapping[str, float]  # by counter, of those that grew
    durations: Mapping[str, Durations] = field(default_factory=dict)  # by histogram, of those that grew

    @classmethod
    def between(cls, before: DaemonStatus, after: DaemonStatus) -> Rates:
        """Of another daemon run: since that one began, for its counters began then."""
        same = before.pid == after.pid and before.run == after.run and before.uptime_seconds <= after.uptime_seconds
        if not same:
            return cls.since_start(after)
        grown = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
        former = {one.name: one for one in before.histograms}
        durations = {one.name: Durations.between(former.get(one.name), one) for one in after.histograms}
        return cls(
            after.uptime_seconds - before.uptime_seconds,
            {name: value for name, value in grown.items() if value > 0},
            {name: one for name, one in durations.items() if one.count},
        )

    @classmethod
    def since_start(cls, status: DaemonStatus) -> Rates:
        return cls(
            status.uptime_seconds,
            {name: value for name, value in status.counters.items() if value > 0},
            {one.name: Durations.between(None, one) for one in status.histograms},
        )

    @classmethod
    def over(cls, steps: Iterable[Rates]) -> Rates:
        """Return what the steps say together."""
        seconds, grown, durations = 0.0, Counter[str](), dict[str, Durations]()
        for step in steps:
            seconds += step.seconds
            for name, value in step.grown.items():
                grown[name] += value  # type: ignore[assignment]  # a float
            for name, one in step.durations.items():
                durations[name] = one + durations[name] if name in durations else one
        return cls(seconds, grown, durations)

    def of(self, name: str) -> float:
        return self.grown.get(name, 0.0) / self.seconds if self.seconds > 0 else 0.0

    def grown_by_label(self, beginning: str) -> dict[str, float]:
        """Return by how much counters with this beginning grew, by the rest of the name, the largest first."""
        found = {
            name.removeprefix(beginning): value for name, value in self.grown.items() if name.startswith(beginning)
        }
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))

    def by_label(self, beginning: str) -> dict[str, float]:
        """Return rates by the rest of the name, of counters with this beginning, the fastest first."""
        return {label: self.of(beginning + label) for label in self.grown_by_label(beginning)}

    def moved(self, tier: TierStatus) -> dict[str, float]:
        """Return the rates of a tier. RAM's bytes are lent to engines; other tiers' are moved by I/O workers."""
        if tier.kind == "ram":
            return {
                "read_bytes": self.of("granted_read_bytes"), "written_bytes": self.of("granted_write_bytes"),
                "evicted_objects": sum(self.by_label("evicted_objects.").values()),
            }  # fmt: skip
        return {
            "read_bytes": self.of(f"io_bytes.{tier.name}/read"),
            "written_bytes": self.of(f"io_bytes.{tier.name}/written"),
            "evicted_objects": sum(self.by_label(f"tier_evicted_objects.{tier.name}/").values()),
        }
