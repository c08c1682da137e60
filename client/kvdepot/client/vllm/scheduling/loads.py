r"""Loads, scheduler side: from the allocation of blocks to the last rank's acknowledgement (design.md#load).

    ACQUIRING --granted--> GRANTED --next step--> DISPATCHED --all ranks--> over
        \--no, late, aborted--> FAILED --next step--> over

Every load that was allocated blocks is reported to the engine exactly once, by the ranks. They got either its
operation, or its request id in `failed_loads`. Until then vLLM keeps the blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure
from kvdepot.client.vllm.base.metadata import NUMBERS, StepMeta
from kvdepot.client.vllm.base.operations import BlockMove, LoadOp, ObjectCopy, SpanCopy
from kvdepot.client.vllm.base.stats import OBSERVATIONS_MAX, Observations
from kvdepot.client.vllm.scheduling.negative import NegativeCache
from kvdepot.client.vllm.scheduling.speculative import acquire_call
from kvdepot.core.calls import AcquireOutcome, AcquireReply, Kind
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.scheduling.events import KvEvents
    from kvdepot.client.vllm.scheduling.local_reuse import LocalReuse, ReusedPrefix
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.client.vllm.scheduling.speculative import SpeculativeAcquires
    from kvdepot.core.planner import LoadPlan, LocalTokens, Planner

ResolveBlocks = Callable[[str], Sequence[Sequence[int]]]
"""Request id -> its block table per engine group, valid only inside one `build_connector_meta`."""

PENDING_SECONDS_MAX: Final = 30.0
"""How long after its deadline a load keeps an otherwise idle engine stepping. Ranks answer long before."""

KEYS_AT_FAULT: Final = frozenset({"missing", "deadline", "copy"})
"""Failures that the next request with this prefix would meet too.

Not among them: no room for one more load, an abort, a reset.
"""

MISSES: Final = {
    "missing": MissReason.GONE,
    "lost": MissReason.GONE,
    "later": MissReason.NO_ROOM,
    "refused": MissReason.REFUSED,
    "deadline": MissReason.LOAD_TIMED_OUT,
    "unavailable": MissReason.UNREACHABLE,
    "adapter": MissReason.EXCLUDED,
}
"""Reason of a failed load -> the reason of its request's miss; others are MissReason.LOAD_FAILED.

An abort is no miss. For "epoch" the miss is the event that ended the epoch.
"""

STALE: Final = frozenset({"missing", "lost", "epoch"})
"""Failures of loads with a lookup that was right when it was answered."""


class LoadPhase(Enum):
    """The state of a load that is not over. See the module."""

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
    keys: list[bytes]  # of the request's chunks
    step: int = 0  # of the engine, in which its blocks were allocated
    plan: LoadPlan | None = None  # what the daemon has to supply
    reused: ReusedPrefix | None = None  # attention that the engine has itself, pinned until the load is over
    lease_id: int = 0
    phase: LoadPhase = LoadPhase.ACQUIRING
    reply: AcquireReply | None = None
    state: RequestState | None = None  # None once the request is over
    source: str = ""
    tokens: int = 0  # that the engine need not compute
    reused_tokens: int = 0  # in addition, of attention that it has itself
    began_at: float = 0.0
    ranks_done: int = 0  # as bits
    ranks_failed: int = 0
    suspended: bool = False  # a rank failed it because the engine has taken its KV memory away
    corrupt: bool = False  # a rank failed it because bytes in RAM did not match their checksum


class Loads:
    """All loads of one engine. Used on the scheduler's thread only."""

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        clock: Callable[[], float],
        counters: Counter[str],
        events: KvEvents,
        speculative: SpeculativeAcquires,
        local_reuse: LocalReuse,
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
        self._speculative = speculative
        self.local_reuse = local_reuse
        self._group_ids = tuple(group_ids)  # planner group -> engine group
        self._all_ranks = (1 << world_size) - 1
        self._active: dict[str, Load] = {}
        self._ops: dict[int, Load] = {}
        self._cancelled: list[int] = []
        self._negative = NegativeCache(clock)
        self.step = 0  # of the engine: how many messages were built
        self.seconds: Observations = deque(maxlen=OBSERVATIONS_MAX)  # of completed loads, until statistics take them

    @property
    def active(self) -> int:
        """Number of loads that the engine waits for."""
        return len(self._active)

    def pending(self) -> bool:
        """Return whether the engine has to keep stepping for a load. Not for ever: see PENDING_SECONDS_MAX."""
        if not self._active:
            return False
        now = self._clock()
        return any(now - load.deadline < PENDING_SECONDS_MAX for load in self._active.values())

    def loading(self, request_id: str) -> bool:
        """Return whether the engine waits for a load of this request."""
        return request_id in self._active

    def failed_lately(self, key: bytes) -> bool:
        """Return whether a load up to this chunk has failed a moment ago."""
        return key in self._negative

    # --- acquire

    def allocated(self, state: RequestState, external_tokens: int) -> None:
        """Begin a load: the engine has taken the offer and allocated blocks. From here on the load must be reported."""
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
            step=self.step + 1,
            source=state.lookup.source if state.lookup is not None else "",
            tokens=external_tokens,
            began_at=now,
        )
        self._active[state.request_id] = load
        local, boundary = state.offered
        namespace = self._namespaces.registered_id
        if namespace is None or local + external_tokens != boundary:
            self._speculative.cancel(state.request_id)
            self._fail(load, "not_offered" if namespace else "unavailable")
            return
        load.reused = self.local_reuse.pin(state.request.block_hashes, local, boundary, state.adapter)
        self._counters["loads"] += 1
        if load.reused is None and (lease := self._speculative.take(state, namespace, local, boundary)) is not None:
            load.plan, load.lease_id = lease.plan, lease.lease_id
            lease.give(partial(self._acquired, load))
            return
        self._speculative.cancel(state.request_id)
        load.plan = self._planner.load_plan(self._local(load, local), boundary)
        load.lease_id = self._session.new_lease_id()
        call = acquire_call(namespace, load.lease_id, state.keys, load.plan, state.depot_id, self._settings)
        self._session.submit(call, self._settings.load_timeout_seconds, partial(self._acquired, load))

    def _local(self, load: Load, local: int) -> LocalTokens:
        """Return the tokens that the daemon need not supply, by kind. Of attention, reused blocks count too."""
        if load.reused is None:
            return local
        load.reused_tokens = load.reused.tokens - local
        self._counters["local_reuse_tokens"] += load.reused_tokens
        load.tokens -= load.reused_tokens
        return dict.fromkeys(self._planner.kinds, local) | {Kind.ATTENTION: load.reused.tokens}

    def fail_allocated(self, state: RequestState) -> None:
        """Fail a load, because something went wrong after the engine allocated its blocks."""
        load = self._active.get(state.request_id)
        if load is None:
            load = Load(state.request_id, next(NUMBERS), 0.0, 0, state.keys, state=state)
            self._active[state.request_id] = load
        if load.phase is not LoadPhase.DISPATCHED:
            self._fail(load, "error")

    def _acquired(self, load: Load, reply: Any) -> None:
        if load.phase is not LoadPhase.ACQUIRING:
            return  # given up during the call: `_report` has released it
        if isinstance(reply, AcquireReply) and reply.outcome is AcquireOutcome.GRANTED:
            load.phase = LoadPhase.GRANTED
            load.reply = reply
            return
        load.lease_id = 0  # none: not granted, or ended by the session
        reason = reply.reason.value if isinstance(reply, CallFailure) else reply.outcome.name.lower()
        self._fail(load, reason)

    def _fail(self, load: Load, reason: str) -> None:
        load.phase = LoadPhase.FAILED
        self._count_failure(load, reason)

    def _count_failure(self, load: Load, reason: str) -> None:
        """Count a failure. The boundary is not offered to this request again, and to others not for a while."""
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
        """Put granted and failed loads into this step's message. Called once a step."""
        self.step += 1
        self._speculative.sweep(self.step)
        if not self._active:
            return
        now = self._clock()
        meta.cancelled_loads.extend(self._cancelled)
        self._cancelled.clear()
        for load in list(self._active.values()):
            if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED) and now >= load.deadline:
                self._fail(load, "deadline")
            # The step that allocated the load may still compute the blocks that are reused: it must be over.
            over = load.reused is None or self.step > load.step
            if load.phase is LoadPhase.GRANTED and resolve is not None and over:
                self._dispatch(load, meta, resolve)
            if load.phase is LoadPhase.FAILED:
                self._report(load, meta)

    def _report(self, load: Load, meta: StepMeta) -> None:
        """Have the ranks report a failed load, and release its lease. No rank has seen its extents.

        The lease is released even before the daemon has answered, because an idle engine takes no step in which it
        would see a late grant. The daemon may see Acquire and Release in either order.
        """
        meta.failed_loads.append(load.request_id)  # first: what fails after it must not lose the report
        if load.lease_id:
            self._session.release([load.lease_id], used=False)
        self._end(load)

    def _end(self, load: Load) -> None:
        del self._active[load.request_id]
        if load.reused is not None:
            self.local_reuse.release(load.reused)

    def _dispatch(self, load: Load, meta: StepMeta, resolve: ResolveBlocks) -> None:
        assert load.reply is not None and load.plan is not None
        load.phase = LoadPhase.FAILED  # until it is in the message, so that it is reported whatever happens here
        if load.reused is not None and not self.local_reuse.counts(load.reused):
            self._fail(load, "foreign")
            return
        tables = resolve(load.request_id)
        objects, moves = self._object_copies(load, tables), self._moves(load, tables)
        if objects is None or moves is None:
            self._fail(load, "blocks_moved")
            return
        reply = load.reply
        meta.loads.append(
            LoadOp(
                load.op_id, load.request_id, load.deadline, reply.arena_id, reply.extents, objects, moves,
                reply.checksums,
            )
        )  # fmt: skip
        load.phase = LoadPhase.DISPATCHED
        self._ops[load.op_id] = load

    def _object_copies(self, load: Load, tables: Sequence[Sequence[int]]) -> tuple[ObjectCopy, ...] | None:
        """Return the plan with block ids, or None if a block is missing. Block 0 is never written."""
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
        """Return the copies within the engine for reused blocks, or None if a block is missing."""
        moves = []
        for span in load.reused.spans if load.reused is not None else ():
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

    def acknowledged(
        self, op_id: int, ranks: int, failed: int, *, suspended: bool = False, corrupt: bool = False
    ) -> None:
        """Note that ranks have finished an operation, and will not touch its extents or blocks again.

        Repeated messages, and those about another side's operations, change nothing.

        Args:
            op_id: the operation.
            ranks: those that have finished, as bits.
            failed: those of them that failed, as bits.
            suspended: whether one failed because the engine has taken its KV memory away.
            corrupt: whether one failed because bytes in RAM did not match their checksum.
        """
        load = self._ops.get(op_id)
        if load is None:
            return
        load.ranks_done |= ranks
        load.ranks_failed |= failed
        load.suspended |= suspended
        load.corrupt |= corrupt
        if load.ranks_done & self._all_ranks != self._all_ranks:
            return
        del self._ops[op_id]
        self._end(load)
        self._session.release([load.lease_id], used=not load.ranks_failed, doubted=load.corrupt)
        if load.ranks_failed:
            reason = "suspended" if load.suspended else "checksum" if load.corrupt else "copy"
            self._count_failure(load, reason if load.epoch == self._namespaces.epoch_number else "epoch")
            return
        assert load.plan is not None
        self._counters["loads_done"] += 1
        self._counters["loaded_tokens"] += load.plan.boundary_tokens
        self._counters[f"hits.{load.source}"] += 1
        self._counters[f"hit_tokens.{load.source}"] += load.tokens
        size_bytes = sum(self._planner.object_bytes(planned.kind) for planned in load.plan.objects)
        self._counters[f"loaded_bytes.{load.source}"] += size_bytes
        seconds = self._clock() - load.began_at
        self.seconds.append((load.source, seconds))
        if load.state is not None:
            load.state.loaded_tokens = load.tokens
            load.state.load_source, load.state.load_seconds = load.source, seconds
            load.state.first_load = load.state.first_load or (load.source, load.tokens, load.reused_tokens)
            self._remember(load.state, load.plan)

    def _remember(self, state: RequestState, plan: LoadPlan) -> None:
        """Note that loaded objects need no store: the daemon has them."""
        state.stored.update((planned.chunk, planned.kind) for planned in plan.objects)
        for planned in plan.objects:
            if planned.kind is Kind.ATTENTION:
                self._events.stored(state, planned.chunk)
        if Kind.ATTENTION in self._planner.kinds:
            state.assumed_chunks = max(state.assumed_chunks, plan.boundary_tokens // self._planner.chunk_tokens)

    def finished(self, state: RequestState) -> None:
        """Note the end of a request. A load that no rank has seen is reported failed; a dispatched one continues."""
        self._speculative.cancel(state.request_id)
        load = self._active.get(state.request_id)
        if load is None:
            return
        if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
            self._fail(load, "aborted")
        load.state = None

    def reset(self, reason: str = "epoch") -> None:
        """Fail all loads, at the end of an epoch for example: nothing found before may arrive in a request."""
        self._speculative.reset()
        for load in self._active.values():
            self._stop(load, reason)

    def stop(self, state: RequestState) -> None:
        """Fail the request's load: its adapter was replaced, and nothing of the former content may arrive."""
        self._speculative.cancel(state.request_id)
        if load := self._active.get(state.request_id):
            self._stop(load, "adapter")

    def _stop(self, load: Load, reason: str) -> None:
        if load.phase in (LoadPhase.ACQUIRING, LoadPhase.GRANTED):
            self._fail(load, reason)
        elif load.phase is LoadPhase.DISPATCHED:
            self._cancelled.append(load.op_id)
