"""What the connector counts, on its way into vLLM's logs and /metrics (row P10).

vLLM takes what happened since the last step from every rank and from the scheduler side,
adds it up, and hands the sum to the process that serves /metrics. So a message holds
differences, and every label is bounded: reasons are the connector's own words, sources the
first tiers that the daemon has named.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.compat import KVConnectorPromMetrics, KVConnectorStats, PromMetric

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduler import SchedulerSide

LOGGER = logging.getLogger("vllm.kvdepot")
PREFIX: Final = "vllm:kvdepot_"
"""vLLM's own, because it unregisters what has it where an engine is made anew in one process."""

SOURCES_MAX: Final = 16
OTHER_SOURCE: Final = "other"
OBSERVATIONS_MAX: Final = 4096
"""Durations kept between two takings: more loads than an engine ends in a step by two orders of magnitude."""

COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "queries": ("", "Lookups that the daemon was asked for, renewals of old answers with them."),
    "hits": ("source", "Loads that arrived whole, by the slowest tier that had to give something."),
    "hit_tokens": ("source", "Tokens that were loaded instead of computed."),
    "loaded_bytes": ("source", "Bytes of whole objects of loads that arrived, also where ranks copied only a part."),
    "kept_tokens": ("", "Tokens of attention copied within the engine for a load of the rest."),
    "misses": ("reason", "Requests that loaded nothing, or not what was offered."),
    "timeouts": ("call", "Lookups and loads that were not over in time."),
    "stale": ("reason", "Answers that were not true any more when they were used."),
    "handoffs": ("outcome", "Requests that came with another engine's word of what it has stored."),
    "failed_loads": ("reason", "Loads that ended in computing the request."),
    "stored_objects": ("", "Objects that every rank has written."),
    "dropped_stores": ("reason", "Objects that were not stored: later misses."),
    "copied_bytes": ("direction", "Bytes that ranks moved, all of them together: of an object only what was needed."),
    "copy_seconds": ("direction", "Seconds that ranks spent on it, all of them together."),
    "errors": ("", "Errors that the connector caught: each is a bug of kvdepot, see the log."),
}
"""Family -> (its label, its meaning)."""
GAUGES: Final[Mapping[str, str]] = {
    "pending_loads": "Requests that wait for a load.",
    "pending_stores": "Requests with stores that are not over.",
}
LOAD_SECONDS: Final = "load_seconds"
_LOAD_SECONDS_HELP: Final = "From the allocation of a load's blocks to the last rank's copy, of those that arrived."
_LOAD_SECONDS_BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class KVDepotStats(KVConnectorStats):
    """`data`: "counters" family -> label -> increase; "gauges" name -> value; "seconds" source -> durations.

    Plain dicts, lists and numbers: it crosses processes as msgpack.
    """

    def __post_init__(self) -> None:
        for part in ("counters", "gauges", "seconds"):
            self.data.setdefault(part, {})

    def reset(self) -> None:
        self.data.clear()
        self.__post_init__()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def add(self, family: str, label: str, amount: float) -> None:
        """Nothing ever decreases."""
        if amount > 0:
            values = self.data["counters"].setdefault(family, {})
            values[label] = values.get(label, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> KVDepotStats:
        """Both: increases are added up, of gauges the other's are newer."""
        assert isinstance(other, KVDepotStats)
        for family, values in other.data["counters"].items():
            for label, amount in values.items():
                self.add(family, label, amount)
        self.data["gauges"].update(other.data["gauges"])
        for source, seconds in other.data["seconds"].items():
            self.data["seconds"][source] = (self.data["seconds"].get(source, []) + seconds)[-OBSERVATIONS_MAX:]
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs of an interval."""
        line: dict[str, int | float] = {}
        for family, values in sorted(self.data["counters"].items()):
            for label, amount in sorted(values.items()):
                line[f"{family}.{label}" if label else family] = round(amount, 3)
        for source, seconds in sorted(self.data["seconds"].items()):
            line[f"{LOAD_SECONDS}_mean.{source}"] = round(sum(seconds) / len(seconds), 4)
        line.update(self.data["gauges"])
        return line


class SchedulerStats:
    """What the scheduler side has counted since it was last asked."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._seen: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def add_to(self, stats: KVDepotStats) -> None:
        """What has changed."""
        for name, value in self._side.counters.items():
            if value != self._seen[name]:
                family, label = _family(name)
                if family in COUNTERS:
                    stats.add(family, label, value - self._seen[name])
                self._seen[name] = value
        seconds = self._side.loads.seconds
        while seconds:
            source, one = seconds.popleft()
            stats.data["seconds"].setdefault(source, []).append(one)
        stores = self._side.stores
        gauges = {
            "pending_loads": self._side.loads.active,
            "pending_stores": stores.open_requests if stores is not None else 0,
        }
        if gauges != self._gauges:
            stats.data["gauges"] = self._gauges = gauges


_FAMILIES: Final[Mapping[str, str]] = {
    "lookups": "queries",
    "load_failed_": "failed_loads",
    "store_dropped_": "dropped_stores",
}
"""Names of the scheduler side's counters, or their beginnings, that are called otherwise here."""


def _family(name: str) -> tuple[str, str]:
    """Family and label of a counter: `family.label`, or a name of `_FAMILIES`."""
    for beginning, family in _FAMILIES.items():
        if name == beginning or (beginning.endswith("_") and name.startswith(beginning)):
            return family, name.removeprefix(beginning)
    family, _, label = name.partition(".")
    return family, label


class Sources:
    """Labels for tiers, as many as are told apart: a daemon has a handful."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, tier: str) -> str:
        if tier not in self._known and len(self._known) < SOURCES_MAX:
            self._known.add(tier)
        return tier if tier in self._known else OTHER_SOURCE


Observations = deque[tuple[str, float]]
"""(source, seconds)."""


class KVDepotPromMetrics(KVConnectorPromMetrics):
    """vLLM's metrics of this connector, made by its own classes (they differ under Ray)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, PromMetric] = {}
        for family, (label, text) in COUNTERS.items():
            self._metrics[family] = self._counter_cls(
                name=PREFIX + family, documentation=text, labelnames=labelnames + [label] * bool(label)
            )
        for name, text in GAUGES.items():
            self._metrics[name] = self._gauge_cls(
                name=PREFIX + name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
        self._metrics[LOAD_SECONDS] = self._histogram_cls(
            name=PREFIX + LOAD_SECONDS, documentation=_LOAD_SECONDS_HELP, labelnames=[*labelnames, "source"],
            buckets=_LOAD_SECONDS_BUCKETS,
        )  # fmt: skip
        self._failed = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """What cannot be understood is left out: this runs where requests are answered (I3)."""
        try:
            self._observe(KVDepotStats(transfer_stats_data), engine_idx)
        except Exception:
            if not self._failed:
                LOGGER.exception("kvdepot: its metrics are not complete. Reported once.")
            self._failed = True

    def _observe(self, stats: KVDepotStats, engine_idx: int) -> None:
        for family, values in stats.data["counters"].items():
            for label, amount in values.items():
                if family in COUNTERS and amount > 0:
                    self._of(family, engine_idx, [label] * bool(COUNTERS[family][0])).inc(amount)
        for name, value in stats.data["gauges"].items():
            if name in GAUGES:
                self._of(name, engine_idx).set(value)
        for source, durations in stats.data["seconds"].items():
            for seconds in durations:
                self._of(LOAD_SECONDS, engine_idx, [source]).observe(seconds)

    def _of(self, family: str, engine_idx: int, labels: Iterable[str] = ()) -> Any:
        return self._metrics[family].labels(*self.per_engine_labelvalues[engine_idx], *labels)
