"""Every metric of /metrics: name, type, labels with their values, meaning. docs/metrics.md is made from this module.

Labels are tiers and quotas of the configuration, peers, and words of the program, so that their number is bounded.
They are never namespaces, tenants that engines name, or requests. Each known value of a label exists from the start
with 0, so that `increase()` sees the first event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.health import CHECKS
from kvdepot.core.hit_rate import ENGINE, LOAD_SECONDS, OTHER_SOURCE, PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS
from kvdepot.core.misses import LOOKUP_REASONS
from kvdepot.proto.methods import DEPOT
from kvdepot.proto.status import STATUS
from kvdepot.server.depot.adoption import REASONS as ADOPTION_REASONS
from kvdepot.server.depot.loads.lookups import LookedUp
from kvdepot.server.depot.stores.audits import OUTCOMES as AUDIT_OUTCOMES
from kvdepot.server.observe.metric_family import (
    LOWER,
    OF_SEVERAL,
    Family,
    Samples,
    Scrape,
    counter,
    gauge,
    tier_counter,
)
from kvdepot.server.observe.peer_metrics import PEERS
from kvdepot.server.observe.tier_metrics import OUTCOMES, QUOTAS, TIERS
from kvdepot.server.platform.guard import PLACES


def _names(outcomes: Iterable[AcquireOutcome] | Iterable[ReserveOutcome] | Iterable[CommitOutcome]) -> list[str]:
    return [outcome.name.lower() for outcome in outcomes]


def _certificate_seconds(scrape: Scrape) -> Samples:
    left = scrape.status.certificate_seconds_left
    return [] if left is None else [((), left)]


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
    gauge("ready", "1 while the daemon is ready to serve, else 0.", lambda status: status.ready),
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
    gauge("uptime_seconds", "Seconds since the start of the daemon.", lambda status: status.uptime_seconds),
    gauge("arena_runs", "Daemon runs on this arena. More than 1: the arena was adopted.", lambda status: status.run),
    Family(
        "certificate_remaining_seconds",
        "gauge",
        "Seconds until the certificate of `[tls]` expires. Negative after it. Absent without TLS addresses.",
        samples=_certificate_seconds,
    ),
    gauge("namespaces", "Known namespaces. `kvdepotctl ls` lists them.", lambda status: len(status.namespaces)),
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
    counter("failed_calls", "Engines' calls that were refused or failed. `code`: gRPC status.", "code", CODES),
    counter(
        "internal_errors",
        "Exceptions in a callback or task. Each is a defect of kvdepot; the log has it. `place`: part of the daemon.",
        "place",
        PLACES,
    ),
    gauge("loads_off", "1 while an operator has switched loads off for all.", lambda status: status.switches.loads_off),
    gauge(
        "loads_off_namespaces",
        "Namespaces whose loads an operator has switched off by name.",
        lambda status: len(status.switches.loads_off_namespaces),
    ),
    gauge(
        "stores_off", "1 while an operator has switched stores off for all.", lambda status: status.switches.stores_off
    ),
    gauge(
        "stores_off_namespaces",
        "Namespaces whose stores an operator has switched off by name.",
        lambda status: len(status.switches.stores_off_namespaces),
    ),
    gauge("epoch_bump", "Bump counter of all namespaces that were not bumped by name.", lambda s: s.epochs.bump),
    gauge(
        "epoch_invalidated_namespaces",
        "Namespaces bumped by name since the last bump of all.",
        lambda s: len(s.epochs.invalidated_namespaces),
    ),
    counter(
        "stale_registrations",
        "Registrations of a namespace with an old bump counter. The answer names the right one.",
    ),
    gauge("draining", "1 while the daemon drains.", lambda status: status.switches.draining),
    counter(
        "failed_state_writes",
        "Failed writes of the state file; operator settings will be lost on restart.",
    ),
    counter(
        "failed_audit_lines",
        "Audit lines that the file did not take within 1 s; the daemon's log has them.",
    ),
)

_ENGINES = (
    gauge("sessions", "Attached engines.", lambda status: len(status.sessions)),
    gauge("ranks_attached", "Attached ranks of all engines.", lambda s: sum(one.ranks_attached for one in s.sessions)),
    gauge("leases", "Open leases of all engines.", lambda status: sum(one.leases for one in status.sessions)),
    gauge("lent_objects", "Objects lent to engines.", lambda s: sum(one.lent_objects for one in s.sessions)),
    gauge(
        "credit_bytes",
        "Bytes that all engines together may reserve and not yet commit.",
        lambda s: sum(one.credit_bytes for one in s.sessions),
    ),
    gauge(
        "credit_used_bytes",
        "Bytes that all engines have reserved and not committed.",
        lambda status: sum(one.credit_used_bytes for one in status.sessions),
    ),
    counter(
        "expired_leases",
        "Leases that passed their deadline. Their loans stay until they are released. `access`: kind of lease.",
        "access",
        ("read", "write"),
    ),
    counter(
        "refused_streams",
        "Attachments by streams that were refused. `reason`: its `share` of proxies is used, or it starts too many.",
        "reason",
        ("rate", "share"),
    ),
)

_LOOKUPS = (
    counter("locates", "Lookups (Locate calls), counted when they are answered. A request may look up several times."),
    counter(
        "named_sources",
        "Lookups of requests whose kv_transfer_params name another daemon. `unknown`: it is no peer that can be asked.",
        "outcome",
        ("peer", "unknown"),
    ),
    counter("locate_hits", "Lookups that were answered with an offer."),
    counter("located_tokens", "Tokens of all offers, counted at each lookup."),
    counter(
        "shortened_offers",
        "Lookups whose offer was shorter than the stored prefix, because the rest is late or computed faster.",
    ),
    counter(
        "misses",
        "Lookups without a hit, by the reason the first missing chunk could not be served.",
        "reason",
        LOOKUP_REASONS,
    ),
    counter(
        "locate_waits",
        "Lookups that waited for a shared tier. `outcome`: answered in time, late, or refused.",
        "outcome",
        LookedUp,
    ),
    tier_counter(
        "tier_probed_objects",
        "Probes of a shared tier for an object. `outcome`: sent (`asked`), and the answers.",
        "outcome",
        ("asked", "found", "absent", "unanswered"),
        kinds=OF_SEVERAL,
    ),
    tier_counter(
        "tier_probe_seconds", "Seconds until the answers to probes of a shared tier, in total.", kinds=OF_SEVERAL
    ),
)

_PROMPTS = (
    counter(PROMPT_TOKENS, "Tokens of the prompts that engines have admitted, counted at the end of each request."),
    Family(
        SERVED_TOKENS,
        "counter",
        "Of these: not computed. `source`: the engine's own cache, or the slowest tier of a load.",
        ("source",),
        (ENGINE, OTHER_SOURCE),
        or_tiers=True,
    ),
    counter(
        SAVED_SECONDS,
        "Seconds in which engines would have computed the loaded tokens, by the prefill rate that each has measured.",
    ),
    Family(
        LOAD_SECONDS,
        "histogram",
        "Time of a load that supplied tokens, by its slowest tier. Engines report it at the end of a request.",
        ("source",),
        (OTHER_SOURCE,),
        or_tiers=True,
    ),
    counter("invalid_token_reports", "Reports of engines that name more tokens than their prompts have."),
)

_LOADS = (
    counter(
        "acquires",
        "Loads that engines requested (Acquire calls). `outcome`: the answer.",
        "outcome",
        _names(AcquireOutcome),
    ),
    counter(
        "refused_loads",
        "Loads that were refused because of an operator setting, by reason.",
        "reason",
        ("loads_off", "draining", "epoch_bumped"),
    ),
    counter("hit_tokens", "Tokens that engines loaded instead of computing them, counted at the end of a load."),
    counter("released_loads", "Granted loads that ended, by whether the engine used them.", "use", ("used", "unused")),
    counter("acquired_objects", "Objects lent to engines for loads."),
    counter("granted_read_bytes", "Bytes lent to engines for loads."),
    counter("promoted_objects", "Objects read from lower tiers into RAM."),
    counter("promoted_bytes", "Bytes of these objects, before the codec."),
    tier_counter(
        "tier_reads", "Objects read from a tier for loads and prefetch. `outcome`: of the read.", "outcome", OUTCOMES
    ),
    Family(
        "tier_read_seconds",
        "histogram",
        "Time to read one object from a tier into RAM, including queueing.",
        ("tier",),
        tier_kinds=LOWER,
    ),
    counter("prefetched_objects", "Objects that prefetch read, or pinned in RAM."),
    counter("prefetched_bytes", "Bytes of these objects."),
    counter("prefetch_used_objects", "Prefetched objects that a load used."),
    counter("prefetch_used_bytes", "Bytes of these objects."),
    counter(
        "prefetch_wasted_objects",
        "Prefetched objects released without being loaded, by reason.",
        "reason",
        _WASTED,
    ),
    counter("prefetch_wasted_bytes", "Bytes of these objects.", "reason", _WASTED),
    counter("prefetch_refused_requests", "Requests without prefetch, because too many wait for it."),
)

_STORES = (
    counter(
        "reserved_objects",
        "Objects that engines asked to store (Reserve calls). `outcome`: the answer.",
        "outcome",
        _names(ReserveOutcome),
    ),
    counter(
        "refused_stores",
        "Objects that were not stored because of an operator setting, by reason.",
        "reason",
        ("stores_off", "draining"),
    ),
    counter(
        "budget_refusals",
        "Times that a user or tenant held its share of RAM. `call`: objects of `stores`, or whole `loads`.",
        "call",
        ("loads", "stores"),
    ),
    counter("granted_write_bytes", "Bytes lent to engines for stores."),
    counter(
        "committed_objects",
        "Objects that engines have written (Commit calls). `outcome`: the answer.",
        "outcome",
        _names(CommitOutcome),
    ),
    counter("abandoned_objects", "Reserved objects that engines abandoned."),
    counter("pruned_objects", "Objects of unfinished prefixes, dropped because no request can resume at them."),
    counter("checksummed_objects", "Objects whose checksum was taken after their commit."),
)

_RAM = (
    counter(
        "evicted_objects",
        "Objects evicted from RAM. `reason`: high watermark, room for a store, quota, or nodes of the index.",
        "reason",
        ("watermark", "room", "quota", "nodes"),
    ),
    counter("evicted_bytes", "Bytes of these objects."),
    counter(
        "adopted_objects",
        "Objects in the arena at the start, counted when their path is known: adopted, or why they were dropped.",
        "outcome",
        ("adopted", "namespace_repeated", "stored_again", *ADOPTION_REASONS[1:]),
    ),
    counter("verified_objects", "Adopted objects that matched their checksum."),
    counter("doubted_objects", "Objects of RAM of which an engine said that they do not match their checksums."),
    counter("corrupt_objects", "Objects of RAM that did not match their checksum."),
    counter(
        "holder_failures",
        "Times that no process was found to hold the arena for the next daemon, which would begin with an empty one.",
    ),
    counter(
        "torn_objects",
        "Objects of RAM that were dropped, because the links between their extents were damaged.",
    ),
    counter(
        "dropped_objects",
        "Objects that became unreachable because an ancestor was deleted, by reason.",
        "reason",
        ("below_corrupt", "below_drifted", "below_dropped", "orphaned"),
    ),
    counter(
        "audits",
        "Recomputed objects that were compared with RAM (`[policy] audit_sample`), by outcome.",
        "outcome",
        AUDIT_OUTCOMES,
    ),
    counter("leaked_objects", "Objects whose memory is not reused, because a process may still write to it."),
)

SUBJECTS: Final[tuple[tuple[str, tuple[Family, ...]], ...]] = (
    ("Daemon", _DAEMON),
    ("Engines", _ENGINES),
    ("Prompts", _PROMPTS),
    ("Lookups", _LOOKUPS),
    ("Loads", _LOADS),
    ("Stores", _STORES),
    ("RAM", _RAM),
    ("Peers", PEERS),
    ("Tiers", TIERS),
    ("Quotas", QUOTAS),
)
FAMILIES: Final = tuple(family for _, families in SUBJECTS for family in families)
