"""The connector's counters on their way into vLLM's logs and /metrics (P10).

vLLM takes what happened since the last step from every rank and from the scheduler side,
adds it up, and hands the sum to the process that serves /metrics. So a message holds
differences, and every label is bounded: reasons are the connector's own words, sources the
first tiers that the daemon has named.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.client.vllm.base.compat import KVConnectorPromMetrics, KVConnectorStats, PromMetric
from kvdepot.core.hit_rate import LOAD_SECONDS, OTHER_SOURCE, PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS

LOGGER = logging.getLogger("vllm.kvdepot")
PREFIX: Final = "vllm:kvdepot_"
"""vLLM's own prefix: vLLM unregisters metrics that have it when it makes an engine again in one process."""

SOURCES_MAX: Final = 16
OBSERVATIONS_MAX: Final = 4096
"""Durations kept between two takings: more loads than an engine ends in a step by two orders of magnitude."""

COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    PROMPT_TOKENS: ("", "Tokens of the prompts that the engine has admitted, counted at the end of each request."),
    SERVED_TOKENS: ("source", "Of these: not computed, by the engine's own cache or the slowest tier of a load."),
    SAVED_SECONDS: ("", "Seconds in which the engine would have computed the loaded tokens, by its prefill rate."),
    "queries": ("", "Lookups that the daemon was asked for, renewals of old answers with them."),
    "hits": ("source", "Loads that arrived whole, by the slowest tier that had to give something."),
    "hit_tokens": ("source", "Tokens that were loaded instead of computed."),
    "loaded_bytes": ("source", "Bytes of whole objects of loads that arrived, also where ranks copied only a part."),
    "local_reuse_tokens": ("", "Tokens of attention copied within the engine for a load of the rest."),
    "misses": ("reason", "Requests that loaded nothing, or not what was offered."),
    "timeouts": ("call", "Lookups and loads that were not over in time."),
    "stale": ("reason", "Answers that were not true any more when they were used."),
    "transfer_params": ("outcome", "Requests that came with another engine's word of what it has stored."),
    "failed_loads": ("reason", "Loads that ended in computing the request."),
    "draft_tokens": ("kv", "Draft tokens that the engine verified, of requests with KV that was loaded or computed."),
    "accepted_tokens": ("kv", "Of these: accepted. Loads must not lower their share of the draft tokens."),
    "stored_objects": ("", "Objects that every rank has written."),
    "dropped_stores": ("reason", "Objects that were not stored: later misses."),
    "copied_bytes": ("direction", "Bytes that ranks moved, all of them together: of an object only what was needed."),
    "copy_seconds": ("direction", "Seconds that ranks spent on it, all of them together."),
    "verified_loads": ("result", "Loads on GPUs that were read back from the KV cache: right, or wrong."),
    "checked_loads": ("result", "Loads whose bytes in RAM were compared with their checksums: intact, or corrupt."),
    "lost_devices": ("", "GPUs that failed under a rank, which copies nothing more until its engine starts again."),
    "errors": ("", "Errors that the connector caught: each is a bug of kvdepot, see the log."),
}
"""Family -> (its label, its meaning)."""
GAUGES: Final[Mapping[str, str]] = {
    "pending_loads": "Requests that wait for a load.",
    "pending_stores": "Requests with stores that are not over.",
}
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
        """Add to a counter. Nothing ever decreases."""
        if amount > 0:
            values = self.data["counters"].setdefault(family, {})
            values[label] = values.get(label, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> KVDepotStats:
        """Merge both: add increases, and take the other's gauges, which are newer."""
        assert isinstance(other, KVDepotStats)
        for family, values in other.data["counters"].items():
            for label, amount in values.items():
                self.add(family, label, amount)
        self.data["gauges"].update(other.data["gauges"])
        for source, seconds in other.data["seconds"].items():
            self.data["seconds"][source] = (self.data["seconds"].get(source, []) + seconds)[-OBSERVATIONS_MAX:]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs of an interval."""
        line: dict[str, int | float] = {}
        for family, values in sorted(self.data["counters"].items()):
            for label, amount in sorted(values.items()):
                line[f"{family}.{label}" if label else family] = round(amount, 3)
        for source, seconds in sorted(self.data["seconds"].items()):
            line[f"{LOAD_SECONDS}_mean.{source}"] = round(sum(seconds) / len(seconds), 4)
        line.update(self.data["gauges"])
        return line


class Sources:
    """Labels for tiers, up to SOURCES_MAX: a daemon has a handful."""

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
        """Set the metrics. Leave out what cannot be understood: this runs where requests are answered (I3)."""
        try:
            self._observe(KVDepotStats(transfer_stats_data), engine_idx)
        except Exception:
            if not self._failed:
                LOGGER.exception("kvdepot: metrics are not complete; reported once")
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
