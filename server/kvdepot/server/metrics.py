"""Counters and gauges in the exposition format, read from the engine when asked (row P10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from kvdepot.core.report import DaemonStatus, TierStatus
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_DEGRADED_STATES = ("degraded", "read-only", "offline")
_OPEN_BREAKERS = ("open", "probing")
_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStatus], float]], ...] = (
    ("capacity_bytes", "Configured capacity, everything included.", lambda tier: tier.capacity_bytes),
    ("ready_bytes", "Bytes of the arena that are populated and serve.", lambda tier: tier.ready_bytes),
    ("used_bytes", "Bytes in extents that hold or will hold an object.", lambda tier: tier.used_bytes),
    ("lent_bytes", "Bytes in extents lent to processes.", lambda tier: tier.lent_bytes),
    ("objects", "Committed objects.", lambda tier: tier.objects),
    ("unverified_objects", "Adopted objects that await their checksum.", lambda tier: tier.unverified_objects),
    ("queued_objects", "Objects that wait to be written to the tier.", lambda tier: tier.queued_objects),
    ("queued_bytes", "Bytes that wait to be written to the tier.", lambda tier: tier.queued_bytes),
    ("written_today_bytes", "Bytes written since midnight UTC.", lambda tier: tier.written_today_bytes),
    ("quarantined_bytes", "Bytes kept of what was proved damaged.", lambda tier: tier.quarantined_bytes),
    ("degraded", "1 while the tier does not do all it should.", lambda tier: tier.state in _DEGRADED_STATES),
    ("breaker_open", "1 while the path of the tier is out of use.", lambda tier: tier.breaker in _OPEN_BREAKERS),
)


class StatusCollector(Collector):
    """One scrape is one consistent status: nothing is kept between scrapes, counters live in the engine."""

    def __init__(self, status: Callable[[], DaemonStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield _gauge("kvdepot_ready", "1 while the daemon serves.", float(status.ready))
        yield _gauge("kvdepot_uptime_seconds", "Seconds since start.", status.uptime_seconds)
        yield _gauge("kvdepot_arena_runs", "Daemon runs on this arena.", status.run)
        yield _gauge("kvdepot_sessions", "Engines attached.", len(status.sessions))
        yield _gauge("kvdepot_leases", "Open leases of all sessions.", sum(one.leases for one in status.sessions))
        used = sum(one.credit_used_bytes for one in status.sessions)
        yield _gauge("kvdepot_credit_used_bytes", "Reserved and not yet committed, all sessions.", used)
        yield from _tiers(status.tiers)
        yield from _counters(status)


def exposition(status: Callable[[], DaemonStatus]) -> Callable[[], bytes]:
    """A function that renders /metrics, over a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    return lambda: generate_latest(registry)


def _tiers(tiers: tuple[TierStatus, ...]) -> Iterator[Metric]:
    for name, text, value in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"kvdepot_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.name], value(tier))
        yield gauge


def _counters(status: DaemonStatus) -> Iterator[Metric]:
    """`family`, `family.reason` or `family.tier/reason` in the engine; either of the last two may be empty."""
    families: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in status.counters.items():
        family, _, label = name.partition(".")
        families[family][label] = value
    for family, values in sorted(families.items()):
        labels = _labels(values)
        counter = CounterMetricFamily(f"kvdepot_{family}", family.replace("_", " "), labels=labels)
        for label, value in sorted(values.items()):
            tier, _, reason = label.rpartition("/")
            named = {"tier": tier, "reason": reason}
            counter.add_metric([named[name] for name in labels], value)
        yield counter


def _labels(values: Iterable[str]) -> list[str]:
    """Those that any counter of the family has."""
    parts = [label.rpartition("/") for label in values]
    return [
        name
        for name, held in (("tier", any(tier for tier, _, _ in parts)), ("reason", any(r for _, _, r in parts)))
        if held
    ]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
