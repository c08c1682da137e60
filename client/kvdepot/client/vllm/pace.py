"""How long the engine takes to compute a token of a prompt: what the time of a load is compared with.

Of each request that computes enough of its prompt, from the step in which it begins to the one
that knows its first token: so whatever else the engine does at the same time counts, as it would
for the next one. The figure is the median token's, over the last requests: a step that compiles
something, or a pause, does not move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.client.vllm.requests import EngineRequest, RequestState

TOKENS_MIN: Final = 256
"""Computed by a request that counts: below, what every step costs hides what a token does."""
REQUESTS_MIN: Final = 3
"""Seen before anything is said."""
_REQUESTS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class _Begun:
    request: EngineRequest
    at: float
    tokens: int  # of the prompt, to be computed
    preemptions: int


class Pace:
    """Of one engine; on its scheduler's thread. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._seen: deque[tuple[float, int]] = deque(maxlen=_REQUESTS_MAX)  # (seconds a token, tokens)
        self.token_seconds = 0.0  # 0: not known yet

    def step(self, new_requests: Iterable[Any], requests: Mapping[str, RequestState]) -> None:
        """A step is scheduled. `new_requests`: vLLM's NewRequestData of those that are in one for the first time.

        Runners of vLLM's second version get there those, too, that go on after a preemption. One that has had its
        first token says nothing of what is computed until the next one.
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
        """It is over, at its first token perhaps."""
        begun = self._begun.get(request.request_id)
        if begun is not None:
            self._look(begun)
            self._begun.pop(request.request_id, None)

    def _look(self, begun: _Begun) -> None:
        """Whether its first token is known now."""
        request = begun.request
        if request.num_preemptions != begun.preemptions:
            del self._begun[request.request_id]  # it begins anew, at what is not known here
        elif _has_answered(request):
            del self._begun[request.request_id]
            self._seen.append(((self._clock() - begun.at) / begun.tokens, begun.tokens))
            if len(self._seen) >= REQUESTS_MIN:
                self.token_seconds = self._median()

    def _median(self) -> float:
        """Of the tokens, not of the requests: short ones say little of what a long one takes."""
        left = sum(tokens for _, tokens in self._seen) / 2
        for token_seconds, tokens in sorted(self._seen):
            left -= tokens
            if left <= 0:
                return token_seconds
        raise AssertionError("half of them come before all of them")


def _has_answered(request: EngineRequest) -> bool:
    return request.num_tokens > request.num_prompt_tokens
