"""Loads, scheduler side: from a request's arrival to the last rank's acknowledgement (DESIGN 4).

    ACQUIRING --granted--> GRANTED --next step--> DISPATCHED --all ranks--> over
        \\--no, late, aborted--> FAILED --next step--> over

Every load that was allocated blocks is reported to the engine exactly once: by the ranks,
which either got its operation or its id in `failed_loads`. Until then vLLM keeps the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure
from kvdepot.client.vllm.metadata import LoadOp, ObjectCopy, SpanCopy, StepMeta
from kvdepot.client.vllm.negative import NegativeCache
from kvdepot.client.vllm.requests import Lookup, RequestState
from kvdepot.core.calls import AcquireCall, AcquireOutcome, AcquireReply, Kind, LocateCall, LocateReply
from kvdepot.core.limits import KEYS_PER_CALL_MAX

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.namespaces import Namespaces
    from kvdepot.client.vllm.settings import Settings
    from kvdepot.core.planner import LoadPlan, Planner

ResolveBlocks = Callable[[str], Sequence[Sequence[int]]]
"""Request id -> its block table per engine group, valid only inside one `build_connector_meta`."""


PENDING_SECONDS_MAX: Final = 30.0
"""How long after its deadline a load keeps an otherwise idle engine stepping; ranks answer long before."""


ANSWER_SECONDS_MAX: Final = 1.0
"""An older answer is asked for again: what is gone meanwhile would cost the request its only load."""
RENEWALS_MAX: Final = 16
"""Asked for again at a time: the engine goes through its whole queue in one step when many answers are old."""


KEYS_AT_FAULT: Final = frozenset({"missing", "deadline", "copy"})
"""Failures that the next request with this prefix would meet too; not: no room for one more load, an abort, a reset."""


class LoadPhase(Enum):
    ACQUIRING = "acquiring"
    GRANTED = "granted"
    DISPATCHED = "dispatched"
    FAILED = "failed"  # and not yet reported


@dataclass(slots=True)
class Load:
    """One load that the engine waits for."""

    request_id: str
    op_id: int
    deadline: float
    epoch: int
    keys: list[bytes]  # of the chunks up to the boundary
    plan: LoadPlan | None = None
    lease_id: int = 0
    phase: LoadPhase = LoadPhase.ACQUIRING
    reply: AcquireReply | None = None
    state: RequestState | None = None  # None once the request is over
    ranks_done: int = 0
    ranks_failed: int = 0


class Loads:
    """All lookups and loads of one engine. Used on the scheduler's thread only."""

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        clock: Callable[[], float],
        counters: Counter[str],
        group_ids: Sequence[int],
        world_size: int,
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._planner = planner
        self._settings = settings
        self._clock = clock
        self._counters = counters
        self._group_ids = tuple(group_ids)  # planner group -> engine group
        self._world_size = world_size
        self._active: dict[str, Load] = {}
        self._ops: dict[int, Load] = {}
        self._cancelled: list[int] = []
        self._negative = NegativeCache(clock)
        self._next_op = 1
        self._steps = 0
        self._renewals = 0  # lookups under way

    @property
    def active(self) -> int:
        """Loads the engine waits for."""
        return len(self._active)

    def pending(self) -> bool:
        """Whether the engine has to keep stepping for a load, with an end to it."""
        if not self._active:
            return False
        now = self._clock()
        return any(now - load.deadline < PENDING_SECONDS_MAX for load in self._active.values())

    def loading(self, request_id: str) -> bool:
        return request_id in self._active

    # --- lookup and offer

    def locate(self, state: RequestState, *, renewal: bool = False) -> Lookup | None:
        """Ask for the request's longest boundary; None when there is nothing to ask or nobody to ask."""
        namespace = self._namespaces.usable
        if namespace is None:
            return None
        high = self._planner.high_boundary(state.request.num_tokens)
        chunks = min(high // self._planner.chunk_tokens, len(state.keys), KEYS_PER_CALL_MAX)
        lookup = Lookup(self._clock(), self._namespaces.epoch_number, self._steps, renewal)
        state.lookup = lookup
        if chunks * self._planner.chunk_tokens < self._settings.min_load_tokens:
            lookup.answered = True
            return lookup
        call = LocateCall(b"", namespace, state.packed_keys(chunks), high, state.depot_id)
        self._counters["lookups"] += 1
        self._renewals += renewal
        timeout = max(self._settings.lookup_timeout_seconds * 20, 1.0)  # a late answer still serves a queued request
        self._session.submit(call, timeout, partial(self._located, state, lookup))
        return lookup

    def _located(self, state: RequestState, lookup: Lookup, reply: Any) -> None:
        lookup.answered = True
        self._renewals -= lookup.renewal
        if isinstance(reply, CallFailure):
            self._counters[f"lookup_failed_{reply.reason.value}"] += 1
            return
        assert isinstance(reply, LocateReply)
        if lookup.epoch != self._namespaces.epoch_number:
            return
        lookup.boundary_tokens = reply.boundary_tokens
        if Kind.ATTENTION in self._planner.kinds:
            state.assumed_chunks = max(state.assumed_chunks, reply.attention_tokens // self._planner.chunk_tokens)

    def offer(self, state: RequestState, local_tokens: int) -> tuple[int | None, bool]:
        """The answer to vLLM: tokens beyond `local_tokens`, None while the lookup may still be answered."""
        request = state.request
        if state.load_failed or self.loading(state.request_id) or request.skip_reading_prefix_cache:
            return 0, False
        if request.num_preemptions != state.preemptions:
            # What it needs and what is stored have both changed since the last lookup.
            state.preemptions = request.num_preemptions
            state.lookup = None
            state.held_since = None
        lookup = state.lookup or self.locate(state)
        now = self._clock()
        if lookup is None:
            coming = self._namespaces.coming and now - state.arrived_at < self._settings.lookup_timeout_seconds
            return (None, False) if coming else (0, False)
        if not lookup.answered or not (self._namespaces.ranks_ready or self._namespaces.ranks_heard):
            if now - lookup.asked_at < self._settings.lookup_timeout_seconds:
                return None, False
            self._counters["lookup_timeouts"] += 1
            return 0, False
        boundary = min(lookup.boundary_tokens, self._planner.high_boundary(request.num_tokens))
        tokens = boundary - local_tokens
        if tokens < self._settings.min_load_tokens or not self._namespaces.ranks_ready:
            return 0, False
        if state.keys[boundary // self._planner.chunk_tokens - 1] in self._negative:
            self._counters["offers_withheld_negative"] += 1
            return 0, False
        if len(self._active) >= self._settings.loads_in_flight:
            return self._held_back(state, now), False
        if self._old(lookup, now) and self._renewals < RENEWALS_MAX:
            return (None if self.locate(state, renewal=True) else 0), False
        state.offered = (local_tokens, boundary)
        return tokens, True

    def _old(self, lookup: Lookup, now: float) -> bool:
        """Whether to ask anew. Never right after asking, however slow the steps are: that would have no end."""
        return now - lookup.asked_at > ANSWER_SECONDS_MAX and lookup.step < self._steps - 1

    def _held_back(self, state: RequestState, now: float) -> int | None:
        """As many loads as may be are in flight: later, then nothing (P7). A refused Acquire would cost more."""
        if state.held_since is None:
            state.held_since = now
            self._counters["loads_held_back"] += 1
        if now - state.held_since < self._settings.lookup_timeout_seconds:
            return None
        self._counters["loads_given_up"] += 1
        return 0

    # --- acquire

    def allocated(self, state: RequestState, external_tokens: int) -> None:
        """The engine has taken the offer and allocated blocks: from here on the load must be reported."""
        if external_tokens <= 0:
            return
        now = self._clock()
        load = Load(
            request_id=state.request_id,
            op_id=self._next_op,
            deadline=now + self._settings.load_timeout_seconds,
            epoch=self._namespaces.epoch_number,
            keys=state.keys,
            state=state,
        )
        self._next_op += 1
        self._active[state.request_id] = load
        local, boundary = state.offered
        namespace = self._namespaces.usable
        if namespace is None or local + external_tokens != boundary:
            self._fail(load, "not_offered" if namespace else "unavailable")
            return
        load.plan = self._planner.load_plan(local, boundary)
        load.lease_id = self._session.new_lease_id()
        objects = load.plan.objects
        call = AcquireCall(
            session=b"",
            lease_id=load.lease_id,
            namespace=namespace,
            keys=b"".join(state.keys[planned.chunk] for planned in objects),
            kinds=bytes(planned.kind for planned in objects),
            request_id=state.depot_id,
        )
        self._counters["loads"] += 1
        self._session.submit(call, self._settings.load_timeout_seconds, partial(self._acquired, load))

    def fail_allocated(self, state: RequestState) -> None:
        """The safe answer when anything went wrong after the engine allocated blocks."""
        load = self._active.get(state.request_id)
        if load is None:
            load = Load(state.request_id, self._next_op, 0.0, 0, state.keys, state=state)
            self._next_op += 1
            self._active[state.request_id] = load
        if load.phase is not LoadPhase.DISPATCHED:
            self._fail(load, "error")

    def _acquired(self, load: Load, reply: Any) -> None:
        if load.phase is not LoadPhase.ACQUIRING:
            return  # given up while the call was under way: `_report` releases it
        if isinstance(reply, AcquireReply) and reply.outcome is AcquireOutcome.GRANTED:
            load.phase = LoadPhase.GRANTED
            load.reply = reply
            return
        load.lease_id = 0  # there is none: not granted, or ended by the session
        reason = reply.reason.value if isinstance(reply, CallFailure) else reply.outcome.name.lower()
        self._fail(load, reason)

    def _fail(self, load: Load, reason: str) -> None:
        load.phase = LoadPhase.FAILED
        self._count_failure(load, reason)

    def _count_failure(self, load: Load, reason: str) -> None:
        """It is not offered to its request again, and for a while to no other one."""
        self._counters[f"load_failed_{reason}"] += 1
        if load.state is not None:
            load.state.load_failed = True
        if reason in KEYS_AT_FAULT and load.plan is not None:
            self._negative.add(load.keys[load.plan.boundary_tokens // self._planner.chunk_tokens - 1])

    # --- dispatch

    def build(self, meta: StepMeta, resolve: ResolveBlocks | None) -> None:
        """Put into this step's message what is granted, and what has failed. Once a step."""
        self._steps += 1
        if not self._active:
            return
        now = self._clock()
        meta.cancelled_loads.extend(self._cancelled)
        self._cancelled.clear()
        for load in list(self._active.values()):
            if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED) and now >= load.deadline:
                self._fail(load, "deadline")
            if load.phase is LoadPhase.GRANTED and resolve is not None:
                self._dispatch(load, meta, resolve)
            if load.phase is LoadPhase.FAILED:
                self._report(load, meta)

    def _report(self, load: Load, meta: StepMeta) -> None:
        """No rank has seen the extents: give them back, and let the ranks report the request.

        The lease is released even before the daemon's answer: an engine that has become idle
        takes no step in which a late grant would be seen. Of Acquire and Release the daemon may
        see either first.
        """
        del self._active[load.request_id]
        meta.failed_loads.append(load.request_id)
        if load.lease_id:
            self._session.release([load.lease_id])

    def _dispatch(self, load: Load, meta: StepMeta, resolve: ResolveBlocks) -> None:
        assert load.reply is not None and load.plan is not None
        load.phase = LoadPhase.FAILED  # until it is in the message: whatever happens here, it is reported
        objects = self._object_copies(load, resolve(load.request_id))
        if objects is None:
            self._fail(load, "blocks_moved")
            return
        meta.loads.append(
            LoadOp(load.op_id, load.request_id, load.deadline, load.reply.arena_id, load.reply.extents, objects)
        )
        load.phase = LoadPhase.DISPATCHED
        self._ops[load.op_id] = load

    def _object_copies(self, load: Load, tables: Sequence[Sequence[int]]) -> tuple[ObjectCopy, ...] | None:
        """The plan with block ids. None when a block that must be written is not there (never block 0)."""
        assert load.plan is not None
        copies = []
        for index, planned in enumerate(load.plan.objects):
            spans = []
            for span in planned.spans:
                table = tables[self._group_ids[span.group]]
                ids = tuple(table[span.table_block : span.table_block + span.blocks])
                if len(ids) != span.blocks or 0 in ids:
                    return None
                spans.append(SpanCopy(span.group, span.object_block, ids))
            boundary = (planned.chunk + 1) * self._planner.chunk_tokens
            copies.append(ObjectCopy(index, int(planned.kind), load.keys[planned.chunk], boundary, tuple(spans)))
        return tuple(copies)

    # --- the end

    def acknowledged(self, op_id: int, ranks: int, failed: int) -> None:
        """`ranks` more ranks have finished the operation and will not touch its extents or blocks again."""
        load = self._ops.get(op_id)
        if load is None:
            return
        load.ranks_done += ranks
        load.ranks_failed += failed
        if load.ranks_done < self._world_size:
            return
        del self._ops[op_id]
        del self._active[load.request_id]
        self._session.release([load.lease_id])
        if load.ranks_failed:
            self._count_failure(load, "copy")
            return
        assert load.plan is not None
        self._counters["loads_done"] += 1
        self._counters["loaded_tokens"] += load.plan.boundary_tokens
        if load.state is not None:
            self._remember(load.state, load.plan)

    def _remember(self, state: RequestState, plan: LoadPlan) -> None:
        """What was loaded is there: it needs no store (A3)."""
        state.stored.update((planned.chunk, planned.kind) for planned in plan.objects)
        state.assumed_chunks = max(state.assumed_chunks, plan.boundary_tokens // self._planner.chunk_tokens)

    def finished(self, state: RequestState) -> None:
        """The request is over. A load that no rank has seen yet is reported failed; another ends by itself."""
        load = self._active.get(state.request_id)
        if load is None:
            return
        if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
            self._fail(load, "aborted")
        load.state = None

    def reset(self) -> None:
        """The weights have changed: nothing that was looked up or granted before may arrive in a request."""
        for load in self._active.values():
            if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
                self._fail(load, "epoch")
            elif load.phase is LoadPhase.DISPATCHED:
                self._cancelled.append(load.op_id)
