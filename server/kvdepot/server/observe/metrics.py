"""/metrics: the families of `metric_families` in the exposition format, read from the depot at each scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from kvdepot.core.report import DaemonStatus
from kvdepot.server.depot.counters import BUCKETS_SECONDS, Histogram
from kvdepot.server.observe.metric_families import FAMILIES
from kvdepot.server.observe.metric_family import PREFIX, Family, Samples, Scrape
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_Figure = TypeVar("_Figure")
_NOTHING = Histogram()


class StatusCollector(Collector):
    """One scrape is one consistent status: nothing is kept between scrapes, counters live in the engine."""

    def __init__(self, status: Callable[[], DaemonStatus], histograms: Callable[[], Mapping[str, Histogram]]) -> None:
        self._status = status
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        scrape = Scrape(status, by_family(status.counters), by_family(self._histograms()))
        return (_metric(family, scrape) for family in FAMILIES)


def exposition(
    status: Callable[[], DaemonStatus], histograms: Callable[[], Mapping[str, Histogram]] = dict
) -> Callable[[], bytes]:
    """Return a function that renders /metrics, over a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, histograms))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)


def _metric(family: Family, scrape: Scrape) -> Metric:
    name = f"{PREFIX}{family.name}"
    if family.type == "histogram":
        histogram = HistogramMetricFamily(name, family.text, labels=family.labels)
        for key, figure in _filled(family, scrape.status, scrape.histograms, _NOTHING):
            bounds = [*map(floatToGoString, BUCKETS_SECONDS), "+Inf"]
            buckets = list(zip(bounds, figure.cumulative(), strict=True))
            histogram.add_metric(family.label_values(key), buckets, figure.sum_seconds)
        return histogram
    one = (CounterMetricFamily if family.type == "counter" else GaugeMetricFamily)(
        name, family.text, labels=family.labels
    )
    for labels, value in family.samples(scrape) if family.samples else _counted(family, scrape):
        one.add_metric(labels, value)
    return one


def _counted(family: Family, scrape: Scrape) -> Samples:
    for key, value in _filled(family, scrape.status, scrape.counters, 0.0):
        yield family.label_values(key), value


def _filled(
    family: Family, status: DaemonStatus, figures: Mapping[str, Mapping[str, _Figure]], nothing: _Figure
) -> Iterable[tuple[str, _Figure]]:
    """Return the counted values, and 0 for each known key that was not counted yet."""
    return sorted({**dict.fromkeys(family.known_keys(status), nothing), **figures.get(family.name, {})}.items())


def by_family(figures: Mapping[str, _Figure]) -> Mapping[str, Mapping[str, _Figure]]:
    """Group counters by the part of the name before the first dot, then by the rest."""
    families: defaultdict[str, dict[str, _Figure]] = defaultdict(dict)
    for name, value in figures.items():
        family, _, key = name.partition(".")
        families[family][key] = value
    return families
