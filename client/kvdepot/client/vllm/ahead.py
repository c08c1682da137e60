"""Acquires that follow a lookup's answer at once, instead of in the engine's next step (docs/adr/0041).

The engine allocates blocks for a load in the step after the one in which it asked, and the
answer is there long before. So what the daemon has in RAM is leased when it answers, by the
session's thread, and the load can be dispatched in the step that allocates its blocks. What
that step does not take is given back in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.session_loop import Following
from kvdepot.core.calls import AcquireCall, AcquireOutcome, AcquireReply, LocateReply
from kvdepot.core.errors import PlannerError

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.kept import KeptAttention
    from kvdepot.client.vllm.requests import Lookup, RequestState
    from kvdepot.client.vllm.settings import Settings
    from kvdepot.core.planner import LoadPlan, Planner

AHEAD_MAX: Final = 8
"""Such leases at a time, within `loads_in_flight`: requests that arrive between two steps."""
RAM: Final = "ram"
"""The tier of an answer for which nothing has to be read."""


@dataclass(slots=True, eq=False)
class Ahead:
    """One lease: wanted, asked for if the lookup's answer says so, and taken by a load or given back."""

    namespace: bytes
    lease_id: int
    lookup: Lookup
    keys: tuple[bytes, ...]
    request_id: str
    local_tokens: int | None = None  # that the engine has itself, of all kinds alike; None until it has looked
    plan: LoadPlan | None = None  # what is asked for; set by the session's thread, before the lookup's answer is seen
    planned_from: int = 0  # the local tokens of the plan
    seen_step: int | None = None  # the engine's, in which the lookup's answer was seen
    reply: Any = None
    _taker: Callable[[Any], None] | None = None

    def acquired(self, reply: Any) -> None:
        """The daemon's answer, or its failure, for whoever has taken the lease or will."""
        self.reply = reply
        if self._taker is not None:
            self._taker(reply)

    def give(self, taker: Callable[[Any], None]) -> None:
        """A load has taken it: the answer is the load's."""
        self._taker = taker
        if self.reply is not None:
            taker(self.reply)

    @property
    def failed(self) -> bool:
        return self.reply is not None and not (
            isinstance(self.reply, AcquireReply) and self.reply.outcome is AcquireOutcome.GRANTED
        )


def acquire_call(
    namespace: bytes, lease_id: int, keys: Sequence[bytes], plan: LoadPlan, request_id: str
) -> AcquireCall:
    """For what a load needs. `keys`: of the request's chunks."""
    return AcquireCall(
        session=b"",
        lease_id=lease_id,
        namespace=namespace,
        keys=b"".join([keys[planned.chunk] for planned in plan.objects]),
        kinds=bytes([planned.kind for planned in plan.objects]),
        request_id=request_id,
    )


class Aheads:
    """Of one engine. Used on the scheduler's thread only, but for `_make`."""

    def __init__(self, session: DepotSession, planner: Planner, settings: Settings, counters: Counter[str]) -> None:
        self._session = session
        self._planner = planner
        self._settings = settings
        self._counters = counters
        self._open: dict[str, Ahead] = {}  # request id -> its lease that no load has taken yet

    def __len__(self) -> int:
        return len(self._open)

    def others(self, request_id: str) -> int:
        """Leases of requests but this one."""
        return len(self._open) - (request_id in self._open)

    def following(self, state: RequestState, lookup: Lookup, namespace: bytes, chunks: int) -> Following | None:
        """What the lookup of the request's first `chunks` is to be followed by; None where there is no room."""
        if len(self._open) >= AHEAD_MAX:
            return None
        lease_id = self._session.new_lease_id()
        ahead = Ahead(namespace, lease_id, lookup, tuple(state.keys[:chunks]), state.depot_id)
        self._open[state.request_id] = ahead
        return Following(lease_id, partial(self._make, ahead), self._settings.load_timeout_seconds, ahead.acquired)

    def _make(self, ahead: Ahead, reply: LocateReply) -> AcquireCall | None:
        """On the session's thread, while the scheduler's goes on: all that changes is `local_tokens`, read once."""
        local, boundary = ahead.local_tokens, reply.boundary_tokens
        if local is None or reply.tier != RAM or boundary > len(ahead.keys) * self._planner.chunk_tokens:
            return None
        if boundary - local < self._settings.min_load_tokens:
            return None
        try:
            plan = self._planner.load_plan(local, boundary)
        except PlannerError:
            return None  # the load that is offered meets it too, and says so
        ahead.planned_from, ahead.plan = local, plan
        return acquire_call(ahead.namespace, ahead.lease_id, ahead.keys, plan, ahead.request_id)

    def looked(self, state: RequestState, local_tokens: int, kept: KeptAttention | None) -> None:
        """The engine has looked what it has itself of a request that waits for its lookup.

        Where it has kept attention behind that, a load needs less, and nothing is asked for ahead of it.
        """
        ahead = self._open.get(state.request_id)
        if ahead is not None:
            more = kept is not None and kept.begins(state.request.block_hashes, local_tokens, state.adapter)
            ahead.local_tokens = None if more else local_tokens

    def answered(self, state: RequestState, lookup: Lookup, step: int) -> None:
        """The lookup is answered, or has failed: what follows it is on its way by now, or never will be."""
        ahead = self._open.get(state.request_id)
        if ahead is None or ahead.lookup is not lookup:
            return
        ahead.seen_step = step
        if ahead.plan is None:
            del self._open[state.request_id]

    def take(self, state: RequestState, namespace: bytes, local_tokens: int, boundary_tokens: int) -> Ahead | None:
        """The lease for exactly this load, if there is one; any other one of the request's is given back."""
        ahead = self._open.get(state.request_id)
        if (
            ahead is None
            or ahead.plan is None
            or ahead.failed
            or (ahead.namespace, ahead.planned_from) != (namespace, local_tokens)
            or ahead.plan.boundary_tokens != boundary_tokens
        ):
            self.forgo(state.request_id)
            return None
        del self._open[state.request_id]
        self._counters["loads_ahead"] += 1
        return ahead

    def forgo(self, request_id: str) -> None:
        """Nothing will load from the request's lease."""
        ahead = self._open.pop(request_id, None)
        if ahead is not None:
            self._session.forgo(ahead.lease_id)

    def sweep(self, step: int) -> None:
        """The step's message is built: what neither this step nor the one before has taken is kept no longer."""
        for request_id, ahead in list(self._open.items()):
            if ahead.seen_step is not None and step > ahead.seen_step + 1:
                self._counters["leases_forgone"] += not ahead.failed
                self.forgo(request_id)

    def reset(self) -> None:
        """None is of use any more."""
        for request_id in list(self._open):
            self.forgo(request_id)
