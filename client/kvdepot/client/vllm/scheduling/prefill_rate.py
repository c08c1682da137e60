"""The prefill rate: how long the engine takes per token of a prompt. The time of a load is compared with it.

It is measured for each request that computes enough of its prompt, from its first step to the step that knows its first
token. So the engine's other work counts, as it will for the next request. The figure is the median per token over the
last requests, so a step that compiles something, or a pause, does not move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.client.vllm.base.engine_types import EngineRequest
from kvdepot.client.vllm.scheduling.requests import RequestState

TOKENS_MIN: Final = 256
"""Tokens that a request has to compute to count. With fewer, the fixed cost of a step hides the cost of a token."""
REQUESTS_MIN: Final = 3
"""Measured requests before there is a figure."""
TOKEN_SECONDS_GUESS: Final = 0.001
"""Of an engine of which nothing is measured yet: a slow one. The first requests wait rather too long than in vain."""
_REQUESTS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class _Begun:
    request: EngineRequest
    at: float
    tokens: int  # of the prompt, to be computed
    preemptions: int


class PrefillRate:
    """The prefill rate of one engine. Used on its scheduler's thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._seen: deque[tuple[float, int]] = deque(maxlen=_REQUESTS_MAX)  # (seconds a token, tokens)
        self.token_seconds = 0.0  # 0: not known yet
        self._likely_token_seconds = TOKEN_SECONDS_GUESS

    def likely_seconds(self, tokens: int) -> float:
        """Return how long the engine would take to compute so many tokens, also if too little is measured."""
        return tokens * self._likely_token_seconds

    def step(self, new_requests: Iterable[Any], requests: Mapping[str, RequestState]) -> None:
        """Note a scheduled step. `new_requests`: vLLM's NewRequestData of requests in their first step.

        V2 runners also get requests there that continue after a preemption. A request that has had its first token is
        not measured.
        """
        for begun in list(self._begun.values()):
            self._look(begun)
        for new in new_requests:
            state = requests.get(new.req_id)
            if state is not None and not state.excluded and not _has_answered(state.request):
                tokens = state.request.num_prompt_tokens - new.num_computed_tokens
                if tokens >= TOKENS_MIN:
                    begun = _Begun(state.request, self._clock(), tokens, state.request.num_preemptions)
                    self._begun[new.req_id] = begun

    def finished(self, request: EngineRequest) -> None:
        """Note the end of a request, perhaps at its first token."""
        begun = self._begun.get(request.request_id)
        if begun is not None:
            self._look(begun)
            self._begun.pop(request.request_id, None)

    def _look(self, begun: _Begun) -> None:
        """Measure a request if its first token is known."""
        request = begun.request
        if request.num_preemptions != begun.preemptions:
            del self._begun[request.request_id]  # it begins again, at an unknown token
        elif _has_answered(request):
            del self._begun[request.request_id]
            self._seen.append(((self._clock() - begun.at) / begun.tokens, begun.tokens))
            self._likely_token_seconds = self._median()
            if len(self._seen) >= REQUESTS_MIN:
                self.token_seconds = self._likely_token_seconds

    def _median(self) -> float:
        """Return the median of the tokens, not of the requests: short requests say little about long ones."""
        tokens_left = sum(tokens for _, tokens in self._seen) / 2
        for token_seconds, tokens in sorted(self._seen):
            tokens_left -= tokens
            if tokens_left <= 0:
                return token_seconds
        raise AssertionError("half of them come before all of them")


def _has_answered(request: EngineRequest) -> bool:
    return request.num_tokens > request.num_prompt_tokens
