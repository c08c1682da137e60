"""Every metric of /metrics: name, type, labels with their values, meaning. docs/metrics.md is made from this module.

Labels are tiers and quotas of the configuration, and words of the program, so that their number is bounded. They are
never namespaces, tenants that engines name, or requests. Each known value of a label exists from the start with 0, so
that `increase()` sees the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.health import CHECKS, DEGRADED_STATES, DISABLED
from kvdepot.core.hit_rate import ENGINE, OTHER_SOURCE, PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS
from kvdepot.core.misses import LOOKUP_REASONS
from kvdepot.core.report import DaemonStatus, QuotaStatus, TierStatus
from kvdepot.proto.methods import DEPOT
from kvdepot.proto.status import STATUS
from kvdepot.server.depot.adoption import REASONS as ADOPTION_REASONS
from kvdepot.server.depot.counters import Histogram
from kvdepot.server.depot.loads.lookups import LookedUp
from kvdepot.server.depot.stores.audits import OUTCOMES as AUDIT_OUTCOMES
from kvdepot.server.platform.guard import PLACES
from kvdepot.server.storage.base import DAMAGED, IoOutcome

PREFIX: Final = "kvdepot_"
_DISK, _SHARED = "disk", "shared"
_LOWER = (_DISK, _SHARED)
_RAM_ONLY = ("ram",)
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


def _gauge(name: str, text: str, value: Callable[[DaemonStatus], float]) -> Family:
    return Family(name, "gauge", text, samples=lambda scrape: [((), value(scrape.status))])


def _tier_gauge(
    name: str, text: str, value: Callable[[TierStatus], float] | None = None, *,
    kinds: tuple[str, ...] = (*_RAM_ONLY, *_LOWER),
) -> Family:  # fmt: skip
    """Return a gauge of tiers. Without `value`, it is the status field of that name."""
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
    """Return a family of quotas, labelled as the configuration names them, however many owners they have."""
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
    "draining",
    "ended",
    "epoch_bumped",
    "expired",
    "failed",
    "loads_off",
    "lost",
    "operator",
    "preempted",
    "rejected",
    "renewed",
    "session",
)
CODES: Final = tuple(sorted({status.name for status in STATUS.values()} | {"CANCELLED", "INTERNAL"}))

_DAEMON = (
    Family(
        "build_info",
        "gauge",
        "Always 1. `version`: version of the daemon.",
        ("version",),
        samples=lambda scrape: [((scrape.status.daemon_version,), 1.0)],
    ),
    _gauge("ready", "1 while the daemon is ready to serve, else 0.", lambda status: status.ready),
    Family(
        "health_problems",
        "gauge",
        "Problems of the verdict of `kvdepotctl health`, by code.",
        ("code",),
        tuple(CHECKS),
        samples=lambda scrape: [
            ((code,), sum(problem.code == code for problem in scrape.status.health.problems)) for code in CHECKS
        ],
    ),
    _gauge("uptime_seconds", "Seconds since the start of the daemon.", lambda status: status.uptime_seconds),
    _gauge("arena_runs", "Daemon runs on this arena. More than 1: the arena was adopted.", lambda status: status.run),
    _gauge("namespaces", "Known namespaces. `kvdepotctl ls` lists them.", lambda status: len(status.namespaces)),
    Family(
        "loop_lag_seconds",
        "histogram",
        "Delay of a tick of the event loop, in seconds. Calls that arrive meanwhile wait as long.",
    ),
    Family(
        "call_seconds",
        "histogram",
        "Time to answer an engine's call in the daemon, in seconds, including waits. `method`: name of the call.",
        ("method",),
        tuple(DEPOT),
    ),
    _counter("failed_calls", "Engines' calls that were refused or failed. `code`: gRPC status.", "code", CODES),
    _counter(
        "internal_errors",
        "Exceptions in a callback or task. Each is a defect of kvdepot; the log has it. `place`: part of the daemon.",
        "place",
        PLACES,
    ),
    _gauge(
        "loads_off", "1 while an operator has switched loads off for all.", lambda status: status.switches.loads_off
    ),
    _gauge(
        "loads_off_namespaces",
        "Namespaces whose loads an operator has switched off by name.",
        lambda status: len(status.switches.loads_off_namespaces),
    ),
    _gauge(
        "stores_off", "1 while an operator has switched stores off for all.", lambda status: status.switches.stores_off
    ),
    _gauge(
        "stores_off_namespaces",
        "Namespaces whose stores an operator has switched off by name.",
        lambda status: len(status.switches.stores_off_namespaces),
    ),
    _gauge("epoch_bump", "Bump counter of all namespaces that were not bumped by name.", lambda s: s.epochs.bump),
    _gauge(
        "epoch_invalidated_namespaces",
        "Namespaces bumped by name since the last bump of all.",
        lambda s: len(s.epochs.invalidated_namespaces),
    ),
    _counter(
        "stale_registrations",
        "Registrations of a namespace with an old bump counter. The answer names the right one.",
    ),
    _gauge("draining", "1 while the daemon drains.", lambda status: status.switches.draining),
    _counter(
        "failed_state_writes",
        "Failed writes of the state file; operator settings will be lost on restart.",
    ),
    _counter(
        "failed_audit_lines",
        "Audit lines that the file did not take within 1 s; the daemon's log has them.",
    ),
)

_ENGINES = (
    _gauge("sessions", "Attached engines.", lambda status: len(status.sessions)),
    _gauge("ranks_attached", "Attached ranks of all engines.", lambda s: sum(one.ranks_attached for one in s.sessions)),
    _gauge("leases", "Open leases of all engines.", lambda status: sum(one.leases for one in status.sessions)),
    _gauge("lent_objects", "Objects lent to engines.", lambda s: sum(one.lent_objects for one in s.sessions)),
    _gauge(
        "credit_bytes",
        "Bytes that all engines together may reserve and not yet commit.",
        lambda s: sum(one.credit_bytes for one in s.sessions),
    ),
    _gauge(
        "credit_used_bytes",
        "Bytes that all engines have reserved and not committed.",
        lambda status: sum(one.credit_used_bytes for one in status.sessions),
    ),
    _counter(
        "expired_leases",
        "Leases that passed their deadline. Their loans stay until they are released. `access`: kind of lease.",
        "access",
        ("read", "write"),
    ),
    _counter(
        "refused_streams",
        "Attachments by streams that were refused. `reason`: its `share` of proxies is used, or it starts too many.",
        "reason",
        ("rate", "share"),
    ),
)

_LOOKUPS = (
    _counter("locates", "Lookups (Locate calls), counted when they are answered. A request may look up several times."),
    _counter("locate_hits", "Lookups that were answered with an offer."),
    _counter("located_tokens", "Tokens of all offers, counted at each lookup."),
    _counter(
        "shortened_offers",
        "Lookups whose offer was shorter than the stored prefix, because the rest is late or computed faster.",
    ),
    _counter(
        "misses",
        "Lookups without a hit, by the reason the first missing chunk could not be served.",
        "reason",
        LOOKUP_REASONS,
    ),
    _counter(
        "locate_waits",
        "Lookups that waited for a shared tier. `outcome`: answered in time, late, or refused.",
        "outcome",
        LookedUp,
    ),
    _tier_counter(
        "tier_probed_objects",
        "Probes of a shared tier for an object. `outcome`: sent (`asked`), and the answers.",
        "outcome",
        ("asked", "found", "absent", "unanswered"),
        kinds=(_SHARED,),
    ),
    _tier_counter(
        "tier_probe_seconds", "Seconds until the answers to probes of a shared tier, in total.", kinds=(_SHARED,)
    ),
)

_PROMPTS = (
    _counter(PROMPT_TOKENS, "Tokens of the prompts that engines have admitted, counted at the end of each request."),
    Family(
        SERVED_TOKENS,
        "counter",
        "Of these: not computed. `source`: the engine's own cache, or the slowest tier of a load.",
        ("source",),
        (ENGINE, OTHER_SOURCE),
        or_tiers=True,
    ),
    _counter(
        SAVED_SECONDS,
        "Seconds in which engines would have computed the loaded tokens, by the prefill rate that each has measured.",
    ),
    _counter("invalid_token_reports", "Reports of engines that name more tokens than their prompts have."),
)

_LOADS = (
    _counter(
        "acquires",
        "Loads that engines requested (Acquire calls). `outcome`: the answer.",
        "outcome",
        _names(AcquireOutcome),
    ),
    _counter(
        "refused_loads",
        "Loads that were refused because of an operator setting, by reason.",
        "reason",
        ("loads_off", "draining", "epoch_bumped"),
    ),
    _counter("hit_tokens", "Tokens that engines loaded instead of computing them, counted at the end of a load."),
    _counter("released_loads", "Granted loads that ended, by whether the engine used them.", "use", ("used", "unused")),
    _counter("acquired_objects", "Objects lent to engines for loads."),
    _counter("granted_read_bytes", "Bytes lent to engines for loads."),
    _counter("promoted_objects", "Objects read from lower tiers into RAM."),
    _counter("promoted_bytes", "Bytes of these objects, before the codec."),
    _tier_counter(
        "tier_reads", "Objects read from a tier for loads and prefetch. `outcome`: of the read.", "outcome", _OUTCOMES
    ),
    Family(
        "tier_read_seconds",
        "histogram",
        "Time to read one object from a tier into RAM, including queueing.",
        ("tier",),
        tier_kinds=_LOWER,
    ),
    _counter("prefetched_objects", "Objects that prefetch read, or pinned in RAM."),
    _counter("prefetched_bytes", "Bytes of these objects."),
    _counter("prefetch_used_objects", "Prefetched objects that a load used."),
    _counter("prefetch_used_bytes", "Bytes of these objects."),
    _counter(
        "prefetch_wasted_objects",
        "Prefetched objects released without being loaded, by reason.",
        "reason",
        _WASTED,
    ),
    _counter("prefetch_wasted_bytes", "Bytes of these objects.", "reason", _WASTED),
    _counter("prefetch_refused_requests", "Requests without prefetch, because too many wait for it."),
)

_STORES = (
    _counter(
        "reserved_objects",
        "Objects that engines asked to store (Reserve calls). `outcome`: the answer.",
        "outcome",
        _names(ReserveOutcome),
    ),
    _counter(
        "refused_stores",
        "Objects that were not stored because of an operator setting, by reason.",
        "reason",
        ("stores_off", "draining"),
    ),
    _counter(
        "budget_refusals",
        "Times that a user or tenant held its share of RAM. `call`: objects of `stores`, or whole `loads`.",
        "call",
        ("loads", "stores"),
    ),
    _counter("granted_write_bytes", "Bytes lent to engines for stores."),
    _counter(
        "committed_objects",
        "Objects that engines have written (Commit calls). `outcome`: the answer.",
        "outcome",
        _names(CommitOutcome),
    ),
    _counter("abandoned_objects", "Reserved objects that engines abandoned."),
    _counter("pruned_objects", "Objects of unfinished prefixes, dropped because no request can resume at them."),
    _counter("checksummed_objects", "Objects whose checksum was taken after their commit."),
)

_RAM = (
    _counter(
        "evicted_objects",
        "Objects evicted from RAM. `reason`: high watermark, room for a store, quota, or nodes of the index.",
        "reason",
        ("watermark", "room", "quota", "nodes"),
    ),
    _counter("evicted_bytes", "Bytes of these objects."),
    _counter(
        "adopted_objects",
        "Objects in the arena at the start, counted when their path is known: adopted, or why they were dropped.",
        "outcome",
        ("adopted", "namespace_repeated", "stored_again", *ADOPTION_REASONS[1:]),
    ),
    _counter("verified_objects", "Adopted objects that matched their checksum."),
    _counter("doubted_objects", "Objects of RAM of which an engine said that they do not match their checksums."),
    _counter("corrupt_objects", "Objects of RAM that did not match their checksum."),
    _counter(
        "holder_failures",
        "Times that no process was found to hold the arena for the next daemon, which would begin with an empty one.",
    ),
    _counter(
        "torn_objects",
        "Objects of RAM that were dropped, because the links between their extents were damaged.",
    ),
    _counter(
        "dropped_objects",
        "Objects that became unreachable because an ancestor was deleted, by reason.",
        "reason",
        ("below_corrupt", "below_drifted", "below_dropped", "orphaned"),
    ),
    _counter(
        "audits",
        "Recomputed objects that were compared with RAM (`[policy] audit_sample`), by outcome.",
        "outcome",
        AUDIT_OUTCOMES,
    ),
    _counter("leaked_objects", "Objects whose memory is not reused, because a process may still write to it."),
)

_TIERS = (
    _tier_gauge("capacity_bytes", "Configured capacity, everything included."),
    _tier_gauge("ready_bytes", "RAM: populated bytes of the arena. Disk: bytes of the existing segments."),
    _tier_gauge(
        "used_bytes",
        "RAM: bytes in extents of objects, reserved ones included. Lower tiers: bytes on the device.",
        lambda tier: tier.used_bytes,
    ),
    _tier_gauge("lent_bytes", "Bytes in extents lent to processes.", kinds=_RAM_ONLY),
    _tier_gauge("objects", "Committed objects."),
    _tier_gauge("unverified_objects", "Adopted objects that are not verified yet.", kinds=_RAM_ONLY),
    _tier_gauge("pending_checksums", "Committed objects without a checksum. A kill would lose them.", kinds=_RAM_ONLY),
    _tier_gauge("prefetched_objects", "Objects pinned for requests that wait.", kinds=_RAM_ONLY),
    _tier_gauge("prefetched_bytes", "Bytes of these objects.", kinds=_RAM_ONLY),
    _tier_gauge("prefetching_requests", "Requests with a prefetch in progress or queued.", kinds=_RAM_ONLY),
    _tier_gauge("pinned_objects", "Objects that an operator has pinned.", kinds=_RAM_ONLY),
    _tier_gauge("pinned_bytes", "Bytes of pinned objects, at most `[policy] pin_share` of RAM.", kinds=_RAM_ONLY),
    _tier_gauge("queued_objects", "Objects that wait to be written to the tier.", kinds=_LOWER),
    _tier_gauge("queued_bytes", "Bytes of these objects.", kinds=_LOWER),
    _tier_gauge("written_today_bytes", "Bytes written since midnight UTC.", kinds=_LOWER),
    _tier_gauge("quarantined_bytes", "Bytes in quarantine.", kinds=_LOWER),
    _tier_gauge(
        "janitor",
        "1 while this daemon's node is the janitor of a shared tier.",
        lambda tier: tier.is_janitor,
        kinds=(_SHARED,),
    ),
    _tier_gauge(
        "degraded", "1 while the tier is degraded, read-only or offline.", lambda tier: tier.state in DEGRADED_STATES
    ),
    _tier_states("state", "1 for the state that the tier is in, else 0.", "state", _STATES, lambda tier: tier.state),
    _tier_gauge("breaker_open", "1 while the tier is disabled.", lambda tier: tier.breaker in DISABLED),
    _tier_states(
        "breaker",
        "1 for the state of the tier's breaker, else 0. open: the tier is disabled.",
        "state",
        _BREAKERS,
        lambda tier: tier.breaker,
    ),
    _tier_counter("tier_writes", "Objects written to a tier, by outcome.", "outcome", _OUTCOMES),
    _tier_counter("tier_written_bytes", "Bytes written to the device."),
    _tier_counter(
        "tier_writes_dropped",
        "Objects that were dropped instead of written, by reason.",
        "reason",
        ("queue_full", "no_parent", "too_large", "budget", "quota", "failed"),
    ),
    _tier_counter(
        "tier_evicted_objects",
        "Objects evicted, or forgotten in a shared tier, by reason.",
        "reason",
        ("watermark", "room", "quota", "nodes"),
    ),
    _tier_counter(
        "tier_found_objects",
        "Objects found at an opening or by probes: `accepted`, or the reason why not.",
        "outcome",
        ("accepted", "no_namespace", "invalid", "length", "no_parent", "index_full", "repeated", "failed"),
    ),
    _tier_counter("tier_lost_objects", "Objects that were missing when they were read."),
    _tier_counter(
        "tier_damaged_objects",
        "Objects whose damage a read or the scrubber proved, by reason; also those of which the tier has no key.",
        "reason",
        _DAMAGES,
    ),
    _tier_counter(
        "tier_scrubbed_objects", "Objects read by the scrubber, by outcome.", "outcome", _OUTCOMES, kinds=(_DISK,)
    ),
    _tier_counter("io_answers", "Jobs of the I/O workers, by outcome.", "outcome", _OUTCOMES),
    _tier_counter("io_seconds", "Seconds that I/O jobs took, in total.", "operation", ("read", "write", "other")),
    _tier_counter("io_bytes", "Bytes that I/O workers moved.", "operation", ("read", "written")),
    _tier_counter("io_buffered_jobs", "Jobs that used the page cache, because O_DIRECT is refused or unsafe (NFS)."),
    _tier_counter(
        "io_workers",
        "I/O workers that were started, crashed, or abandoned because they hung.",
        "event",
        ("started", "crashed", "abandoned"),
    ),
    _tier_counter("io_breaker_openings", "Times that the breaker disabled the tier."),
    _tier_counter(
        "io_failed_callbacks", "Exceptions in the tier or its I/O pool. Each is a defect of kvdepot; see the log."
    ),
    _tier_counter(
        "shared_publications",
        "Files that this node published in a shared tier. `outcome`: written, or already there.",
        "outcome",
        ("written", "already_there"),
        kinds=(_SHARED,),
    ),
    _tier_counter(
        "shared_probes",
        "Probes of files in a shared tier. `outcome`: sent (`asked`), the answers, or remembered as absent.",
        "outcome",
        ("asked", "found", "absent", "failed", "remembered"),
        kinds=(_SHARED,),
    ),
    _tier_counter(
        "shared_touches",
        "Updates of a file's modification time after a use. `outcome`: of the update.",
        "outcome",
        ("ok", "failed"),
        kinds=(_SHARED,),
    ),
)

_QUOTAS = (
    _quota("gauge", "capacity_bytes", "Bytes each owner of the quota may use.", lambda quota: quota.capacity_bytes),
    _quota("gauge", "owners", "Tenants or namespaces that the quota applies to.", lambda quota: quota.owners_count),
    _quota(
        "gauge",
        "used_bytes",
        "Bytes that the fullest owner uses.",
        lambda quota: quota.owners[0].used_bytes if quota.owners else 0,
    ),
    _quota("counter", "refused_objects", "Objects refused because of the quota.", lambda quota: quota.refused_objects),
    _quota("counter", "evicted_objects", "Objects evicted because of the quota.", lambda quota: quota.evicted_objects),
)

SUBJECTS: Final[tuple[tuple[str, tuple[Family, ...]], ...]] = (
    ("Daemon", _DAEMON),
    ("Engines", _ENGINES),
    ("Prompts", _PROMPTS),
    ("Lookups", _LOOKUPS),
    ("Loads", _LOADS),
    ("Stores", _STORES),
    ("RAM", _RAM),
    ("Tiers", _TIERS),
    ("Quotas", _QUOTAS),
)
FAMILIES: Final = tuple(family for _, families in SUBJECTS for family in families)
