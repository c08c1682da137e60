"""The verdict on a daemon: one word, and the problems for it, each with a code.

The code of a problem is the name of an alert (`TIER_DEGRADED`, `KVDepotTierDegraded`), and the anchor of its entry in
docs/operations.md (`tier-degraded`). The daemon computes the verdict. All who show it get the same one with the status.
Errors mean that data is damaged, or that the daemon serves nothing. No problem means that requests fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvdepot.core.control import Switch, SwitchState, switch_states
from kvdepot.core.report import DaemonStatus
from kvdepot.core.units import duration_text
from kvdepot.core.verdict import PROBLEMS_MAX, Health, Problem, Verdict

MINUTES_15: Final = 900.0
HOUR: Final = 3_600.0
DAY: Final = 86_400.0
LATE_SECONDS: Final = 0.25
"""Of a tick of the event loop."""
DEGRADED_STATES: Final = frozenset({"degraded", "read-only", "offline"})
DISABLED: Final = frozenset({"open", "probing"})
"""States of the breaker of a tier that is not used."""
CERTIFICATE_SECONDS: Final = 7 * DAY
"""Before its end a certificate has to be renewed."""
_OF_PEERS: Final = {
    "not_allowed": "name the peer in [tls] allow_peers",
    "limit": "see docs/peers.md: connections are limited",
}
"""What to do, by the reason of a refusal. Those without a certificate do not count: probes of ports make some."""
_IDS_SHOWN: Final = 3
_ELECTION_SECONDS: Final = 60.0
"""After so long a node knows the janitor of a shared directory."""
_RATIO_COUNT_MIN: Final = 100.0
"""A share of fewer events says nothing."""
_BUDGETS: Final = frozenset({"requests", "read"})
_NO_KEY: Final = frozenset({"unkeyed", "unknown_key"})
_NO_DAMAGE: Final = frozenset({"torn", "forged", *_NO_KEY})
"""Reasons of `tier_damaged_objects` that are no fault of a device: a crash, another writer, another key."""

Growth = Callable[[str, float], Mapping[str, float]]
"""Counter family, seconds -> by label, by how much its counters grew in that time. Only those that grew."""


def health(status: DaemonStatus, growth: Growth) -> Health:
    """Return the verdict on this status. `growth`: how its counters have grown lately."""
    problems = [
        Problem(code, code in ERRORS, *texts) for code, check in CHECKS.items() for texts in check(status, growth)
    ]
    if not problems:
        return Health(Verdict.OK)
    return Health(Verdict.ERR if problems[0].error else Verdict.WARN, tuple(problems[:PROBLEMS_MAX]))


Texts = Iterator[tuple[str, str]]
"""Message and fix of each problem of a check."""


def _not_ready(status: DaemonStatus, _: Growth) -> Texts:
    if not status.ready:
        yield status.reason or "no reason given", "kvdepotctl resume" if status.switches.draining else ""


def _loads_off(status: DaemonStatus, _: Growth) -> Texts:
    yield from _switched_off(Switch.LOADS, status)


def _stores_off(status: DaemonStatus, _: Growth) -> Texts:
    yield from _switched_off(Switch.STORES, status)


def _switched_off(switch: Switch, status: DaemonStatus) -> Texts:
    state = switch_states(status.switches)[switch]
    ids = [one.hex()[:12] for one in state.off_namespaces]
    if state.off:
        yield f"for all namespaces{off_for(state)}", f"kvdepotctl {switch} on"
    elif ids:
        more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
        yield f"for {', '.join(ids[:_IDS_SHOWN])}{more}{off_for(state)}", f"kvdepotctl {switch} on {ids[0]}"


def off_for(state: SwitchState) -> str:
    """Return the end of a message that says since when a switch is off; empty if that is not known."""
    return f", for {duration_text(state.off_seconds)}" if state.off_seconds else ""


def _certificate_expires(status: DaemonStatus, _: Growth) -> Texts:
    left = status.certificate_seconds_left
    if left is not None and left < CERTIFICATE_SECONDS:
        when = f"expires in {duration_text(left)}" if left > 0 else f"expired {duration_text(-left)} ago"
        yield f"the certificate of [tls] {when}", "renew the file; the daemon reads it again"


def _peers_refused(_: DaemonStatus, growth: Growth) -> Texts:
    refused = growth("peer_refused_connections", MINUTES_15)
    for reason, fix in _OF_PEERS.items():
        if times := refused.get(reason):
            yield f"{_some(times, 'refusal')} of peers in the last 15 min: {reason}", fix
    servers = growth("peer_servers", MINUTES_15)
    if ended := servers.get("crashed", 0.0) + servers.get("killed", 0.0):
        yield f"the process that sends to peers failed {_some(ended, 'time')} in the last 15 min", ""


def _peer_unreachable(status: DaemonStatus, _: Growth) -> Texts:
    """Where a whole tier cannot be used, its own problem says so."""
    for tier in status.tiers:
        others = [peer for peer in tier.peers if peer.state != "itself"]
        out = [peer for peer in others if peer.state == "disabled"]
        if out and tier.state not in DEGRADED_STATES and tier.breaker not in DISABLED:
            more = f", and {len(out) - 1} more" if len(out) > 1 else ""
            yield f"{tier.name}: of {len(others)} peers, {out[0].address} cannot be asked{more}: {out[0].reason}", ""


def _tier_degraded(status: DaemonStatus, _: Growth) -> Texts:
    for tier in status.tiers:
        if tier.state in DEGRADED_STATES and tier.breaker not in DISABLED:
            yield f"{tier.name}: {tier.reason or tier.state}", ""


def _tier_disabled(status: DaemonStatus, _: Growth) -> Texts:
    for tier in status.tiers:
        if tier.breaker in DISABLED:
            yield f"{tier.name}: {tier.reason or 'its path fails or hangs'}", ""


def _workers_hang(_: DaemonStatus, growth: Growth) -> Texts:
    for tier, workers in _of_tiers(growth("io_workers", MINUTES_15), lambda event: event == "abandoned").items():
        yield f"{tier}: {_some(workers, 'I/O worker')} hung in the last 15 min", ""


def _damaged_objects(status: DaemonStatus, growth: Growth) -> Texts:
    damaged = growth("tier_damaged_objects", HOUR)
    peers = {tier.name for tier in status.tiers if tier.kind == "peer"}
    for tier, objects in _of_tiers(damaged, lambda reason: reason not in _NO_DAMAGE).items():
        some = _some(objects, "damaged object")
        if tier in peers:
            yield f"{tier}: {some} came from its peers in the last hour", "kvdepotctl peers names the peer: see its log"
        else:
            yield f"{tier}: {some} in the last hour", ""


def _bucket_budget_spent(_: DaemonStatus, growth: Growth) -> Texts:
    for tier in _of_tiers(growth("bucket_refused_jobs", HOUR), lambda budget: budget in _BUDGETS):
        yield f"{tier}: a budget of its bucket for this day was too small in the last hour", ""


def _forged_objects(_: DaemonStatus, growth: Growth) -> Texts:
    damaged = growth("tier_damaged_objects", HOUR)
    for tier, objects in _of_tiers(damaged, lambda reason: reason == "forged").items():
        yield f"{tier}: {_some(objects, 'object')} in the last hour that nobody with the key wrote", ""


def _other_keys(_: DaemonStatus, growth: Growth) -> Texts:
    damaged = growth("tier_damaged_objects", HOUR)
    for tier, objects in _of_tiers(damaged, lambda reason: reason in _NO_KEY).items():
        yield f"{tier}: {_some(objects, 'object')} of other keys in the last hour", ""


def _corrupt_memory(_: DaemonStatus, growth: Growth) -> Texts:
    for objects in growth("corrupt_objects", DAY).values():
        yield f"{_some(objects, 'object')} of RAM did not match the checksum in the last day", ""


def _drift(_: DaemonStatus, growth: Growth) -> Texts:
    if objects := growth("audits", DAY).get("drifted"):
        yield f"{_some(objects, 'stored object')} differed from recomputed ones in the last day", ""


def _loop_late(_: DaemonStatus, growth: Growth) -> Texts:
    ticks = growth("loop_ticks", MINUTES_15)
    late, total = ticks.get("late", 0.0), sum(ticks.values())
    if total >= _RATIO_COUNT_MIN and late > 0.01 * total:
        yield f"{100 * late / total:.0f} % of the ticks were late by more than {LATE_SECONDS} s in the last 15 min", ""


def _defect(_: DaemonStatus, growth: Growth) -> Texts:
    calls = growth("failed_calls", HOUR).get("INTERNAL", 0.0)
    callbacks, others = growth("io_failed_callbacks", HOUR), growth("internal_errors", HOUR)
    if errors := calls + sum(callbacks.values()) + sum(others.values()):
        yield f"{_some(errors, 'internal error')} in the last hour", "report the traceback in the daemon's log"


def _leases_expire(_: DaemonStatus, growth: Growth) -> Texts:
    if leases := sum(growth("expired_leases", HOUR).values()):
        yield f"{_some(leases, 'lease')} passed the deadline in the last hour", ""


def _leaked_objects(_: DaemonStatus, growth: Growth) -> Texts:
    for objects in growth("leaked_objects", DAY).values():
        yield f"memory of {_some(objects, 'object')} is not reused, because a process may still write to it", ""


def _offers_late(_: DaemonStatus, growth: Growth) -> Texts:
    misses, lookups = growth("misses", MINUTES_15), growth("locates", MINUTES_15).get("", 0.0)
    late = misses.get("not_in_time", 0.0) + misses.get("probe_late", 0.0)
    if lookups >= _RATIO_COUNT_MIN and late > 0.1 * lookups:
        yield f"{100 * late / lookups:.0f} % of the lookups of the last 15 min got nothing in time", ""


def _stores_refused(_: DaemonStatus, growth: Growth) -> Texts:
    reserved = growth("reserved_objects", MINUTES_15)
    asked = sum(count for outcome, count in reserved.items() if outcome not in ("present", "pending"))
    refused = reserved.get("later", 0.0) + reserved.get("no_room", 0.0)
    if asked >= _RATIO_COUNT_MIN and refused > 0.2 * asked:
        yield f"{100 * refused / asked:.0f} % of the stores of the last 15 min got no room or credit", ""


def _writes_dropped(_: DaemonStatus, growth: Growth) -> Texts:
    written = _of_tiers(growth("tier_writes", MINUTES_15), lambda _: True)
    dropped = growth("tier_writes_dropped", MINUTES_15)
    all_dropped = _of_tiers(dropped, lambda _: True)
    for tier, objects in _of_tiers(dropped, lambda reason: reason in ("queue_full", "budget")).items():
        total = written.get(tier, 0.0) + all_dropped[tier]
        if total >= _RATIO_COUNT_MIN and objects > 0.5 * total:
            yield f"{tier}: {100 * objects / total:.0f} % of the writes of the last 15 min were dropped", ""


def _no_janitor(status: DaemonStatus, _: Growth) -> Texts:
    for tier in status.tiers:
        if tier.node and not tier.janitor and status.uptime_seconds > _ELECTION_SECONDS:
            yield f"{tier.name}: no node is the janitor, so soon no node can write", ""


def _some(count: float, noun: str) -> str:
    return f"{count:.0f} {noun}{'s' * (count != 1)}"


def _of_tiers(grown: Mapping[str, float], counts: Callable[[str], bool]) -> dict[str, float]:
    """Add up counters with labels `tier/value`, of the values that count."""
    found: dict[str, float] = {}
    for label, count in grown.items():
        tier, _, value = label.rpartition("/")
        if counts(value):
            found[tier] = found.get(tier, 0.0) + count
    return found


CHECKS: Final[Mapping[str, Callable[[DaemonStatus, Growth], Texts]]] = {
    "NOT_READY": _not_ready,
    "DAMAGED_OBJECTS": _damaged_objects,
    "FORGED_OBJECTS": _forged_objects,
    "CORRUPT_MEMORY": _corrupt_memory,
    "DRIFT": _drift,
    "LOADS_OFF": _loads_off,
    "STORES_OFF": _stores_off,
    "TIER_DISABLED": _tier_disabled,
    "TIER_DEGRADED": _tier_degraded,
    "PEER_UNREACHABLE": _peer_unreachable,
    "WORKERS_HANG": _workers_hang,
    "NO_JANITOR": _no_janitor,
    "OTHER_KEYS": _other_keys,
    "TLS_EXPIRES": _certificate_expires,
    "PEERS_REFUSED": _peers_refused,
    "LOOP_LATE": _loop_late,
    "DEFECT": _defect,
    "LEASES_EXPIRE": _leases_expire,
    "LEAKED_OBJECTS": _leaked_objects,
    "OFFERS_LATE": _offers_late,
    "STORES_REFUSED": _stores_refused,
    "WRITES_DROPPED": _writes_dropped,
    "BUCKET_BUDGET_SPENT": _bucket_budget_spent,
}
"""By code, in the order of importance. The first five are errors."""
ERRORS: Final = frozenset(list(CHECKS)[:5])
EVENTS: Final = (
    "audits", "bucket_refused_jobs", "corrupt_objects", "expired_leases", "failed_calls", "internal_errors",
    "io_failed_callbacks", "io_workers", "leaked_objects", "peer_refused_connections", "peer_servers",
    "tier_damaged_objects",
)  # fmt: skip
"""Counter families of which the growth of up to a day is asked for."""
FLOWS: Final = ("locates", "loop_ticks", "misses", "reserved_objects", "tier_writes", "tier_writes_dropped")
"""Counter families of which the growth of 15 minutes is asked for."""
