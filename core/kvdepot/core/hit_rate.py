"""The token hit rate: how much of their prompts engines had not to compute, and what supplied it.

The daemon's counters and the metrics of engines have the same names. So one number is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.core.units import count_text, duration_text

PROMPT_TOKENS: Final = "prompt_tokens"
SERVED_TOKENS: Final = "served_tokens"
"""By source: `ENGINE`, or the slowest tier that had to supply something."""
SAVED_SECONDS: Final = "saved_prefill_seconds"
LOAD_SECONDS: Final = "load_seconds"
"""Histogram of the loads that supplied tokens, by source."""
ENGINE: Final = "engine"
"""The source of tokens that the engine's own cache had."""
OTHER_SOURCE: Final = "other"


@dataclass(frozen=True, slots=True)
class HitRate:
    """What counters, or their growth, say of prompts."""

    prompt_tokens: float
    served_tokens: Mapping[str, float]  # by source: the engine's own cache first, then RAM
    saved_seconds: float  # of prefill, by tokens that were loaded

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> HitRate:
        """Return the hit rate of these counters, or of their growth in some time."""
        beginning = f"{SERVED_TOKENS}."
        served = {name.removeprefix(beginning): value for name, value in counters.items() if name.startswith(beginning)}
        order = sorted(served, key=lambda source: (source != ENGINE, source != "ram", source))
        return cls(
            counters.get(PROMPT_TOKENS, 0.0),
            {source: served[source] for source in order if served[source]},
            counters.get(SAVED_SECONDS, 0.0),
        )

    @property
    def percent(self) -> float:
        return self.percent_of(sum(self.served_tokens.values()))

    @property
    def prefill_rate(self) -> float:
        """Return the tokens a second that engines compute, by what loads saved them; 0 if nothing was saved yet."""
        loaded = sum(tokens for source, tokens in self.served_tokens.items() if source not in (ENGINE, OTHER_SOURCE))
        return loaded / self.saved_seconds if self.saved_seconds else 0.0

    def percent_of(self, tokens: float) -> float:
        """Return a number of tokens as a part of the prompts."""
        return 100 * tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        """Return "71 % of 1.2 M tokens (engine 40 %, ram 28 %), 4 min 50 s of prefill saved"."""
        if not self.prompt_tokens:
            return "unknown: no prompt has ended yet"
        sources = ", ".join(
            f"{source} {self.percent_of(tokens):.0f} %" for source, tokens in self.served_tokens.items()
        )
        text = f"{self.percent:.0f} % of {count_text(self.prompt_tokens)} tokens" + (f" ({sources})" if sources else "")
        return text + (f", {duration_text(self.saved_seconds)} of prefill saved" if self.saved_seconds >= 0.5 else "")
