"""How many draft tokens the engine accepts, apart for requests with loaded KV and for all others.

Draft layers with wrong bytes leave every token right, and cost accepted drafts only. Here an operator sees it.

No call tells a connector what was sampled. It follows from what vLLM keeps of a request: `num_computed_tokens` grows
by all tokens of a step when the step is scheduled, and shrinks by the rejected ones when its output is read. Until
then `num_in_flight_tokens` has the step. So the difference of the two grows by a step's accepted tokens, also with
asynchronous scheduling.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.engine_types import EngineRequest
    from kvdepot.client.vllm.scheduling.requests import RequestState


@dataclass(slots=True)
class _Steps:
    settled: int  # tokens computed for certain
    unread: deque[tuple[int, int]] = field(default_factory=deque)  # (tokens, drafts) of steps in flight
    unread_tokens: int = 0


class Acceptance:
    """Counts into `draft_tokens.*` and `accepted_tokens.*`. Used on the scheduler's thread only.

    Steps in flight while a request is preempted are not counted. From vLLM 0.33 on, drafts that were accepted after a
    request's last token count as rejected.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._requests: dict[str, _Steps] = {}  # that have had drafts and have not finished

    def step(
        self, requests: Mapping[str, RequestState], scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]]
    ) -> None:
        """Note a step before vLLM counts it as computed.

        Args:
            requests: The connector's, by id.
            scheduled: Tokens that the step computes, drafts with them, by request.
            drafts: Draft tokens of them.
        """
        for request_id, tokens in scheduled.items():
            steps, count = self._requests.get(request_id), len(drafts.get(request_id, ()))
            state = requests.get(request_id)
            if state is None or not (count or steps is not None):
                continue
            if steps is None:
                steps = self._requests[request_id] = _Steps(_settled(state.request))
            self._read(state, steps)
            steps.unread.append((tokens, count))
            steps.unread_tokens += tokens

    def finished(self, state: RequestState) -> None:
        """Count the rest of a request. vLLM reads no output of its steps that are still in flight."""
        steps = self._requests.pop(state.request_id, None)
        if steps is not None:
            self._read(state, steps)

    def _read(self, state: RequestState, steps: _Steps) -> None:
        """Count the steps whose output vLLM has read since the last call."""
        tokens = drafts = 0
        while steps.unread and steps.unread_tokens > state.request.num_in_flight_tokens:
            step_tokens, step_drafts = steps.unread.popleft()
            steps.unread_tokens -= step_tokens
            tokens += step_tokens
            drafts += step_drafts
        before, steps.settled = steps.settled, _settled(state.request)
        accepted = steps.settled - before - (tokens - drafts)
        if drafts and 0 <= accepted <= drafts:  # else it was preempted, or begins again at another place
            kv = "loaded" if state.loaded_tokens else "computed"
            self._counters[f"draft_tokens.{kv}"] += drafts
            self._counters[f"accepted_tokens.{kv}"] += accepted


def _settled(request: EngineRequest) -> int:
    return request.num_computed_tokens - request.num_in_flight_tokens
