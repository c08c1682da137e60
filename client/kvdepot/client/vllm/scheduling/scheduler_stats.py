"""What the scheduler side has counted, for vLLM's statistics (`kvdepot.client.vllm.base.stats`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from kvdepot.client.vllm.base.stats import COUNTERS

if TYPE_CHECKING:
    from collections import Counter

    from kvdepot.client.vllm.base.stats import KVDepotStats
    from kvdepot.client.vllm.scheduling.loads import Loads
    from kvdepot.client.vllm.scheduling.request_ends import RequestEnds
    from kvdepot.client.vllm.scheduling.stores import Stores


class Counting(Protocol):
    """The part of `SchedulerSide` that is shown."""

    counters: Counter[str]
    ends: RequestEnds
    loads: Loads
    stores: Stores


class SchedulerStats:
    """What the scheduler side has counted since it was last asked."""

    def __init__(self, side: Counting) -> None:
        self._side = side
        self._seen: dict[str, float] = {}
        self._gauges: dict[str, int] = {}

    def add_to(self, stats: KVDepotStats) -> None:
        """Add what has changed since the last call."""
        for name, value in chain(self._side.counters.items(), self._side.ends.counts.items()):
            before = self._seen.get(name, 0)
            if value != before:
                family, label = _family(name)
                if family in COUNTERS:
                    stats.add(family, label, value - before)
                self._seen[name] = value
        seconds = self._side.loads.seconds
        while seconds:
            source, duration = seconds.popleft()
            stats.data["seconds"].setdefault(source, []).append(duration)
        gauges = {"pending_loads": self._side.loads.active, "pending_stores": self._side.stores.open_requests}
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
