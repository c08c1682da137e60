"""What a metric is, and how the table of `metric_families` writes one: a gauge, a counter, of a tier, of a quota."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

from kvdepot.core.report import DaemonStatus, QuotaStatus, TierStatus
from kvdepot.server.depot.counters import Histogram

PREFIX: Final = "kvdepot_"
DISK, SHARED, OBJECT, PEER = "disk", "shared", "object", "peer"
OF_SEVERAL = (SHARED, OBJECT, PEER)
LOWER = (DISK, *OF_SEVERAL)
RAM_ONLY = ("ram",)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape shows. Counters and histograms by family, then by the rest of their names."""

    status: DaemonStatus
    counters: Mapping[str, Mapping[str, float]]
    histograms: Mapping[str, Mapping[str, Histogram]]


Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is without prefix, and without the `_total` of a counter.

    `values` are what the last label can be, as far as that is known beforehand; `tier_kinds`: the first one is a tier
    of these kinds; `or_tiers`: the label can be any tier too.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    tier_kinds: tuple[str, ...] = ()
    or_tiers: bool = False
    samples: Callable[[Scrape], Samples] | None = None  # None: of the counter or histogram of this name

    @property
    def full_name(self) -> str:
        """Return the name in queries. The series of a histogram add `_bucket`, `_sum` and `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.type == 'counter' else ''}"

    @property
    def series_names(self) -> tuple[str, ...]:
        suffixes = ("_bucket", "_sum", "_count") if self.type == "histogram" else ("",)
        return tuple(self.full_name + suffix for suffix in suffixes)

    def known_keys(self, status: DaemonStatus) -> list[str]:
        """Return what may follow the family's name in the names of counters."""
        if self.or_tiers:
            return [*self.values, *(tier.name for tier in status.tiers)]
        values = self.values or ("",)
        if not self.tier_kinds:
            return list(values)
        tiers = [tier.name for tier in status.tiers if tier.kind in self.tier_kinds]
        return [f"{tier}/{value}" for tier in tiers for value in values]

    def label_values(self, key: str) -> tuple[str, ...]:
        """Return the labels in the rest of a counter's name."""
        if len(self.labels) == 1 and not self.tier_kinds:
            return (key,)
        return tuple(key.split("/", 1))[: len(self.labels)] if self.labels else ()


def gauge(name: str, text: str, value: Callable[[DaemonStatus], float]) -> Family:
    return Family(name, "gauge", text, samples=lambda scrape: [((), value(scrape.status))])


def tier_gauge(
    name: str, text: str, value: Callable[[TierStatus], float] | None = None, *,
    kinds: tuple[str, ...] = (*RAM_ONLY, *LOWER),
) -> Family:  # fmt: skip
    """Return a gauge of tiers. Without `value`, it is the status field of that name."""
    of = value or attrgetter(name)
    return Family(
        f"tier_{name}", "gauge", text, ("tier",),
        samples=lambda scrape: [((tier.name,), of(tier)) for tier in scrape.status.tiers if tier.kind in kinds],
    )  # fmt: skip


def tier_states(name: str, text: str, label: str, values: tuple[str, ...], of: Callable[[TierStatus], str]) -> Family:
    return Family(
        f"tier_{name}", "gauge", text, ("tier", label), values,
        samples=lambda scrape: [
            ((tier.name, value), float(of(tier) == value))
            for tier in scrape.status.tiers
            if of(tier)
            for value in values
        ],
    )  # fmt: skip


def quota(type_: Literal["counter", "gauge"], name: str, text: str, value: Callable[[QuotaStatus], float]) -> Family:
    """Return a family of quotas, labelled as the configuration names them, however many owners they have."""
    return Family(
        f"quota_{name}", type_, text, ("tenant", "namespace", "tier"),
        samples=lambda scrape: [((one.tenant, one.namespace, one.tier), value(one)) for one in scrape.status.quotas],
    )  # fmt: skip


def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Family:
    return Family(name, "counter", text, (label,) if label else (), tuple(values))


def tier_counter(
    name: str, text: str, label: str = "", values: Iterable[str] = (), *, kinds: tuple[str, ...] = LOWER
) -> Family:
    return Family(name, "counter", text, ("tier", label) if label else ("tier",), tuple(values), kinds)
