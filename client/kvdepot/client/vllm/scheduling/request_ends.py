"""The ends of requests, as the daemon learns them, with the tokens that they asked for and had not to compute.

A prompt is counted once, at the request's end, as the engine first admitted it: its own cache, kvdepot's load, and the
rest, which it computed. A request that was never admitted counts nothing, and what is loaded again after a preemption
neither.

A report has what has been counted since the last one. So the prompts of an outage are in the first report after it.
Used on the scheduler's thread only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kvdepot.client.vllm.base.metadata import NUMBERS
from kvdepot.core.calls import TokenReport
from kvdepot.core.hit_rate import ENGINE, PROMPT_TOKENS, SAVED_SECONDS, SERVED_TOKENS, HitRate

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.scheduling.prefill_rate import PrefillRate
    from kvdepot.client.vllm.scheduling.requests import RequestState

_ENGINE: Final = f"{SERVED_TOKENS}.{ENGINE}"


class RequestEnds:
    """Counts prompts, and reports the ends of requests."""

    def __init__(self, session: DepotSession, prefill_rate: PrefillRate) -> None:
        self._session = session
        self._prefill_rate = prefill_rate
        self.counts: defaultdict[str, float] = defaultdict(float)  # `family` or `family.label`; they only rise
        self._reported: dict[str, float] = {}
        self._unpriced_tokens = 0  # loaded before the prefill rate was known

    def admitted(self, state: RequestState, external_tokens: int) -> None:
        """Note the first admission of a request: what its engine had itself, and whether kvdepot begins to load."""
        if not state.prompt_tokens:
            state.prompt_tokens = state.request.num_prompt_tokens
            state.engine_tokens = state.local_tokens
            state.loads_first = external_tokens > 0

    def count(self, state: RequestState) -> None:
        """Count the prompt of a request that is over. Called once a request."""
        engine = state.engine_tokens
        if state.loads_first and state.first_load is not None:
            source, loaded, reused = state.first_load
            engine += reused
            self.counts[f"{SERVED_TOKENS}.{source}"] += loaded
            self._unpriced_tokens += loaded
        self.counts[PROMPT_TOKENS] += state.prompt_tokens
        self.counts[_ENGINE] += engine
        if self._prefill_rate.token_seconds:
            self.counts[SAVED_SECONDS] += self._unpriced_tokens * self._prefill_rate.token_seconds
            self._unpriced_tokens = 0

    def send(self, state: RequestState) -> None:
        """Tell the daemon of the end, after the request's commits."""
        self._session.end_request(state.depot_id, state.end, self._report())

    def _report(self) -> TokenReport:
        grown = HitRate.of({name: value - self._reported.get(name, 0.0) for name, value in self.counts.items()})
        self._reported = dict(self.counts)
        served = {source: round(tokens) for source, tokens in grown.served_tokens.items()}
        return TokenReport(
            next(NUMBERS), round(grown.prompt_tokens), served.pop(ENGINE, 0), served, grown.saved_seconds
        )
