"""Every metric of /metrics: name, type, labels with their values, meaning (row P10). docs/metrics.md is made from it.

Labels are tiers and quotas of the configuration and words of the program, so that their number has a bound; never
namespaces, tenants that engines name, or requests. What a label can be is there from the start with 0: `increase()`
sees the first of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.misses import LOOKUP_REASONS
from kvdepot.core.report import DaemonStatus, QuotaStatus, TierStatus
from kvdepot.proto.status import STATUS
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.server.engine.adoption import REASONS as ADOPTION_REASONS
from kvdepot.server.engine.audits import OUTCOMES as AUDIT_OUTCOMES
from kvdepot.server.engine.counters import Histogram
from kvdepot.server.engine.lookups import LookedUp
from kvdepot.server.guard import PLACES
from kvdepot.server.tiers.base import DAMAGED, IoOutcome

PREFIX: Final = "kvdepot_"
_DISK, _SHARED = "disk", "shared"
_LOWER = (_DISK, _SHARED)
_RAM_ONLY = ("ram",)
_DEGRADED_STATES = ("degraded", "read-only", "offline")
_STATES = ("closed", "degraded", "growing", "offline", "opening", "read-only", "ready")
_BREAKERS = ("closed", "open", "probing")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape shows. Counters and histograms by family, then by what stands behind it in their names."""

    status: DaemonStatus
    counters: Mapping[str, Mapping[str, float]]
    histograms: Mapping[str, Mapping[str, Histogram]]


Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is without prefix, and without the `_total` of a counter.

    `values` are what the last label can be, as far as that is known beforehand; `tier_kinds`: the first one is a tier
    of these kinds.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    tier_kinds: tuple[str, ...] = ()
    samples: Callable[[Scrape], Samples] | None = None  # None: of the counter or histogram of this name

    @property
    def full_name(self) -> str:
        """As it is written in queries; a histogram's series have `_bucket`, `_sum` and `_count` behind it."""
        return f"{PREFIX}{self.name}{'_total' if self.type == 'counter' else ''}"

    @property
    def series_names(self) -> tuple[str, ...]:
        suffixes = ("_bucket", "_sum", "_count") if self.type == "histogram" else ("",)
        return tuple(self.full_name + suffix for suffix in suffixes)

    def known_keys(self, status: DaemonStatus) -> list[str]:
        """What may stand behind the family in the names of counters."""
        values = self.values or ("",)
        if not self.tier_kinds:
            return list(values)
        tiers = [tier.name for tier in status.tiers if tier.kind in self.tier_kinds]
        return [f"{tier}/{value}" for tier in tiers for value in values]

    def label_values(self, key: str) -> tuple[str, ...]:
        """Of the text behind the family in a counter's name."""
        if len(self.labels) == 1 and not self.tier_kinds:
            return (key,)
        return tuple(key.split("/", 1))[: len(self.labels)] if self.labels else ()


def _gauge(name: str, text: str, value: Callable[[DaemonStatus], float]) -> Family:
    return Family(name, "gauge", text, samples=lambda scrape: [((), value(scrape.status))])


def _tier_gauge(
    name: str, text: str, value: Callable[[TierStatus], float] | None = None, *,
    kinds: tuple[str, ...] = (*_RAM_ONLY, *_LOWER),
) -> Family:  # fmt: skip
    """Without `value`: the status' field of that name."""
    of = value or attrgetter(name)
    return Family(
        f"tier_{name}", "gauge", text, ("tier",),
        samples=lambda scrape: [((tier.name,), of(tier)) for tier in scrape.status.tiers if tier.kind in kinds],
    )  # fmt: skip


def _tier_states(name: str, text: str, label: str, values: tuple[str, ...], of: Callable[[TierStatus], str]) -> Family:
    return Family(
        f"tier_{name}", "gauge", text, ("tier", label), values,
        samples=lambda scrape: [
            ((tier.name, value), float(of(tier) == value))
            for tier in scrape.status.tiers
            if of(tier)
            for value in values
        ],
    )  # fmt: skip


def _quota(type_: Literal["counter", "gauge"], name: str, text: str, value: Callable[[QuotaStatus], float]) -> Family:
    """By the texts of the configuration, however many tenants and namespaces they are about."""
    return Family(
        f"quota_{name}", type_, text, ("tenant", "namespace", "tier"),
        samples=lambda scrape: [((one.tenant, one.namespace, one.tier), value(one)) for one in scrape.status.quotas],
    )  # fmt: skip


def _counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Family:
    return Family(name, "counter", text, (label,) if label else (), tuple(values))


def _tier_counter(
    name: str, text: str, label: str = "", values: Iterable[str] = (), *, kinds: tuple[str, ...] = _LOWER
) -> Family:
    return Family(name, "counter", text, ("tier", label) if label else ("tier",), tuple(values), kinds)


def _names(outcomes: Iterable[AcquireOutcome] | Iterable[ReserveOutcome] | Iterable[CommitOutcome]) -> list[str]:
    return [outcome.name.lower() for outcome in outcomes]


_OUTCOMES = tuple(IoOutcome)
_DAMAGES = sorted(DAMAGED)
_WASTED = (
    "acquired",
    "computed",
    "declined",
    "draining",
    "ended",
    "epoch_bumped",
    "expired",
    "failed",
    "gave_way",
    "loads_off",
    "lost",
    "operator",
    "renewed",
    "session",
)
METHODS: Final = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["Depot"].methods)
CODES: Final = tuple(sorted({status.name for status in STATUS.values()} | {"CANCELLED", "INTERNAL"}))

_DAEMON = (
    Family(
        "build_info",
        "gauge",
        "1; the version is in the label.",
        ("version",),
        samples=lambda scrape: [((scrape.status.version,), 1.0)],
    ),
    _gauge("ready", "1 while the daemon serves.", lambda status: status.ready),
    _gauge("uptime_seconds", "Seconds since start.", lambda status: status.uptime_seconds),
    _gauge("arena_runs", "Daemon runs on this arena: more than 1 after it was adopted.", lambda status: status.run),
    _gauge("namespaces", "Namespaces known; `kvdepotctl ls` names them.", lambda status: len(status.namespaces)),
    Family(
        "loop_lag_seconds",
        "histogram",
        "By how much the daemon's loop was late for its tick: everything else waits that long too.",
    ),
    Family(
        "call_seconds",
        "histogram",
        "Time of an engine's call in the daemon, with what it waits for.",
        ("method",),
        METHODS,
    ),
    _counter("failed_calls", "Engines' calls that were refused or failed, by the gRPC status.", "code", CODES),
    _counter(
        "internal_errors",
        "Exceptions in a callback or task of the daemon: each a defect of kvdepot, see the log.",
        "place",
        PLACES,
    ),
    _gauge(
        "loads_off", "1 while an operator has switched loads off for all.", lambda status: status.switches.loads_off
    ),
    _gauge(
        "loads_off_namespaces",
        "Namespaces for which one has switched loads off by themselves.",
        lambda status: len(status.switches.loads_off_namespaces),
    ),
    _gauge(
        "stores_off", "1 while an operator has switched stores off for all.", lambda status: status.switches.stores_off
    ),
    _gauge(
        "stores_off_namespaces",
        "Namespaces for which one has switched stores off by themselves.",
        lambda status: len(status.switches.stores_off_namespaces),
    ),
    _gauge("epoch_bump", "The bump counter of every namespace that was not bumped by itself.", lambda s: s.epochs.bump),
    _gauge("epoch_void_namespaces", "Namespaces bumped by themselves since all were.", lambda s: len(s.epochs.void)),
    _counter(
        "stale_registrations", "Namespaces that engines wanted with another bump counter: they learn the right one."
    ),
    _gauge("draining", "1 while an operator has the daemon drain.", lambda status: status.switches.draining),
    _counter(
        "failed_state_writes",
        "What operators said that the next run will not know, as `[daemon] state` was not written.",
    ),
)

_ENGINES = (
    _gauge("sessions", "Engines attached.", lambda status: len(status.sessions)),
    _gauge("ranks_attached", "Ranks attached, all sessions.", lambda s: sum(one.ranks_attached for one in s.sessions)),
    _gauge("leases", "Open leases, all sessions.", lambda status: sum(one.leases for one in status.sessions)),
    _gauge(
        "lent_objects", "Objects lent to engines, all sessions.", lambda s: sum(one.lent_objects for one in s.sessions)
    ),
    _gauge("credit_bytes", "What all sessions may reserve.", lambda s: sum(one.credit_bytes for one in s.sessions)),
    _gauge(
        "credit_used_bytes", "Reserved and not yet committed, all sessions.",
        lambda status: sum(one.credit_used_bytes for one in status.sessions),
    ),
    _counter(
        "expired_leases", "Leases that ended by their deadline: what was lent stays lent until it is given back.",
        "access", ("read", "write"),
    ),
)  # fmt: skip

_LOOKUPS = (
    _counter("locates", "Lookups, one or more a request; those that another answer replaces are counted too."),
    _counter("locate_hits", "Lookups that were answered with an offer."),
    _counter("located_tokens", "Tokens offered."),
    _counter("shortened_offers", "Lookups answered with less than there is: the rest is late, or computed faster."),
    _counter(
        "misses", "Lookups answered with nothing, by the reason: why the first chunk that is missing is.", "reason",
        LOOKUP_REASONS,
    ),
    _counter("locate_waits", "Lookups that waited for a shared tier, by how that ended.", "outcome", LookedUp),
    _tier_counter(
        "tier_looked_up_objects", "Names that lookups asked a shared tier for (`asked`), and what it said.", "outcome",
        ("asked", "found", "absent", "unanswered"), kinds=(_SHARED,),
    ),
    _tier_counter("tier_look_up_seconds", "Seconds until a shared tier's answers, added up.", kinds=(_SHARED,)),
)  # fmt: skip

_LOADS = (
    _counter("acquires", "Loads asked for, by the answer.", "outcome", _names(AcquireOutcome)),
    _counter("refused_loads", "Of these: refused by an operator's word.", "reason",
             ("loads_off", "draining", "epoch_bumped")),
    _counter("hit_tokens", "Tokens of the chunks that loads have brought to engines: what these need not compute."),
    _counter("released_loads", "Loads granted in this run that are over, by whether the engine says that it had them.",
             "use", ("used", "unused")),
    _counter("acquired_objects", "Objects lent for loads."),
    _counter("granted_read_bytes", "Bytes lent for loads."),
    _counter("promoted_objects", "Objects read from tiers below RAM into it."),
    _counter("promoted_bytes", "Their bytes, raw."),
    _tier_counter("tier_reads", "Objects that loads read from a tier, by what came of it.", "outcome", _OUTCOMES),
    Family(
        "tier_read_seconds", "histogram", "From the wish to read an object of a tier to its end in RAM.",
        ("tier",), tier_kinds=_LOWER,
    ),
    _counter("prefetched_objects", "Objects of which prefetch began to read or keep."),
    _counter("prefetched_bytes", "Their bytes."),
    _counter("prefetch_used_objects", "Of these: taken by a load."),
    _counter("prefetch_used_bytes", "Their bytes."),
    _counter("prefetch_wasted_objects", "Of these: let go unused, by the reason.", "reason", _WASTED),
    _counter("prefetch_wasted_bytes", "Their bytes.", "reason", _WASTED),
    _counter("prefetch_refused_requests", "Requests without prefetch, as too many wait for theirs."),
)  # fmt: skip

_STORES = (
    _counter("reserved_objects", "Objects that engines want to store.", "outcome", _names(ReserveOutcome)),
    _counter("refused_stores", "Objects not stored by an operator's word.", "reason", ("stores_off", "draining")),
    _counter("granted_write_bytes", "Bytes lent for stores."),
    _counter("committed_objects", "Objects that engines have written.", "outcome", _names(CommitOutcome)),
    _counter("abandoned_objects", "Reserved objects that engines gave back unwritten."),
    _counter("pruned_objects", "Objects of unfinished paths that no request could resume at, dropped."),
    _counter("summed_objects", "Objects whose checksum was taken after their commit."),
)  # fmt: skip

_RAM = (
    _counter("evicted_objects", "Objects evicted from RAM.", "reason", ("watermark", "room", "quota", "nodes")),
    _counter("evicted_bytes", "Their bytes."),
    _counter("adopted_objects", "Objects found in the arena at the start: `kept`, or why not.", "outcome",
             ("kept", "namespace_repeated", *ADOPTION_REASONS[1:])),
    _counter("verified_objects", "Adopted objects whose checksum held."),
    _counter("corrupt_objects", "Objects of RAM whose checksum did not hold."),
    _counter(
        "dropped_objects", "Objects that nobody can reach any more, as one above them went.", "reason",
        ("below_corrupt", "below_drifted", "below_dropped", "below_end"),
    ),
    _counter(
        "audits",
        "Objects that engines computed although RAM has them, drawn by `[policy] audit_sample`, by what came of it.",
        "outcome", AUDIT_OUTCOMES,
    ),
    _counter("leaked_objects", "Objects whose place is never used again, as somebody may still write there."),
)  # fmt: skip

_TIERS = (
    _tier_gauge("capacity_bytes", "Configured capacity, everything included."),
    _tier_gauge("ready_bytes", "RAM: populated bytes of the arena. Disk: bytes of the segments that are made."),
    _tier_gauge(
        "used_bytes", "RAM: bytes in extents that hold or will hold an object. Below it: what lies on the medium.",
        lambda tier: tier.used_bytes,
    ),
    _tier_gauge("lent_bytes", "Bytes in extents lent to processes.", kinds=_RAM_ONLY),
    _tier_gauge("objects", "Committed objects."),
    _tier_gauge("unverified_objects", "Adopted, not verified yet.", kinds=_RAM_ONLY),
    _tier_gauge("unsummed_objects", "Committed, without a checksum yet: a kill would lose them.", kinds=_RAM_ONLY),
    _tier_gauge("prefetched_objects", "Held for requests that come later.", kinds=_RAM_ONLY),
    _tier_gauge("prefetched_bytes", "Their bytes.", kinds=_RAM_ONLY),
    _tier_gauge("prefetching_requests", "Requests that prefetch is for.", kinds=_RAM_ONLY),
    _tier_gauge("pinned_objects", "Not evicted, as an operator has pinned them.", kinds=_RAM_ONLY),
    _tier_gauge("pinned_bytes", "Their bytes, at most `[policy] pin_share`.", kinds=_RAM_ONLY),
    _tier_gauge("queued_objects", "Objects that wait to be written to the tier.", kinds=_LOWER),
    _tier_gauge("queued_bytes", "Their bytes.", kinds=_LOWER),
    _tier_gauge("written_today_bytes", "Bytes written since midnight UTC.", kinds=_LOWER),
    _tier_gauge("quarantined_bytes", "Bytes kept of what was proved damaged.", kinds=_LOWER),
    _tier_gauge(
        "janitor", "1 while this daemon's node is the janitor of a shared tier.", lambda tier: tier.is_janitor,
        kinds=(_SHARED,),
    ),
    _tier_gauge("degraded", "1 while the tier does not do all it should.", lambda tier: tier.state in _DEGRADED_STATES),
    _tier_states("state", "1 for the state that the tier is in.", "state", _STATES, lambda tier: tier.state),
    _tier_gauge("breaker_open", "1 while its path is out of use.", lambda tier: tier.breaker in _BREAKERS[1:]),
    _tier_states("breaker", "1 for the state of the breaker.", "state", _BREAKERS, lambda tier: tier.breaker),
    _tier_counter("tier_writes", "Objects written to a tier, by what came of it.", "outcome", _OUTCOMES),
    _tier_counter("tier_written_bytes", "Bytes on the medium of what was written."),
    _tier_counter(
        "tier_writes_dropped", "Objects that were due and not written, by the reason.", "reason",
        ("queue_full", "no_parent", "too_large", "budget", "quota", "failed"),
    ),
    _tier_counter("tier_evicted_objects", "Objects evicted, or of a shared tier forgotten.", "reason",
                  ("watermark", "room", "quota", "nodes")),
    _tier_counter(
        "tier_found_objects", "Objects found at an opening or by lookups: `kept`, or why there is no use for them.",
        "outcome", ("kept", "no_namespace", "senseless", "length", "no_parent", "index_full", "repeated", "failed"),
    ),
    _tier_counter("tier_lost_objects", "Objects that turned out to be there no more."),
    _tier_counter("tier_damaged_objects", "Its objects proved damaged by a read or the scrubber.", "reason", _DAMAGES),
    _tier_counter(
        "tier_scrubbed_objects", "Objects read by the scrubber, by what it found.", "outcome", _OUTCOMES, kinds=(_DISK,)
    ),
    _tier_counter("io_answers", "Jobs of the I/O workers, by how they ended.", "outcome", _OUTCOMES),
    _tier_counter("io_seconds", "Seconds that they took, added up.", "operation", ("read", "write", "other")),
    _tier_counter("io_bytes", "Bytes that workers moved.", "operation", ("read", "written")),
    _tier_counter("io_buffered_jobs", "Jobs that went through the page cache: O_DIRECT is refused, or unsafe (NFS)."),
    _tier_counter("io_workers", "Worker processes that were started, crashed, or abandoned as they hung.", "event",
                  ("started", "crashed", "abandoned")),
    _tier_counter("io_breaker_openings", "How often the path went out of use."),
    _tier_counter(
        "io_failed_callbacks", "Exceptions in the tier or its I/O workers' pool: each a defect of kvdepot, see the log."
    ),
    _tier_counter("shared_publications", "Files published in a shared tier, or found there already.", "outcome",
                  ("written", "already_there"), kinds=(_SHARED,)),
    _tier_counter("shared_look_ups", "Names of files: asked for and the answers, or remembered as absent.", "outcome",
                  ("asked", "found", "absent", "failed", "remembered"), kinds=(_SHARED,)),
    _tier_counter("shared_touches", "Files whose time of use was set.", "outcome", ("ok", "failed"), kinds=(_SHARED,)),
)  # fmt: skip

_QUOTAS = (
    _quota("gauge", "capacity_bytes", "What each of its owners may hold.", lambda quota: quota.capacity_bytes),
    _quota("gauge", "owners", "Tenants or namespaces that it holds.", lambda quota: quota.owners_count),
    _quota(
        "gauge", "used_bytes", "What the fullest of its owners holds.",
        lambda quota: quota.owners[0].used_bytes if quota.owners else 0,
    ),
    _quota("counter", "refused_objects", "Not taken for its sake.", lambda quota: quota.refused_objects),
    _quota("counter", "evicted_objects", "Evicted for its sake.", lambda quota: quota.evicted_objects),
)  # fmt: skip

SUBJECTS: Final[tuple[tuple[str, tuple[Family, ...]], ...]] = (
    ("Daemon", _DAEMON), ("Engines", _ENGINES), ("Lookups", _LOOKUPS), ("Loads", _LOADS), ("Stores", _STORES),
    ("RAM", _RAM), ("Tiers", _TIERS), ("Quotas", _QUOTAS),
)  # fmt: skip
FAMILIES: Final = tuple(family for _, families in SUBJECTS for family in families)
