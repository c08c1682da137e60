"""Stores, scheduler side: from a complete chunk to the commit of its objects (DESIGN 4).

    waiting (held weakly) --Reserve--> granted (still weakly) --next step--> dispatched
    (pinned) --every rank--> Commit, or Abandon of what a rank could not write

The engine never waits for any of it. What cannot go on is dropped: a later miss, counted.
Reservations of one request follow each other (one call in the air), so that a child is
never asked for before its parent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from kvdepot.client.failures import CallFailure
from kvdepot.client.vllm.metadata import NUMBERS, ObjectCopy, SpanCopy, StepMeta, StoreOp
from kvdepot.client.vllm.requests import RequestState
from kvdepot.core.calls import EXTENT_WORDS, CommitOutcome, Kind, ReserveCall, ReserveOutcome, ReserveReply
from kvdepot.core.limits import RESERVED_PER_CALL_MAX

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.adapters import Adapter
    from kvdepot.client.vllm.events import KvEvents
    from kvdepot.client.vllm.namespaces import Namespaces
    from kvdepot.client.vllm.pins import BlockHolds, WeakHold
    from kvdepot.client.vllm.settings import Settings
    from kvdepot.core.planner import PlannedObject, Planner

RESERVE_TIMEOUT_SECONDS: Final = 5.0
TRIES_MAX: Final = 8
RETRY_SECONDS: Final = 0.05  # doubled at each try: 8 tries span about thirteen seconds
PENDING_SECONDS_MAX: Final = 15.0
"""How long after its last progress a store keeps the engine stepping: a dead daemon costs no more."""

BoundaryOffers = Sequence[tuple[int, int, int]]
"""vLLM's hand-offs of recurrent states: (engine group, block id, boundary tokens)."""


@dataclass(slots=True)
class StoreObject:
    """One object on its way to the daemon."""

    state: RequestState
    planned: PlannedObject
    key: bytes
    parent: bytes
    spans: tuple[SpanCopy, ...]
    hold: WeakHold
    tries: int = 0
    retry_at: float = 0.0
    lease_id: int = 0
    index: int = 0  # within the lease
    arena_id: int = 0
    extents: bytes = b""


@dataclass(slots=True)
class RequestStores:
    """The stores of one request. Outlives the request until they are over."""

    state: RequestState
    epoch: int
    waiting: deque[StoreObject] = field(default_factory=deque)  # in chain order
    granted: deque[StoreObject] = field(default_factory=deque)
    asking: list[StoreObject] = field(default_factory=list)  # of these the daemon's answer is awaited
    ops: int = 0  # dispatched and not acknowledged
    asked: bool = False  # the daemon has heard of the request, so it must hear of its end
    finished: bool = False
    void: bool = False  # the content of its adapter is not known any more
    progress_at: float = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.granted or self.asking or self.ops)


@dataclass(slots=True)
class Dispatched:
    """A copy that the ranks are working on. Its blocks are pinned."""

    stores: RequestStores
    epoch: int
    lease_id: int
    indices: tuple[int, ...]
    chunks: tuple[int | None, ...]  # of each, where it is attention
    block_ids: tuple[int, ...]
    ranks_done: int = 0  # as bits
    failed: set[int] = field(default_factory=set)


class Stores:
    """All stores of one engine. Used on the scheduler's thread only."""

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        holds: BlockHolds,
        settings: Settings,
        clock: Callable[[], float],
        counters: Counter[str],
        events: KvEvents,
        group_ids: Sequence[int],
        world_size: int,
    ) -> None:
        self._session = session
        self._namespaces = namespaces
        self._planner = planner
        self._holds = holds
        self._pinned_max = holds.pinned_max(settings.max_pinned_blocks)
        self._clock = clock
        self._counters = counters
        self._events = events
        self._group_ids = tuple(group_ids)
        self._group_of = {engine: group for group, engine in enumerate(group_ids)}
        self._all_ranks = (1 << world_size) - 1
        self._requests: dict[RequestState, RequestStores] = {}
        self._ops: dict[int, Dispatched] = {}
        self._commits = 0  # not answered
        self._committed_at = 0.0  # the last one was asked for

    # --- what there is to store

    def consider(
        self, state: RequestState, computed_tokens: int, tables: Sequence[Sequence[int]], offers: BoundaryOffers
    ) -> None:
        """Hold and queue what is complete after this step and not known to be stored."""
        chunks = computed_tokens // self._planner.chunk_tokens
        if state.store_stopped or (chunks <= state.next_chunk and not offers):
            return
        if state.store_epoch != self._namespaces.epoch_number:
            state.store_stopped = "epoch"
            return
        state.stored.update((chunk, Kind.ATTENTION) for chunk in range(state.next_chunk, state.assumed_chunks))
        by_boundary = self._offers_by_boundary(offers)
        first = min([state.next_chunk, *(boundary // self._planner.chunk_tokens - 1 for boundary in by_boundary)])
        plan = self._planner.store_plan(
            state.stored,
            computed_tokens,
            by_boundary,
            alive_from=self._alive_from(tables, computed_tokens),
            first_chunk=max(first, 0),
        )
        state.next_chunk = max(state.next_chunk, chunks)
        for planned in plan.objects:
            self._queue(state, planned, tables)

    def _offers_by_boundary(self, offers: BoundaryOffers) -> dict[int, dict[int, int]]:
        """Offers the planner understands: known groups, hashed blocks, whole chunks."""
        found: dict[int, dict[int, int]] = {}
        for engine_group, block_id, boundary in offers:
            group = self._group_of.get(engine_group)
            if group is None or not block_id or boundary % self._planner.chunk_tokens:
                continue
            if self._holds.block_hash(block_id) is None:
                continue  # taken back in the same step: the engine will overwrite it
            found.setdefault(boundary, {})[group] = block_id
        return found

    def _alive_from(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> dict[int, int]:
        """Per window group the first table index from which on every computed block is there."""
        alive = {}
        for group in self._planner.groups_of(Kind.WINDOW):
            table = tables[self._group_ids[group]]
            index = min(computed_tokens // self._planner.groups[group].block_tokens, len(table))
            while index and table[index - 1]:
                index -= 1
            alive[group] = index
        return alive

    def _queue(self, state: RequestState, planned: PlannedObject, tables: Sequence[Sequence[int]]) -> None:
        state.stored.add((planned.chunk, planned.kind))
        spans = []
        for place, span in enumerate(planned.spans):
            if planned.block_ids:
                ids: tuple[int, ...] = (planned.block_ids[place],)
            else:
                table = tables[self._group_ids[span.group]]
                ids = tuple(table[span.table_block : span.table_block + span.blocks])
            if len(ids) != span.blocks or not self._holds.holdable(ids):
                state.given_up.add((planned.chunk, planned.kind))
                self._counters["store_dropped_no_source"] += 1
                return
            spans.append(SpanCopy(span.group, span.object_block, ids))
        stores = self._requests.get(state)
        if stores is None:
            stores = RequestStores(state, state.store_epoch)
            self._requests[state] = stores
        hold = self._holds.hold(tuple(block_id for span in spans for block_id in span.block_ids))
        stores.waiting.append(
            StoreObject(state, planned, state.keys[planned.chunk], state.parent_key(planned.chunk), tuple(spans), hold)
        )
        stores.progress_at = self._clock()

    # --- reserve

    def ask(self) -> None:
        """Reserve room for what waits, one call a request at a time."""
        namespace = self._namespaces.usable
        if namespace is None or not self._namespaces.ranks_ready:
            return
        now = self._clock()
        for stores in list(self._requests.values()):
            if stores.waiting and not stores.asking:
                self._ask_request(stores, namespace, now)

    def _ask_request(self, stores: RequestStores, namespace: bytes, now: float) -> None:
        batch: list[StoreObject] = []
        while stores.waiting and len(batch) < RESERVED_PER_CALL_MAX and stores.waiting[0].retry_at <= now:
            found = stores.waiting.popleft()
            if self._holds.readable(found.hold):
                batch.append(found)
            else:
                self._drop(found, "reused")
        if not batch:
            self._settle(stores)
            return
        lease_id = self._session.new_lease_id()
        for index, found in enumerate(batch):
            found.lease_id, found.index = lease_id, index
        boundaries = [(found.planned.chunk + 1) * self._planner.chunk_tokens for found in batch]
        call = ReserveCall(
            session=b"",
            lease_id=lease_id,
            namespace=namespace,
            keys=b"".join(found.key for found in batch),
            parents=b"".join(found.parent for found in batch),
            kinds=bytes(found.planned.kind for found in batch),
            boundaries=np.asarray(boundaries, dtype="<u4").tobytes(),
            request_id=stores.state.depot_id,
        )
        stores.asking, stores.asked = batch, True
        self._counters["reserved_objects"] += len(batch)
        self._session.submit(call, RESERVE_TIMEOUT_SECONDS, partial(self._reserved, stores, batch))

    def _reserved(self, stores: RequestStores, batch: list[StoreObject], reply: Any) -> None:
        stores.asking = []
        stores.progress_at = self._clock()
        if isinstance(reply, CallFailure):
            for found in batch:
                self._drop(found, reply.reason.value)
            self._settle(stores)
            return
        assert isinstance(reply, ReserveReply)
        try:
            outcomes, extents = _checked(reply, len(batch))
        except ValueError:  # before anything is queued, so that nothing that was granted is left in no queue
            self._give_back(batch, "malformed")
            self._settle(stores)
            return
        void = self._void(stores, stores.epoch)
        if void:
            self._give_back(batch, void)
        else:
            self._sort(stores, batch, outcomes, extents, reply.arena_id)
        self._settle(stores)

    def _give_back(self, batch: list[StoreObject], reason: str) -> None:
        """No rank has seen any of it: the whole lease ends, whatever of it was granted."""
        for found in batch:
            self._drop(found, reason)
        self._session.abandon(batch[0].lease_id)

    def _sort(
        self,
        stores: RequestStores,
        batch: list[StoreObject],
        outcomes: list[ReserveOutcome],
        extents: dict[int, bytes],
        arena_id: int,
    ) -> None:
        """Each object to where its outcome sends it."""
        again: list[StoreObject] = []
        orphans = 0
        for found, outcome in zip(batch, outcomes, strict=True):
            self._counters[f"reserve_{outcome.name.lower()}"] += 1
            if outcome is ReserveOutcome.GRANTED:
                found.arena_id, found.extents = arena_id, extents.get(found.index, b"")
                if found.planned.kind is Kind.ATTENTION:
                    self._events.missing(found.key)
                stores.granted.append(found)
            elif outcome in (ReserveOutcome.PRESENT, ReserveOutcome.PENDING):
                self._holds.drop(found.hold)
                if outcome is ReserveOutcome.PRESENT and found.planned.kind is Kind.ATTENTION:
                    self._events.stored(stores.state, found.planned.chunk)
            elif outcome is ReserveOutcome.LATER or (outcome is ReserveOutcome.NO_PARENT and again):
                again.append(found)
            else:
                orphans += outcome is ReserveOutcome.NO_PARENT
                self._drop(found, outcome.name.lower())
                if outcome in (ReserveOutcome.NO_ROOM, ReserveOutcome.REFUSED):
                    stores.state.store_stopped = outcome.name.lower()
        self._retry(stores, again)
        if orphans:
            self._orphaned(stores)

    def _retry(self, stores: RequestStores, again: list[StoreObject]) -> None:
        now = self._clock()
        for found in reversed(again):
            found.tries += 1
            if found.tries > TRIES_MAX:
                self._drop(found, "later")
                stores.state.store_stopped = "later"
                continue
            found.retry_at = now + RETRY_SECONDS * 2 ** (found.tries - 1)
            stores.waiting.appendleft(found)

    def _orphaned(self, stores: RequestStores) -> None:
        """A parent taken to be there is gone. Once, begin anew at the first chunk; then give the request up."""
        state = stores.state
        if not state.assumed_chunks:
            state.store_stopped = "no_parent"
            return
        state.assumed_chunks = 0
        state.stored.clear()
        state.given_up.clear()
        state.next_chunk = 0

    # --- dispatch

    def dispatch(self, meta: StepMeta) -> None:
        """Pin what is granted and still readable, and send it to the ranks."""
        for stores in list(self._requests.values()):
            if stores.granted:
                self._dispatch_request(stores, meta)

    def _dispatch_request(self, stores: RequestStores, meta: StepMeta) -> None:
        ready: dict[int, list[StoreObject]] = {}
        arena_id = self._namespaces.arena_id
        pinned = self._holds.pinned_blocks
        while stores.granted:
            found = stores.granted[0]
            if not self._holds.readable(found.hold) or found.arena_id != arena_id or not found.extents:
                stores.granted.popleft()
                self._session.abandon(found.lease_id, [found.index])
                self._drop(found, "reused" if found.arena_id == arena_id else "arena_gone")
                continue
            blocks = len(found.hold.block_ids)
            if pinned and pinned + blocks > self._pinned_max:
                break
            pinned += blocks
            ready.setdefault(found.lease_id, []).append(stores.granted.popleft())
        for lease_id, objects in ready.items():
            self._send(stores, lease_id, objects, meta)
        self._settle(stores)

    def _send(self, stores: RequestStores, lease_id: int, objects: list[StoreObject], meta: StepMeta) -> None:
        op_id = next(NUMBERS)
        block_ids = tuple(block_id for found in objects for block_id in self._holds.pin(found.hold))
        indices = tuple(found.index for found in objects)
        chunks = tuple(found.planned.chunk if found.planned.kind is Kind.ATTENTION else None for found in objects)
        self._ops[op_id] = Dispatched(stores, stores.epoch, lease_id, indices, chunks, block_ids)
        stores.ops += 1
        stores.progress_at = self._clock()
        copies = tuple(
            ObjectCopy(
                found.index,
                int(found.planned.kind),
                found.key,
                (found.planned.chunk + 1) * self._planner.chunk_tokens,
                found.spans,
            )
            for found in objects
        )
        extents = b"".join(found.extents for found in objects)
        meta.stores.append(StoreOp(op_id, objects[0].arena_id, extents, copies))

    # --- the end

    def acknowledged(self, op_id: int, ranks: int, failed: frozenset[int]) -> None:
        """These ranks (bits) have finished the copy and touch neither blocks nor extents again.

        What was heard already, or is about another side's operation, changes nothing.
        """
        op = self._ops.get(op_id)
        if op is None:
            return
        op.ranks_done |= ranks
        op.failed |= failed
        if op.ranks_done & self._all_ranks != self._all_ranks:
            return
        del self._ops[op_id]
        self._holds.unpin(op.block_ids)
        op.stores.ops -= 1
        op.stores.progress_at = self._clock()
        void = self._void(op.stores, op.epoch)
        good = [] if void else [index for index in op.indices if index not in op.failed]
        if good:
            self._counters["stored_objects"] += len(good)
            chunks = [op.chunks[op.indices.index(index)] for index in good]
            self._commits += 1
            self._committed_at = self._clock()
            self._session.commit(op.lease_id, good, partial(self._committed, op, chunks))
        bad = [index for index in op.indices if index not in good]
        if bad:
            self._counters["store_failed_copy"] += len(bad)
            self._session.abandon(op.lease_id, bad)
        self._settle(op.stores)

    def _committed(self, op: Dispatched, chunks: Sequence[int | None], outcomes: bytes) -> None:
        self._commits -= 1
        current = op.epoch == self._namespaces.epoch_number
        for outcome, chunk in zip(outcomes, chunks, strict=False):
            self._counters[f"commit_{outcome}"] += 1
            if chunk is not None and current and outcome == CommitOutcome.COMMITTED:
                self._events.stored(op.stores.state, chunk)

    def finished(self, state: RequestState) -> bool:
        """The engine is done with the request. Its blocks stay readable until reused, so its stores go on.

        Returns whether it has any, and the daemon hears of its end when they are over.
        """
        stores = self._requests.get(state)
        if stores is None:
            return False
        stores.finished = True
        self._settle(stores)
        return True

    def reset(self, reason: str = "epoch") -> None:
        """A new epoch, say: what no rank has seen is given back, what ranks copy is abandoned when they finish."""
        for stores in list(self._requests.values()):
            self._stop(stores, reason)

    def replaced(self, adapter: Adapter) -> None:
        """The same of all requests with this adapter, also of those that are over."""
        for stores in list(self._requests.values()):
            if stores.state.adapter == adapter:
                stores.void = True
                self._stop(stores, "adapter")

    def _void(self, stores: RequestStores, epoch: int) -> str:
        """Why nothing of it may be committed; empty if it may."""
        return "epoch" if epoch != self._namespaces.epoch_number else "adapter" if stores.void else ""

    def _stop(self, stores: RequestStores, reason: str) -> None:
        stores.state.store_stopped = reason
        for found in stores.granted:
            self._session.abandon(found.lease_id, [found.index])
        for found in (*stores.waiting, *stores.granted):
            self._drop(found, reason)
        for found in stores.asking:
            self._holds.drop(found.hold)
        stores.waiting.clear()
        stores.granted.clear()
        self._settle(stores)

    def pending(self) -> bool:
        """Whether the engine has to keep stepping for a store, with an end to it."""
        now = self._clock()
        if self._events.on and self._commits and now - self._committed_at < PENDING_SECONDS_MAX:
            return True  # a step publishes what was stored
        return any(stores.busy and now - stores.progress_at < PENDING_SECONDS_MAX for stores in self._requests.values())

    @property
    def open_requests(self) -> int:
        """Requests whose stores are not over."""
        return len(self._requests)

    def _drop(self, found: StoreObject, reason: str) -> None:
        self._holds.drop(found.hold)
        found.state.given_up.add((found.planned.chunk, found.planned.kind))
        self._counters[f"store_dropped_{reason}"] += 1

    def _settle(self, stores: RequestStores) -> None:
        """Forget the stores of a request when they are over, and tell the daemon."""
        if stores.busy or not stores.finished or self._requests.pop(stores.state, None) is None:
            return
        if stores.asked or stores.state.located:
            self._session.end_request(stores.state.depot_id, stores.state.end)


def _checked(reply: ReserveReply, count: int) -> tuple[list[ReserveOutcome], dict[int, bytes]]:
    """One outcome an object, and the extents by object. Raises ValueError for an answer that cannot be read."""
    outcomes = [ReserveOutcome(code) for code in reply.outcomes]
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes for {count} objects")
    return outcomes, _by_object(reply.extents)


def _by_object(extents: bytes) -> dict[int, bytes]:
    """Packed extents, cut by object index."""
    if not extents:
        return {}
    table = np.frombuffer(extents, dtype="<u8").reshape(-1, EXTENT_WORDS)
    cuts = np.flatnonzero(np.diff(table[:, 0])) + 1
    return {int(part[0, 0]): part.tobytes() for part in np.split(table, cuts)}
