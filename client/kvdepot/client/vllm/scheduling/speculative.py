"""Speculative acquires: they follow a lookup's answer at once, not in the engine's next step (docs/adr/0041).

    wanted --answer is worth it--> asked --load takes it--> taken
       |                            |
       +--not in RAM, not worth it--+--not taken within a step--> cancelled

The engine allocates blocks for a load in the step after its lookup, long after the answer. So the session's thread
leases what the daemon has in RAM when it answers, and the step that allocates the blocks can dispatch the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.calls import ChainedAcquire
from kvdepot.core.calls import AcquireCall, AcquireOutcome, AcquireReply, LocateReply
from kvdepot.core.errors import PlannerError

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.scheduling.local_reuse import LocalReuse
    from kvdepot.client.vllm.scheduling.requests import Lookup, RequestState
    from kvdepot.core.planner import LoadPlan, Planner

SPECULATIVE_MAX: Final = 8
"""Speculative leases at a time, within `loads_in_flight`: requests that arrive between two steps."""
RAM: Final = "ram"
"""The tier of an answer that needs no read."""


@dataclass(slots=True, eq=False)
class SpeculativeLease:
    """One lease: wanted, asked for if the answer is worth it, and then taken by a load or cancelled."""

    namespace: bytes
    lease_id: int
    lookup: Lookup
    keys: tuple[bytes, ...]
    request_id: str
    local_tokens: int | None = None  # of the engine itself; None until it has looked
    plan: LoadPlan | None = None  # set by the session's thread, before the answer is seen
    planned_from: int = 0  # the local tokens of the plan
    seen_step: int | None = None  # of the engine, in which the lookup's answer was seen
    reply: Any = None
    _taker: Callable[[Any], None] | None = None

    def acquired(self, reply: Any) -> None:
        """Keep the answer or failure of the Acquire, and give it to the load that has taken the lease."""
        self.reply = reply
        if self._taker is not None:
            self._taker(reply)

    def give(self, taker: Callable[[Any], None]) -> None:
        """Give the lease to a load, and with it the answer."""
        self._taker = taker
        if self.reply is not None:
            taker(self.reply)

    @property
    def failed(self) -> bool:
        """Whether the Acquire was answered and grants nothing."""
        return self.reply is not None and not (
            isinstance(self.reply, AcquireReply) and self.reply.outcome is AcquireOutcome.GRANTED
        )


def acquire_call(
    namespace: bytes, lease_id: int, keys: Sequence[bytes], plan: LoadPlan, request_id: str, settings: Settings
) -> AcquireCall:
    """Return the Acquire for what a load needs. `keys`: of the request's chunks."""
    return AcquireCall(
        session=b"",
        lease_id=lease_id,
        namespace_id=namespace,
        keys=b"".join([keys[planned.chunk] for planned in plan.objects]),
        kinds=bytes([planned.kind for planned in plan.objects]),
        request_id=request_id,
        checksums=settings.verify_loads > 0,
    )


class SpeculativeAcquires:
    """The speculative leases of one engine. Used on the scheduler's thread only, except `_make`."""

    def __init__(
        self, session: DepotSession, planner: Planner, settings: Settings, counters: Counter[str],
        local_reuse: LocalReuse,
    ) -> None:  # fmt: skip
        self._session = session
        self._planner = planner
        self._settings = settings
        self._counters = counters
        self._local_reuse = local_reuse
        self._open: dict[str, SpeculativeLease] = {}  # request id -> its lease that no load has taken yet

    def __len__(self) -> int:
        return len(self._open)

    def others(self, request_id: str) -> int:
        """Return the number of leases of other requests."""
        return len(self._open) - (request_id in self._open)

    def then(self, state: RequestState, lookup: Lookup, namespace: bytes, chunks: int) -> ChainedAcquire | None:
        """Return the Acquire to chain to a lookup of the request's first `chunks`, or None if there is no room."""
        if len(self._open) >= SPECULATIVE_MAX:
            return None
        lease_id = self._session.new_lease_id()
        lease = SpeculativeLease(namespace, lease_id, lookup, tuple(state.keys[:chunks]), state.depot_id)
        self._open[state.request_id] = lease
        return ChainedAcquire(lease_id, partial(self._make, lease), self._settings.load_timeout_seconds, lease.acquired)

    def _make(self, lease: SpeculativeLease, reply: LocateReply) -> AcquireCall | None:
        """Make the Acquire on the session's thread. Only `local_tokens` changes meanwhile, so it is read once."""
        local, boundary = lease.local_tokens, reply.boundary_tokens
        if local is None or reply.tier != RAM or boundary > len(lease.keys) * self._planner.chunk_tokens:
            return None
        if boundary - local < self._settings.min_load_tokens:
            return None
        try:
            plan = self._planner.load_plan(local, boundary)
        except PlannerError:
            return None  # the offered load meets the error too, and reports it
        lease.planned_from, lease.plan = local, plan
        return acquire_call(lease.namespace, lease.lease_id, lease.keys, plan, lease.request_id, self._settings)

    def looked(self, state: RequestState, local_tokens: int) -> None:
        """Note what the engine has itself of a request that waits for its lookup.

        If the engine can reuse attention after that, a load needs less, and nothing is acquired speculatively.
        """
        lease = self._open.get(state.request_id)
        if lease is not None:
            more = self._local_reuse.begins(state.request.block_hashes, local_tokens, state.adapter)
            lease.local_tokens = None if more else local_tokens

    def answered(self, state: RequestState, lookup: Lookup, step: int) -> None:
        """Note that a lookup is answered or has failed: the chained Acquire is sent by now, or never will be."""
        lease = self._open.get(state.request_id)
        if lease is None or lease.lookup is not lookup:
            return
        lease.seen_step = step
        if lease.plan is None:
            del self._open[state.request_id]

    def take(
        self, state: RequestState, namespace: bytes, local_tokens: int, boundary_tokens: int
    ) -> SpeculativeLease | None:
        """Return the lease for exactly this load, if there is one. Cancel any other lease of the request."""
        lease = self._open.get(state.request_id)
        if (
            lease is None
            or lease.plan is None
            or lease.failed
            or (lease.namespace, lease.planned_from) != (namespace, local_tokens)
            or lease.plan.boundary_tokens != boundary_tokens
        ):
            self.cancel(state.request_id)
            return None
        del self._open[state.request_id]
        self._counters["speculative_loads"] += 1
        return lease

    def cancel(self, request_id: str) -> None:
        """Cancel the request's lease, if it has one."""
        lease = self._open.pop(request_id, None)
        if lease is not None:
            self._session.cancel(lease.lease_id)

    def sweep(self, step: int) -> None:
        """Cancel leases that neither this step nor the one before has taken. Called when a message is built."""
        for request_id, lease in list(self._open.items()):
            if lease.seen_step is not None and step > lease.seen_step + 1:
                self._counters["speculative_cancelled"] += not lease.failed
                self.cancel(request_id)

    def reset(self) -> None:
        """Cancel all leases."""
        for request_id in list(self._open):
            self.cancel(request_id)
