"""The figures of the live page: the verdict, the last hour, tiers, and the latest requests.

The HTTP port has no identity, so nothing here names a namespace, a model, an engine or a request (ADR 74).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.control import Switch, switch_states
from kvdepot.core.explanation import answer, fix_of
from kvdepot.core.health import DISABLED, HOUR, off_for
from kvdepot.core.hit_rate import PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS, HitRate
from kvdepot.core.misses import MissReason
from kvdepot.core.records import RequestRecord
from kvdepot.core.report import DaemonStatus, SessionStatus, TierStatus, WhatIfStatus
from kvdepot.core.verdict import Problem
from kvdepot.server.depot.counters import Counters
from kvdepot.server.observe.metrics import by_family
from kvdepot.server.observe.verdicts import History

_REQUESTS: Final = 10
_SAMPLE_SECONDS: Final = 10.0
_MINUTES: Final = 60
_MISSES: Final = "misses"
_LOADED_BYTES: Final = "granted_read_bytes"
_STORED_BYTES: Final = "granted_write_bytes"
_REASONS: Final = frozenset(MissReason)
_NAMING: Final = {"LOADS_OFF": Switch.LOADS, "STORES_OFF": Switch.STORES}
"""Problems whose texts may have ids of namespaces."""


class LiveFigures:
    """The figures of the live page. The last hour is a sample each 10 s of the counters of traffic: bounded.

    `latest` returns the records of as many requests, the latest first.
    """

    def __init__(
        self, counters: Counters, clock: Callable[[], float], status: Callable[[], DaemonStatus],
        latest: Callable[[int], Iterable[RequestRecord]],
    ) -> None:  # fmt: skip
        self._counters = counters
        self._status = status
        self._latest = latest
        families = (PROMPT_TOKENS, SERVED_TOKENS, SAVED_SECONDS, _MISSES, _LOADED_BYTES, _STORED_BYTES)
        self._history = History(families, HOUR, clock, every=_SAMPLE_SECONDS)

    def note(self) -> None:
        """Take a sample, if it is due. Called more often than every 10 s."""
        if self._history.due:
            self._history.note(by_family(self._counters.snapshot()))

    def figures(self) -> dict[str, Any]:
        """Return what the page shows, for JSON. Units are in the names."""
        status = self._status()
        sources = {tier.name for tier in status.tiers}
        return {
            "version": status.daemon_version,
            "uptime_seconds": status.uptime_seconds,
            "verdict": status.health.verdict.value,
            "problems": [_problem(problem, status) for problem in status.health.problems],
            "last_hour": self._last_hour(),
            "tiers": [_tier(tier) for tier in status.tiers],
            "engines": _engines(status.sessions),
            "requests": [_request(one, sources) for one in self._latest(_REQUESTS)],
        }

    def _last_hour(self) -> dict[str, Any]:
        """Return the sums of the hour, and what happened in each of its minutes, the earliest first."""
        hour: dict[str, float] = {}
        minutes: list[dict[str, float]] = [{} for _ in range(_MINUTES)]
        for seconds_ago, grown in self._history.steps(by_family(self._counters.snapshot())):
            minute = minutes[_MINUTES - 1 - min(int(seconds_ago // 60), _MINUTES - 1)]
            for family, labels in grown.items():
                for label, value in labels.items():
                    name = f"{family}.{label}" if label else family
                    hour[name] = hour.get(name, 0.0) + value
                    minute[name] = minute.get(name, 0.0) + value
        return {"hit_rate": _hit_rate(hour), "misses": _misses(hour), "minutes": [_minute(one) for one in minutes]}


def _engines(sessions: Sequence[SessionStatus]) -> dict[str, int]:
    return {
        "attached": len(sessions),
        "incomplete": sum(one.ranks_attached < one.world_size for one in sessions),
        "ranks": sum(one.world_size for one in sessions),
        "ranks_attached": sum(one.ranks_attached for one in sessions),
    }


def _hit_rate(grown: Mapping[str, float]) -> dict[str, Any]:
    rate = HitRate.of(grown)
    return {
        "prompt_tokens": rate.prompt_tokens,
        "percent": rate.percent if rate.prompt_tokens else None,
        "saved_seconds": rate.saved_seconds,
        "percent_by_source": {source: rate.percent_of(tokens) for source, tokens in rate.served_tokens.items()},
    }


def _misses(grown: Mapping[str, float]) -> dict[str, float]:
    """Return the lookups that missed by reason, the most frequent first."""
    beginning = f"{_MISSES}."
    found = [(name.removeprefix(beginning), value) for name, value in grown.items() if name.startswith(beginning)]
    return dict(sorted(found, key=lambda one: (-one[1], one[0])))


def _minute(grown: Mapping[str, float]) -> dict[str, float | None]:
    rate = HitRate.of(grown)
    return {
        "percent": rate.percent if rate.prompt_tokens else None,
        "loaded_bytes": grown.get(_LOADED_BYTES, 0.0),
        "stored_bytes": grown.get(_STORED_BYTES, 0.0),
    }


def _problem(problem: Problem, status: DaemonStatus) -> dict[str, Any]:
    message, fix = problem.message, problem.fix
    if problem.code in _NAMING:
        state = switch_states(status.switches)[_NAMING[problem.code]]
        if not state.off:
            count = len(state.off_namespaces)
            message, fix = f"for {count} namespace{'s' * (count != 1)}{off_for(state)}", "kvdepotctl health"
    return {"code": problem.code, "error": problem.error, "message": message, "fix": fix, "anchor": problem.anchor}


def _tier(tier: TierStatus) -> dict[str, Any]:
    return {
        "name": tier.name,
        "state": "disabled" if tier.breaker in DISABLED else tier.state,
        "used_bytes": tier.used_bytes,
        "capacity_bytes": tier.capacity_bytes,
        "objects": tier.objects,
        "what_if": None if tier.what_if is None else _what_if(tier.what_if),
    }


def _what_if(found: WhatIfStatus) -> dict[str, Any]:
    measured = found.measured_hit_ratio
    return {
        "requests": found.requests,
        "requests_min": found.requests_min,
        "window_seconds": found.window_seconds,
        "measured_percent": None if measured is None else 100 * measured,
        "upper_bound": found.upper_bound,
        "points": [
            {
                "factor": point.factor,
                "capacity_bytes": point.capacity_bytes,
                "percent": None if point.hit_ratio is None else 100 * point.hit_ratio,
                "full": point.full,
                "sampled_requests": point.sampled_requests,
            }
            for point in found.points
        ],
    }


def _request(record: RequestRecord, sources: set[str]) -> dict[str, Any]:
    """Return a request without its ids. Texts that its engine has written are shown only if they are known words."""
    shown = _without_names(record, sources)
    end = shown.end
    return {
        "seconds_ago": record.began_seconds_ago,
        "outcome": record.outcome.value,
        "prompt_tokens": end.prompt_tokens if end else 0,
        "local_tokens": end.local_tokens if end else 0,
        "loaded_tokens": end.loaded_tokens if end else 0,
        "source": end.source if end else "",
        "reason": end.miss if end else "",
        "answer": answer(shown),
        "fix": fix_of(shown),
    }


def _without_names(record: RequestRecord, sources: set[str]) -> RequestRecord:
    """Return a record that can be explained to everybody: of no other namespace, and without an engine's own words."""
    lookup, end = record.lookup, record.end
    if lookup is not None and lookup.miss == MissReason.OTHER_NAMESPACE:
        lookup = replace(lookup, miss="")
    if end is not None:
        miss = end.miss if not end.miss or end.miss in _REASONS else MissReason.OTHER
        miss = MissReason.UNKNOWN if miss == MissReason.OTHER_NAMESPACE else miss
        end = replace(end, source=end.source if end.source in sources else "", miss=miss)
    return replace(record, lookup=lookup, end=end)
