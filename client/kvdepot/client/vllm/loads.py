"""Loads, scheduler side: from a request's arrival to the last rank's acknowledgement (DESIGN 4).

    ACQUIRING --granted--> GRANTED --next step--> DISPATCHED --all ranks--> over
        \\--no, late, aborted--> FAILED --next step--> over

Every load that was allocated blocks is reported to the engine exactly once: by the ranks,
which either got its operation or its id in `failed_loads`. Until then vLLM keeps the blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.vllm.ahead import Aheads, acquire_call
from kvdepot.client.vllm.handoffs import ASK_SECONDS, Handoffs
from kvdepot.client.vllm.metadata import NUMBERS, BlockMove, LoadOp, ObjectCopy, SpanCopy, StepMeta
from kvdepot.client.vllm.negative import NegativeCache
from kvdepot.client.vllm.requests import Lookup, RequestState
from kvdepot.client.vllm.stats import OBSERVATIONS_MAX, Observations, Sources
from kvdepot.core.calls import AcquireOutcome, AcquireReply, Kind, LocateCall, LocateReply
from kvdepot.core.limits import KEYS_PER_CALL_MAX
from kvdepot.core.misses import UNASKED_REASONS, MissReason, miss_reason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.events import KvEvents
    from kvdepot.client.vllm.kept import Kept, KeptAttention
    from kvdepot.client.vllm.namespaces import Namespaces
    from kvdepot.client.vllm.pace import Pace
    from kvdepot.client.vllm.settings import Settings
    from kvdepot.core.planner import LoadPlan, LocalTokens, Planner

ResolveBlocks = Callable[[str], Sequence[Sequence[int]]]
"""Request id -> its block table per engine group, valid only inside one `build_connector_meta`."""


PENDING_SECONDS_MAX: Final = 30.0
"""How long after its deadline a load keeps an otherwise idle engine stepping; ranks answer long before."""


ANSWER_SECONDS_MAX: Final = 1.0
"""An older answer is asked for again: what is gone meanwhile would cost the request its only load."""
RENEWALS_MAX: Final = 16
"""Asked for again at a time: the engine goes through its whole queue in one step when many answers are old."""


COPY_SHARE: Final = 0.25
"""Of `load_timeout_seconds`, for the copies of the ranks: by what is left of it the daemon has everything in RAM."""


KEYS_AT_FAULT: Final = frozenset({"missing", "deadline", "copy"})
"""Failures that the next request with this prefix would meet too; not: no room for one more load, an abort, a reset."""


MISSES: Final = {
    "missing": MissReason.GONE,
    "lost": MissReason.GONE,
    "later": MissReason.NO_ROOM,
    "refused": MissReason.REFUSED,
    "deadline": MissReason.LOAD_TIMED_OUT,
    "unavailable": MissReason.UNREACHABLE,
    "adapter": MissReason.EXCLUDED,
}
"""What a failed load is to its request; MissReason.LOAD_FAILED where nothing else is said, an abort is none.

For "epoch" it is what has ended it.
"""


STALE: Final = frozenset({"missing", "lost", "epoch"})
"""Failures of loads whose lookup was right when it was answered."""


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
    step: int = 0  # the engine's, in which its blocks were allocated
    plan: LoadPlan | None = None  # of what the daemon has to supply
    kept: Kept | None = None  # what the engine has itself, pinned until the load is over
    lease_id: int = 0
    phase: LoadPhase = LoadPhase.ACQUIRING
    reply: AcquireReply | None = None
    state: RequestState | None = None  # None once the request is over
    source: str = ""
    tokens: int = 0  # that the engine need not compute
    began_at: float = 0.0
    ranks_done: int = 0  # as bits
    ranks_failed: int = 0
    suspended: bool = False  # a rank failed it because the engine has taken its KV memory away


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
        events: KvEvents,
        pace: Pace,
        group_ids: Sequence[int],
        world_size: int,
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._planner = planner
        self._settings = settings
        self._clock = clock
        self._counters = counters
        self._events = events
        self._pace = pace
        self._group_ids = tuple(group_ids)  # planner group -> engine group
        self._all_ranks = (1 << world_size) - 1
        self._active: dict[str, Load] = {}
        self._ops: dict[int, Load] = {}
        self._cancelled: list[int] = []
        self._negative = NegativeCache(clock)
        self._aheads = Aheads(session, planner, settings, counters)
        self.handoffs = Handoffs(namespaces, planner, counters, settings.lookup_timeout_seconds)
        self._steps = 0  # whose messages are built
        self._renewals = 0  # lookups under way
        self._sources = Sources()
        self.seconds: Observations = deque(maxlen=OBSERVATIONS_MAX)  # of loads that arrived; whoever counts takes them
        self.kept: KeptAttention | None = None  # until there is a block pool

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

    def locate(self, state: RequestState, local_tokens: int | None = None, *, renewal: bool = False) -> Lookup | None:
        """Ask for the request's best boundary; None when there is nobody to ask.

        `local_tokens`: what the engine has itself; None before it has looked.
        """
        namespace = self._namespaces.usable
        if namespace is None:
            return None
        settings, chunk_tokens = self._settings, self._planner.chunk_tokens
        whole = high = self._planner.high_boundary(state.request.num_tokens)
        if state.load_tokens_max is not None:
            high = min(whole, ((local_tokens or 0) + state.load_tokens_max) // chunk_tokens * chunk_tokens)
        chunks = min(high // chunk_tokens, len(state.keys), KEYS_PER_CALL_MAX)
        lookup = Lookup(
            self._clock(), self._namespaces.epoch_number, self._steps, renewal, local_tokens, local_matters=high < whole
        )  # fmt: skip
        state.lookup = lookup
        self._aheads.forgo(state.request_id)  # it was for the answer before
        if chunks * chunk_tokens < settings.min_load_tokens:
            lookup.answered = True
            lookup.miss = MissReason.NOT_WORTH_IT if whole else None
            return lookup
        call = LocateCall(
            b"", namespace, state.packed_keys(chunks), high, state.depot_id,
            budget_seconds=settings.load_timeout_seconds * (1 - COPY_SHARE),
            wait_seconds=settings.lookup_timeout_seconds,
            local_tokens=local_tokens or 0,
            token_seconds=self._pace.token_seconds * settings.load_weight,
        )  # fmt: skip
        state.located = True
        self._counters["lookups"] += 1
        self._renewals += renewal
        timeout = max(settings.lookup_timeout_seconds * 20, 1.0)  # a late answer still serves a queued request
        following = None
        room = len(self._active) + len(self._aheads) < settings.loads_in_flight
        if settings.lease_ahead and room and not renewal and self._namespaces.ranks_ready:
            following = self._aheads.following(state, lookup, namespace, chunks)
        self._session.submit(call, timeout, partial(self._located, state, lookup), following)
        return lookup

    def _located(self, state: RequestState, lookup: Lookup, reply: Any) -> None:
        lookup.answered = True
        self._aheads.answered(state, lookup, self._steps)
        self._renewals -= lookup.renewal
        if isinstance(reply, CallFailure):
            self._counters[f"lookup_failed_{reply.reason.value}"] += 1
            late = reply.reason is FailureReason.DEADLINE
            lookup.miss = MissReason.TIMED_OUT if late else MissReason.UNREACHABLE
            return
        assert isinstance(reply, LocateReply)
        if lookup.epoch != self._namespaces.epoch_number:
            self._counters["stale.epoch"] += 1
            return
        lookup.boundary_tokens = reply.boundary_tokens
        lookup.source = self._sources.label(reply.tier) if reply.tier else ""
        lookup.miss = miss_reason(reply.miss) if reply.miss else None
        # What is weighed against computing is what the engine lacks: less than all of it, where it has some itself.
        lookup.local_matters |= lookup.miss is MissReason.NOT_WORTH_IT
        lookup.local_matters |= bool(self._pace.token_seconds and reply.estimate_seconds)
        if Kind.ATTENTION in self._planner.kinds:
            attention_chunks = reply.attention_tokens // self._planner.chunk_tokens
            state.assumed_chunks = max(state.assumed_chunks, attention_chunks)
            self._events.located(state, attention_chunks, lookup.miss)

    def offer(self, state: RequestState, local_tokens: int) -> tuple[int | None, bool]:
        """The answer to vLLM: tokens beyond `local_tokens`, None while the lookup may still be answered."""
        request = state.request
        state.miss = None
        state.local_tokens = local_tokens
        if state.load_failed or self.loading(state.request_id):
            return 0, False
        if request.skip_reading_prefix_cache:
            return self._nothing(state, MissReason.READS_NO_CACHE)
        if request.num_preemptions != state.preemptions:
            # What it needs and what is stored have both changed since the last lookup.
            state.preemptions = request.num_preemptions
            state.lookup = None
            state.held_since = None
        lookup = state.lookup or self.locate(state, local_tokens)
        self._aheads.looked(state, local_tokens, self.kept)
        now = self._clock()
        if lookup is None or not lookup.answered:
            answer = self._wait(state, lookup, now)
        else:
            answer = self._offer(state, lookup, local_tokens, now)
        if self._planner.high_boundary(request.num_tokens) <= local_tokens:
            state.miss = None  # the engine has all of it
        return answer

    def _wait(self, state: RequestState, lookup: Lookup | None, now: float) -> tuple[int | None, bool]:
        """For an answer, for somebody to ask, or for the ranks' word; not for long."""
        seconds = self._settings.lookup_timeout_seconds
        if lookup is None:
            there = self._namespaces.coming
            if there and now - state.arrived_at < seconds:
                return None, False
            return self._nothing(state, MissReason.NOT_READY if there else MissReason.UNREACHABLE)
        if now - lookup.asked_at < seconds:
            return None, False
        self._counters["lookup_timeouts"] += not lookup.answered
        return self._nothing(state, MissReason.NOT_READY if lookup.answered else MissReason.TIMED_OUT)

    def _offer(self, state: RequestState, lookup: Lookup, local_tokens: int, now: float) -> tuple[int | None, bool]:
        if lookup.local_matters and lookup.local_tokens is None and local_tokens and self._renewals < RENEWALS_MAX:
            return (None if self.locate(state, local_tokens, renewal=True) else 0), False
        boundary = min(lookup.boundary_tokens, self._planner.high_boundary(state.request.num_tokens))
        if self.handoffs.awaited(state, lookup, boundary, local_tokens, now):
            if now - lookup.asked_at >= ASK_SECONDS and self._renewals < RENEWALS_MAX:
                return (None if self.locate(state, local_tokens, renewal=True) else 0), False
            return None, False
        tokens = boundary - local_tokens
        if state.load_tokens_max is not None and tokens > state.load_tokens_max:
            return self._nothing(state, MissReason.NOT_WORTH_IT)  # the engine has less itself than it had
        if tokens < self._settings.min_load_tokens:
            return self._nothing(state, MissReason.NOT_WORTH_IT if tokens > 0 else lookup.miss)
        if not self._namespaces.ranks_ready:
            if not self._namespaces.ranks_heard:
                return self._wait(state, lookup, now)
            return self._nothing(state, MissReason.NOT_READY)
        if state.keys[boundary // self._planner.chunk_tokens - 1] in self._negative:
            self._counters["offers_withheld_negative"] += 1
            return self._nothing(state, MissReason.FAILED_LATELY)
        if len(self._active) + self._aheads.others(state.request_id) >= self._settings.loads_in_flight:
            self._aheads.reset()  # a lease for later does not keep a load back for longer than a step
            return self._held_back(state, now), False
        if self._old(lookup, now) and self._renewals < RENEWALS_MAX:
            return (None if self.locate(state, local_tokens, renewal=True) else 0), False
        state.offered = (local_tokens, boundary)
        return tokens, True

    def _nothing(self, state: RequestState, miss: MissReason | None) -> tuple[int | None, bool]:
        """Why is counted when the engine goes on without: until then it may ask again, and be answered otherwise."""
        state.miss = miss
        return 0, False

    def missed(self, state: RequestState) -> None:
        """The engine has allocated blocks for a request that it computes."""
        self._aheads.forgo(state.request_id)
        if state.miss is None:
            return
        self._counters[f"misses.{state.miss}"] += 1
        state.missed = state.miss
        state.located |= state.miss in UNASKED_REASONS and self._namespaces.usable is not None
        if state.miss is MissReason.TIMED_OUT:
            self._counters["timeouts.lookup"] += 1
        state.miss = None

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
        state.miss = MissReason.TOO_MANY_LOADS
        return 0

    # --- acquire

    def allocated(self, state: RequestState, external_tokens: int) -> None:
        """The engine has taken the offer and allocated blocks: from here on the load must be reported."""
        if external_tokens <= 0 or self.loading(state.request_id):
            return
        now = self._clock()
        load = Load(
            request_id=state.request_id,
            op_id=next(NUMBERS),
            deadline=now + self._settings.load_timeout_seconds,
            epoch=self._namespaces.epoch_number,
            keys=state.keys,
            state=state,
            step=self._steps + 1,
            source=state.lookup.source if state.lookup is not None else "",
            tokens=external_tokens,
            began_at=now,
        )
        self._active[state.request_id] = load
        local, boundary = state.offered
        namespace = self._namespaces.usable
        if namespace is None or local + external_tokens != boundary:
            self._aheads.forgo(state.request_id)
            self._fail(load, "not_offered" if namespace else "unavailable")
            return
        if self.kept is not None:
            load.kept = self.kept.pin(state.request.block_hashes, local, boundary, state.adapter)
        self._counters["loads"] += 1
        if load.kept is None and (ahead := self._aheads.take(state, namespace, local, boundary)) is not None:
            load.plan, load.lease_id = ahead.plan, ahead.lease_id
            ahead.give(partial(self._acquired, load))
            return
        self._aheads.forgo(state.request_id)
        load.plan = self._planner.load_plan(self._local(load, local), boundary)
        load.lease_id = self._session.new_lease_id()
        call = acquire_call(namespace, load.lease_id, state.keys, load.plan, state.depot_id)
        self._session.submit(call, self._settings.load_timeout_seconds, partial(self._acquired, load))

    def _local(self, load: Load, local: int) -> LocalTokens:
        """What the daemon need not supply, by kind: of attention also what is kept."""
        if load.kept is None:
            return local
        self._counters["kept_tokens"] += load.kept.tokens - local
        load.tokens -= load.kept.tokens - local
        return dict.fromkeys(self._planner.kinds, local) | {Kind.ATTENTION: load.kept.tokens}

    def fail_allocated(self, state: RequestState) -> None:
        """The safe answer when anything went wrong after the engine allocated blocks."""
        load = self._active.get(state.request_id)
        if load is None:
            load = Load(state.request_id, next(NUMBERS), 0.0, 0, state.keys, state=state)
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
        if reason != "aborted":
            missed = MISSES.get(reason, MissReason.LOAD_FAILED)
            if reason == "epoch":
                missed = self._namespaces.epoch_ended
            self._counters[f"misses.{missed}"] += 1
            if load.state is not None:
                load.state.missed = missed
        if reason in STALE:
            self._counters[f"stale.{reason}"] += 1
        if reason == "deadline":
            self._counters["timeouts.load"] += 1
        if load.state is not None:
            load.state.load_failed = True
        if reason in KEYS_AT_FAULT and load.plan is not None:
            self._negative.add(load.keys[load.plan.boundary_tokens // self._planner.chunk_tokens - 1])

    # --- dispatch

    def build(self, meta: StepMeta, resolve: ResolveBlocks | None) -> None:
        """Put into this step's message what is granted, and what has failed. Once a step."""
        self._steps += 1
        self._aheads.sweep(self._steps)
        if not self._active:
            return
        now = self._clock()
        meta.cancelled_loads.extend(self._cancelled)
        self._cancelled.clear()
        for load in list(self._active.values()):
            if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED) and now >= load.deadline:
                self._fail(load, "deadline")
            # What is kept may be computed by the very step in which the load was allocated: that step must be over.
            over = load.kept is None or self._steps > load.step
            if load.phase is LoadPhase.GRANTED and resolve is not None and over:
                self._dispatch(load, meta, resolve)
            if load.phase is LoadPhase.FAILED:
                self._report(load, meta)

    def _report(self, load: Load, meta: StepMeta) -> None:
        """No rank has seen the extents: give them back, and let the ranks report the request.

        The lease is released even before the daemon's answer: an engine that has become idle
        takes no step in which a late grant would be seen. Of Acquire and Release the daemon may
        see either first.
        """
        self._end(load)
        meta.failed_loads.append(load.request_id)
        if load.lease_id:
            self._session.release([load.lease_id], used=False)

    def _end(self, load: Load) -> None:
        del self._active[load.request_id]
        if load.kept is not None and self.kept is not None:
            self.kept.release(load.kept)

    def _dispatch(self, load: Load, meta: StepMeta, resolve: ResolveBlocks) -> None:
        assert load.reply is not None and load.plan is not None
        load.phase = LoadPhase.FAILED  # until it is in the message: whatever happens here, it is reported
        tables = resolve(load.request_id)
        objects, moves = self._object_copies(load, tables), self._moves(load, tables)
        if objects is None or moves is None:
            self._fail(load, "blocks_moved")
            return
        meta.loads.append(
            LoadOp(load.op_id, load.request_id, load.deadline, load.reply.arena_id, load.reply.extents, objects, moves)
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
                ids = self._blocks(tables, span.group, span.table_block, span.blocks)
                if ids is None:
                    return None
                spans.append(SpanCopy(span.group, span.object_block, ids))
            boundary = (planned.chunk + 1) * self._planner.chunk_tokens
            copies.append(ObjectCopy(index, int(planned.kind), load.keys[planned.chunk], boundary, tuple(spans)))
        return tuple(copies)

    def _moves(self, load: Load, tables: Sequence[Sequence[int]]) -> tuple[BlockMove, ...] | None:
        """Likewise for what is kept."""
        moves = []
        for span in load.kept.spans if load.kept is not None else ():
            ids = self._blocks(tables, span.group, span.table_block, len(span.block_ids))
            if ids is None:
                return None
            moves.append(BlockMove(span.group, span.block_ids, ids))
        return tuple(moves)

    def _blocks(
        self, tables: Sequence[Sequence[int]], group: int, table_block: int, blocks: int
    ) -> tuple[int, ...] | None:
        ids = tuple(tables[self._group_ids[group]][table_block : table_block + blocks])
        return ids if len(ids) == blocks and 0 not in ids else None

    # --- the end

    def acknowledged(self, op_id: int, ranks: int, failed: int, *, suspended: bool = False) -> None:
        """These ranks (bits) have finished the operation and will not touch its extents or blocks again.

        `suspended`: one of them because the engine has taken its KV memory away. What was heard already, or is about
        another side's operation, changes nothing.
        """
        load = self._ops.get(op_id)
        if load is None:
            return
        load.ranks_done |= ranks
        load.ranks_failed |= failed
        load.suspended |= suspended
        if load.ranks_done & self._all_ranks != self._all_ranks:
            return
        del self._ops[op_id]
        self._end(load)
        self._session.release([load.lease_id], used=not load.ranks_failed)
        if load.ranks_failed:
            reason = "suspended" if load.suspended else "copy"
            self._count_failure(load, reason if load.epoch == self._namespaces.epoch_number else "epoch")
            return
        assert load.plan is not None
        self._counters["loads_done"] += 1
        self._counters["loaded_tokens"] += load.plan.boundary_tokens
        self._counters[f"hits.{load.source}"] += 1
        self._counters[f"hit_tokens.{load.source}"] += load.tokens
        size_bytes = sum(self._planner.object_bytes(planned.kind) for planned in load.plan.objects)
        self._counters[f"loaded_bytes.{load.source}"] += size_bytes
        self.seconds.append((load.source, self._clock() - load.began_at))
        if load.state is not None:
            load.state.loaded_tokens = load.tokens
            self._remember(load.state, load.plan)

    def _remember(self, state: RequestState, plan: LoadPlan) -> None:
        """What was loaded is there: it needs no store (A3)."""
        state.stored.update((planned.chunk, planned.kind) for planned in plan.objects)
        for planned in plan.objects:
            if planned.kind is Kind.ATTENTION:
                self._events.stored(state, planned.chunk)
        state.assumed_chunks = max(state.assumed_chunks, plan.boundary_tokens // self._planner.chunk_tokens)

    def finished(self, state: RequestState) -> None:
        """The request is over. A load that no rank has seen yet is reported failed; another ends by itself."""
        self._aheads.forgo(state.request_id)
        load = self._active.get(state.request_id)
        if load is None:
            return
        if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
            self._fail(load, "aborted")
        load.state = None

    def reset(self, reason: str = "epoch") -> None:
        """The epoch has ended, say: nothing that was looked up or granted before may arrive in a request."""
        self._aheads.reset()
        for load in self._active.values():
            self._stop(load, reason)

    def stop(self, state: RequestState) -> None:
        """The request's adapter was replaced: nothing of its former content may arrive."""
        self._aheads.forgo(state.request_id)
        if load := self._active.get(state.request_id):
            self._stop(load, "adapter")

    def _stop(self, load: Load, reason: str) -> None:
        if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
            self._fail(load, reason)
        elif load.phase is LoadPhase.DISPATCHED:
            self._cancelled.append(load.op_id)
