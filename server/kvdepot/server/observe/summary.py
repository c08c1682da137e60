"""The daemon in one line, for /metrics/summary."""

from __future__ import annotations

from kvdepot.core.control import switch_states
from kvdepot.core.hit_rate import HitRate
from kvdepot.core.report import DaemonStatus, SwitchesStatus, TierStatus
from kvdepot.core.units import duration_text, size_text


def summary_line(status: DaemonStatus) -> str:
    """Return readiness, tiers, engines, and the hit rate since the start."""
    ready = "ready" if status.ready else f"not ready ({status.reason or 'no reason given'})"
    parts = [
        f"kvdepotd {status.daemon_version} {ready}, up {duration_text(status.uptime_seconds)}",
        ", ".join(_tier(tier) for tier in status.tiers),
        f"{len(status.sessions)} engine{'s' * (len(status.sessions) != 1)}",
        f"hit rate {HitRate.of(status.counters)}",
    ]
    return "; ".join(parts + _switched_off(status.switches))


def _switched_off(switches: SwitchesStatus) -> list[str]:
    texts = []
    for switch, state in switch_states(switches).items():
        if state.anywhere_off:
            whom = "" if state.off else f" for {len(state.off_namespaces)} namespaces"
            texts.append(f"{switch} off{whom}")
    return texts


def _tier(tier: TierStatus) -> str:
    used = f"{tier.name} {size_text(tier.used_bytes)} of {size_text(tier.capacity_bytes)}"
    state = tier.state if tier.state not in ("ready", "") else ""
    if tier.breaker in ("open", "probing"):
        state = "disabled"
    return used + (f" {state}" if state else "") + (f" ({tier.reason})" if state and tier.reason else "")
