"""What engines report of their prompts: tokens asked for, what supplied them, and how long loads took.

An old engine reports nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from kvdepot.core.calls import RequestEnd, TokenReport
from kvdepot.core.hit_rate import ENGINE, OTHER_SOURCE
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.sessions.session import Session


class TokenReports:
    """Adds the reports of all engines up. Engines are not trusted: their words become no labels."""

    def __init__(self, counters: Counters, tiers: Collection[str]) -> None:
        self._counters = counters
        self._tiers = tiers

    def count(self, session: Session, report: TokenReport, end: RequestEnd) -> None:
        """Count a report and the load of its request, once.

        Ignore a report that cannot be true, such as more supplied than asked for.
        """
        if report.number <= session.token_report:
            return
        session.token_report = report.number
        if not report.credible:
            self._counters.add("invalid_token_reports")
            return
        self._counters.add("prompt_tokens", report.prompt_tokens)
        self._counters.add(f"served_tokens.{ENGINE}", report.engine_tokens)
        for tier, tokens in report.loaded_tokens.items():
            self._counters.add(f"served_tokens.{self._source(tier)}", tokens)
        self._counters.add("saved_prefill_seconds", report.saved_seconds)
        if end.loaded_tokens and end.source:
            self._counters.observe(f"load_seconds.{self._source(end.source)}", end.load_seconds)

    def _source(self, tier: str) -> str:
        return tier if tier in self._tiers else OTHER_SOURCE
