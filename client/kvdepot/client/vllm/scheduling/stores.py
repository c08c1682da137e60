"""Stores, scheduler side: from a complete chunk to the commit of its objects (design.md#store).

    waiting (held weakly) --Reserve--> granted (still weakly) --next step--> dispatched
    (pinned) --every rank--> Commit, or Abandon of what a rank could not write

The engine never waits for a store. A store that cannot continue is dropped, and counted: it is a later miss.
A request has at most one Reserve in flight, so that a child is never asked for before its parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from kvdepot.client.failures import CallFailure
from kvdepot.client.vllm.base.guard import make_all
from kvdepot.client.vllm.base.metadata import NUMBERS, StepMeta
from kvdepot.client.vllm.base.operations import ObjectCopy, StoreOp
from kvdepot.client.vllm.scheduling.candidates import Candidate, StoreCandidates
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.client.vllm.scheduling.store_progress import Dispatched, RequestStores, StoreObject
from kvdepot.core.calls import EXTENT_WORDS, CommitOutcome, Kind, ReserveCall, ReserveOutcome, ReserveReply
from kvdepot.core.limits import RESERVED_PER_CALL_MAX

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.identity.adapters import Adapter
    from kvdepot.client.vllm.scheduling.events import KvEvents
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.client.vllm.scheduling.pins import BlockHolds
    from kvdepot.client.vllm.scheduling.request_ends import RequestEnds
    from kvdepot.client.vllm.scheduling.state_offers import BoundaryOffers
    from kvdepot.core.planner import Planner

RESERVE_TIMEOUT_SECONDS: Final = 5.0
TRIES_MAX: Final = 8
RETRY_SECONDS: Final = 0.05  # doubled at each try: 8 tries span about thirteen seconds
PENDING_SECONDS_MAX: Final = 15.0
"""How long after its last progress a store keeps the engine stepping. A dead daemon costs no more."""


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
        ends: RequestEnds,
        group_ids: Sequence[int],
        hash_block_tokens: int,
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
        self._ends = ends
        self._candidates = StoreCandidates(planner, holds, group_ids, hash_block_tokens, counters)
        self.offers = self._candidates.offers
        self._all_ranks = (1 << world_size) - 1
        self._requests: dict[RequestState, RequestStores] = {}
        self._ops: dict[int, Dispatched] = {}
        self._commits = 0  # in flight
        self._committed_at = 0.0  # when the last commit was sent

    # --- what there is to store

    def consider(
        self, state: RequestState, computed_tokens: int, tables: Sequence[Sequence[int]], offers: BoundaryOffers
    ) -> None:
        """Hold and queue the objects that this step has completed. Arguments as of `StoreCandidates.take`."""
        if state.store_epoch != self._namespaces.epoch_number:
            state.store_stopped = "epoch"
            return
        for candidate in self._candidates.take(state, computed_tokens, tables, offers):
            self._queue(state, candidate)

    def _queue(self, state: RequestState, candidate: Candidate) -> None:
        stores = self._requests.get(state)
        if stores is None:
            stores = RequestStores(state, state.store_epoch)
            self._requests[state] = stores
        planned = candidate.planned
        key, parent = state.keys[planned.chunk], state.parent_key(planned.chunk)
        stores.waiting.append(StoreObject(state, planned, key, parent, candidate.spans, candidate.hold))
        stores.progress_at = self._clock()

    # --- reserve

    def ask(self) -> None:
        """Reserve room for waiting objects, with one call in flight per request."""
        namespace = self._namespaces.registered_id
        if namespace is None or not self._namespaces.ranks_ready:
            return
        now = self._clock()
        for stores in list(self._requests.values()):
            if stores.waiting and not stores.asking:
                self._ask_request(stores, namespace, now)

    def _ask_request(self, stores: RequestStores, namespace: bytes, now: float) -> None:
        batch: list[StoreObject] = []
        while stores.waiting and len(batch) < RESERVED_PER_CALL_MAX and stores.waiting[0].retry_at <= now:
            item = stores.waiting.popleft()
            if self._holds.readable(item.hold):
                batch.append(item)
            else:
                self._drop(item, "reused")
        if not batch:
            self._close_if_over(stores)
            return
        lease_id = self._session.new_lease_id()
        for index, item in enumerate(batch):
            item.lease_id, item.index = lease_id, index
        boundaries = [(item.planned.chunk + 1) * self._planner.chunk_tokens for item in batch]
        call = ReserveCall(
            session=b"",
            lease_id=lease_id,
            namespace_id=namespace,
            keys=b"".join(item.key for item in batch),
            parents=b"".join(item.parent for item in batch),
            kinds=bytes(item.planned.kind for item in batch),
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
            for item in batch:
                self._drop(item, reply.reason.value)
            self._close_if_over(stores)
            return
        assert isinstance(reply, ReserveReply)
        try:
            outcomes, extents = _checked(reply, len(batch))
        except ValueError:  # checked before anything is queued, so that no grant is left in no queue
            self._end_lease(batch, "malformed")
            self._close_if_over(stores)
            return
        invalid = self._invalid(stores, stores.epoch)
        news: list[Callable[[], object]] = []
        if invalid:
            self._end_lease(batch, invalid)
        else:
            news = self._sort(stores, batch, outcomes, extents, reply.arena_id)
        self._close_if_over(stores)
        make_all(news)  # last: an error in an event must not lose a grant

    def _end_lease(self, batch: list[StoreObject], reason: str) -> None:
        """Drop a batch that no rank has seen, and end its whole lease, whatever was granted of it."""
        for item in batch:
            self._drop(item, reason)
        self._session.abandon(batch[0].lease_id)

    def _sort(
        self,
        stores: RequestStores,
        batch: list[StoreObject],
        outcomes: list[ReserveOutcome],
        extents: dict[int, bytes],
        arena_id: int,
    ) -> list[Callable[[], object]]:
        """Move each object to where its outcome sends it. Return what is to be called for KV events afterwards."""
        again: list[StoreObject] = []
        news: list[Callable[[], object]] = []
        orphans = 0
        for item, outcome in zip(batch, outcomes, strict=True):
            self._counters[f"reserve_{outcome.name.lower()}"] += 1
            if outcome is ReserveOutcome.GRANTED:
                item.arena_id, item.extents = arena_id, extents.get(item.index, b"")
                if item.planned.kind is Kind.ATTENTION:
                    news.append(partial(self._events.missing, item.key))
                stores.granted.append(item)
            elif outcome in (ReserveOutcome.PRESENT, ReserveOutcome.PENDING):
                self._holds.drop(item.hold)
                if outcome is ReserveOutcome.PRESENT and item.planned.kind is Kind.ATTENTION:
                    news.append(partial(self._events.stored, stores.state, item.planned.chunk))
            elif outcome is ReserveOutcome.LATER or (outcome is ReserveOutcome.NO_PARENT and again):
                again.append(item)
            else:
                orphans += outcome is ReserveOutcome.NO_PARENT
                self._drop(item, outcome.name.lower())
                if outcome in (ReserveOutcome.NO_ROOM, ReserveOutcome.REFUSED):
                    stores.state.store_stopped = outcome.name.lower()
        self._retry(stores, again)
        if orphans:
            self._orphaned(stores)
        return news

    def _retry(self, stores: RequestStores, again: list[StoreObject]) -> None:
        now = self._clock()
        for item in reversed(again):
            item.tries += 1
            if item.tries > TRIES_MAX:
                self._drop(item, "later")
                stores.state.store_stopped = "later"
                continue
            item.retry_at = now + RETRY_SECONDS * 2 ** (item.tries - 1)
            stores.waiting.appendleft(item)

    def _orphaned(self, stores: RequestStores) -> None:
        """Begin again at the first chunk, because an assumed parent is gone. The second time, stop."""
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
        """Pin granted objects that are still readable, and send them to the ranks."""
        for stores in list(self._requests.values()):
            if stores.granted:
                self._dispatch_request(stores, meta)

    def _dispatch_request(self, stores: RequestStores, meta: StepMeta) -> None:
        ready: dict[int, list[StoreObject]] = {}
        arena_id = self._namespaces.arena_id
        pinned = self._holds.pinned_blocks
        while stores.granted:
            item = stores.granted[0]
            if not self._holds.readable(item.hold) or item.arena_id != arena_id or not item.extents:
                stores.granted.popleft()
                self._session.abandon(item.lease_id, [item.index])
                self._drop(item, "reused" if item.arena_id == arena_id else "arena_gone")
                continue
            blocks = len(item.hold.block_ids)
            if pinned and pinned + blocks > self._pinned_max:
                break
            pinned += blocks
            ready.setdefault(item.lease_id, []).append(stores.granted.popleft())
        for lease_id, objects in ready.items():
            self._send(stores, lease_id, objects, meta)
        self._close_if_over(stores)

    def _send(self, stores: RequestStores, lease_id: int, objects: list[StoreObject], meta: StepMeta) -> None:
        op_id = next(NUMBERS)
        block_ids = tuple(block_id for item in objects for block_id in self._holds.pin(item.hold))
        indices = tuple(item.index for item in objects)
        chunks = tuple(item.planned.chunk if item.planned.kind is Kind.ATTENTION else None for item in objects)
        self._ops[op_id] = Dispatched(stores, stores.epoch, lease_id, indices, chunks, block_ids)
        stores.ops += 1
        stores.progress_at = self._clock()
        copies = tuple(
            ObjectCopy(
                item.index,
                int(item.planned.kind),
                item.key,
                (item.planned.chunk + 1) * self._planner.chunk_tokens,
                item.spans,
            )
            for item in objects
        )
        extents = b"".join(item.extents for item in objects)
        meta.stores.append(StoreOp(op_id, objects[0].arena_id, extents, copies))

    # --- the end

    def acknowledged(self, op_id: int, ranks: int, failed: frozenset[int]) -> None:
        """Note that ranks have finished a copy, and touch neither its blocks nor its extents again.

        Repeated messages, and those about another side's operations, change nothing.

        Args:
            op_id: the operation.
            ranks: those that have finished, as bits.
            failed: indices of objects that one of them could not copy.
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
        invalid = self._invalid(op.stores, op.epoch)
        good = [] if invalid else [index for index in op.indices if index not in op.failed]
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
        self._close_if_over(op.stores)

    def _committed(self, op: Dispatched, chunks: Sequence[int | None], outcomes: bytes) -> None:
        self._commits -= 1
        current = op.epoch == self._namespaces.epoch_number
        for outcome, chunk in zip(outcomes, chunks, strict=False):
            self._counters[f"commit_{outcome}"] += 1
            if chunk is not None and current and outcome == CommitOutcome.COMMITTED:
                self._events.stored(op.stores.state, chunk)

    def finished(self, state: RequestState) -> bool:
        """Note the end of a request. Its blocks stay readable until their reuse, so its stores continue.

        Return whether it has stores. If it has, the daemon is told of its end after them.
        """
        self.offers.drop(state, "finished")
        stores = self._requests.get(state)
        if stores is None:
            return False
        stores.finished = True
        self._close_if_over(stores)
        return True

    def reset(self, reason: str = "epoch") -> None:
        """Stop all stores, at the end of an epoch for example. Copies in progress are abandoned when they finish."""
        self.offers.drop_all(reason)
        for stores in list(self._requests.values()):
            self._stop(stores, reason)

    def replaced(self, adapter: Adapter) -> None:
        """Stop all stores of requests with this adapter, also of those that are over."""
        self.offers.drop_adapter(adapter, "adapter")
        for stores in list(self._requests.values()):
            if stores.state.adapter == adapter:
                self._retract(stores, "adapter")

    def retract(self, state: RequestState, reason: str) -> None:
        """Stop a request's stores, and publish nothing that the ranks have not acknowledged."""
        self.offers.drop(state, reason)
        if stores := self._requests.get(state):
            self._retract(stores, reason)

    def _retract(self, stores: RequestStores, reason: str) -> None:
        stores.invalid = reason
        self._stop(stores, reason)

    def _invalid(self, stores: RequestStores, epoch: int) -> str:
        """Return why nothing of a request may be committed, or an empty string if it may."""
        return "epoch" if epoch != self._namespaces.epoch_number else stores.invalid

    def _stop(self, stores: RequestStores, reason: str) -> None:
        stores.state.store_stopped = reason
        for item in stores.granted:
            self._session.abandon(item.lease_id, [item.index])
        for item in (*stores.waiting, *stores.granted):
            self._drop(item, reason)
        for item in stores.asking:
            self._holds.drop(item.hold)
        stores.waiting.clear()
        stores.granted.clear()
        self._close_if_over(stores)

    def pending(self) -> bool:
        """Return whether the engine has to keep stepping for a store. Not for ever: see PENDING_SECONDS_MAX."""
        now = self._clock()
        if self._events.on and self._commits and now - self._committed_at < PENDING_SECONDS_MAX:
            return True  # a step publishes the events of stored chunks
        return any(stores.busy and now - stores.progress_at < PENDING_SECONDS_MAX for stores in self._requests.values())

    @property
    def open_requests(self) -> int:
        """Number of requests with stores that are not over."""
        return len(self._requests)

    def _drop(self, item: StoreObject, reason: str) -> None:
        self._holds.drop(item.hold)
        item.state.given_up.add((item.planned.chunk, item.planned.kind))
        self._counters[f"store_dropped_{reason}"] += 1

    def _close_if_over(self, stores: RequestStores) -> None:
        """Forget the stores of a finished request when they are over, and tell the daemon."""
        if stores.busy or not stores.finished or self._requests.pop(stores.state, None) is None:
            return
        if stores.asked or stores.state.located:
            self._ends.send(stores.state)


def _checked(reply: ReserveReply, count: int) -> tuple[list[ReserveOutcome], dict[int, bytes]]:
    """Return one outcome per object, and the extents by object. Raise ValueError for an answer that makes no sense."""
    outcomes = [ReserveOutcome(code) for code in reply.outcomes]
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes for {count} objects")
    return outcomes, _by_object(reply.extents)


def _by_object(extents: bytes) -> dict[int, bytes]:
    """Return packed extents by object index."""
    if not extents:
        return {}
    table = np.frombuffer(extents, dtype="<u8").reshape(-1, EXTENT_WORDS)
    cuts = np.flatnonzero(np.diff(table[:, 0])) + 1
    return {int(part[0, 0]): part.tobytes() for part in np.split(table, cuts)}
