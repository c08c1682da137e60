"""The connector's worker side: one rank's copies between KV blocks and the arena, mapped or not (DESIGN 4).

One copying thread does all copies, loads before stores, in bounded batches. It alone
reports results, after its last byte: so nothing is written into a block once its load
was reported, and no extent is touched once a copy was acknowledged.

An operation belongs to the KV memory and to the geometry for which it came. When the engine
takes its memory away (sleep, other tensors) or another geometry comes, it fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvdepot.client.copy.base import InDoubt
from kvdepot.client.copy.revocable import RevocableCopier, Revoked
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.vllm.audit import LOADED, STORED, Audit
from kvdepot.client.vllm.compat import KVConnectorTransferResults
from kvdepot.client.vllm.metadata import (
    Geometry,
    LoadOp,
    ObjectCopy,
    RankArena,
    RankMeta,
    StepMeta,
    StoreOp,
)
from kvdepot.client.vllm.places import ObjectPlaces
from kvdepot.client.vllm.stats import KVDepotStats
from kvdepot.core.planner import Planner

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, BlockCopier
    from kvdepot.client.vllm.guard import Failures
    from kvdepot.client.vllm.layers import RankLayers

LOGGER = logging.getLogger("vllm.kvdepot")

JOIN_SECONDS: Final = 5.0
"""How long `close` and `suspend` wait for the copy in progress: one batch takes milliseconds."""

LINGER_SECONDS: Final = 0.002
"""How long a step that computes nothing waits for the loads that begin in it (docs/adr/0041, 7)."""


class Attached(Protocol):
    """What is used of `kvdepot.client.attachment.Attachment`."""

    @property
    def arena(self) -> Arena | None: ...
    @property
    def session(self) -> bytes | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the copying thread has finished. `failed` are object indices; of a load any means all."""

    op: LoadOp | StoreOp
    failed: frozenset[int]
    seconds: float = 0.0  # of copying
    places: ObjectPlaces | None = None  # by which it was copied
    suspended: bool = False  # it failed because the engine has taken its KV memory away


Op = TypeVar("Op", LoadOp, StoreOp)
Queued = tuple[Op, object]
"""An operation, and the mark of what the engine had given its device when it came."""


class _LostDevice:
    """A device that failed cannot say whether it still writes: what it was given stays lent until this process ends."""

    proxy_dead = False


class CopyThread:
    """Copies what it is given, in order, loads first. `submit_*` never wait."""

    def __init__(
        self,
        attachment: Attached,
        copier: BlockCopier,
        failures: Failures,
        *,
        clock: Callable[[], float] = time.monotonic,
        audit: Audit | None = None,
        name: str = "kvdepot-copy",
    ) -> None:
        self._attachment = attachment
        self._copier = copier
        self._kv = RevocableCopier(copier)  # another one after each suspension
        self._places: ObjectPlaces | None = None
        self._given: dict[int, tuple[RevocableCopier, ObjectPlaces | None]] = {}  # op id -> what it came for
        self._failures = failures
        self._clock = clock
        self._audit = audit
        self._loads: deque[Queued[LoadOp]] = deque()
        self._stores: deque[Queued[StoreOp]] = deque()
        self._done: deque[_Outcome] = deque()  # appended and popped atomically
        self._doubted: deque[tuple[_Outcome, InDoubt]] = deque()  # so is this
        self._cancelled: set[int] = set()
        self._wake = threading.Condition()
        self._loading = 0  # loads that are not over
        self._working = 0  # operations that the thread has begun
        self._suspended = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, places: ObjectPlaces) -> None:
        """Begin copying: the geometry has arrived. Another one: what came for the former keeps to that."""
        self._places = places
        if not self._thread.is_alive():
            self._thread.start()

    def submit(self, loads: Sequence[LoadOp], stores: Sequence[StoreOp], cancelled: Sequence[int] = ()) -> None:
        """Queue operations; ids in `cancelled` must not succeed any more. On the engine's thread."""
        mark = self._copier.mark() if loads or stores else None
        with self._wake:
            ops: list[LoadOp | StoreOp] = [*loads, *stores]
            if self._suspended or self._stopping:
                self._done.extend(map(_lost, ops))
                return
            self._given |= {op.op_id: (self._kv, self._places) for op in ops}
            self._loads.extend((op, mark) for op in loads)
            self._loading += len(loads)
            self._stores.extend((op, mark) for op in stores)
            self._cancelled.update(cancelled)
            self._wake.notify()

    def suspend(self) -> bool:
        """KV memory is not touched until `resume`: what is queued or comes fails, so does what is copied now.

        Loads that have arrived and are not reported fail too: their bytes go with the memory. Waits JOIN_SECONDS at
        most. False: a copy has not ended by then; it touches nothing after its current batch.
        """
        until = time.monotonic() + JOIN_SECONDS
        with self._wake:
            self._suspended = self._kv.revoked = True
            queued: list[LoadOp | StoreOp] = [*(op for op, _ in self._loads), *(op for op, _ in self._stores)]
            self._loading -= len(self._loads)
            self._loads.clear()
            self._stores.clear()
            for op in queued:
                self._forget(op)
            done = [_lost(outcome.op) if isinstance(outcome.op, LoadOp) else outcome for outcome in self._done]
            self._done = deque([*done, *map(_lost, queued)])
            self._wake.notify_all()
        ended = self._kv.revoke(max(until - time.monotonic(), 0.0))
        with self._wake:
            return self._wake.wait_for(lambda: not self._working, max(until - time.monotonic(), 0.0)) and ended

    def resume(self) -> None:
        """The engine's KV memory is there again, with whatever in it."""
        with self._wake:
            if self._suspended:
                self._suspended = False
                self._kv = RevocableCopier(self._copier)

    def take_done(self) -> list[_Outcome]:
        """Everything finished since the last call. Each operation appears once, ever."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        for _ in range(len(self._doubted)):
            outcome, doubt = self._doubted.popleft()
            if doubt.over:
                done.append(outcome)
            else:
                self._doubted.append((outcome, doubt))
        return done + self._withdraw_late()

    def wait_for_loads(self, seconds: float) -> None:
        """Until no load is under way, for so long at most."""
        with self._wake:
            self._wake.wait_for(lambda: not self._loading, seconds)

    def _withdraw_late(self) -> list[_Outcome]:
        """Loads that nobody has begun by their deadline: whatever holds the thread up, they end in time."""
        if not self._loads:
            return []
        with self._wake:
            now = self._clock()
            late = [op for op, _ in self._loads if op.deadline <= now]
            if late:
                self._loads = deque((op, mark) for op, mark in self._loads if op.deadline > now)
                self._loading -= len(late)
                for op in late:
                    self._forget(op)
        return [_everything(op) for op in late]

    def _forget(self, op: LoadOp | StoreOp) -> None:
        self._cancelled.discard(op.op_id)
        self._given.pop(op.op_id, None)

    @property
    def over(self) -> bool:
        """Closed, and everything is reported that ever will be."""
        return self._stopping and not (self._thread.is_alive() or self._done or self._doubted)

    def close(self) -> None:
        """Finish the copy in progress, drop the rest. Bounded by JOIN_SECONDS."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _next(self) -> Queued[LoadOp] | Queued[StoreOp] | None:
        while True:
            with self._wake:
                if self._stopping:
                    return None
                if self._loads or self._stores:
                    return self._loads.popleft() if self._loads else self._stores.popleft()
            pause = self._prepare()
            with self._wake:
                if not (self._stopping or self._loads or self._stores):
                    self._wake.wait(pause)

    def _prepare(self) -> float | None:
        try:
            return self._copier.prepare(self._attachment.arena)
        except Exception as error:  # noqa: BLE001 - copies work without it
            self._failures.record("prepare", error)
            return None

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            self._do(*queued)
        with contextlib.suppress(Exception):
            self._copier.prepare(None)

    def _do(self, op: LoadOp | StoreOp, mark: object) -> None:
        with self._wake:
            self._working += 1
        try:
            self._copy(op, mark)
        finally:
            with self._wake:
                self._working -= 1
                self._loading -= isinstance(op, LoadOp)
                self._forget(op)
                self._wake.notify_all()

    def _copy(self, op: LoadOp | StoreOp, mark: object) -> None:
        failed = frozenset(copied.index for copied in op.objects)
        began = self._clock()
        kv, places = self._came_for(op)
        revoked = False
        try:
            kv.after(mark)
            failed = frozenset(self._load(op) if isinstance(op, LoadOp) else self._store(op))
        except Revoked:
            revoked = True
        except InDoubt as doubt:
            self._doubted.append((_Outcome(op, failed), doubt))
            return
        except Exception as error:  # noqa: BLE001 - I3: an operation that fails in any way is a failed copy
            self._failures.record("copy", error)
        try:
            kv.wait()  # also for what failed: nothing moves any more once this is reported
        except Exception as error:  # noqa: BLE001
            self._failures.record("wait", error)
            self._doubted.append((_Outcome(op, failed), InDoubt(_LostDevice())))
            return
        with self._wake:
            if revoked or (kv.revoked and isinstance(op, LoadOp)):
                self._done.append(_lost(op))
            else:
                self._done.append(_Outcome(op, failed, self._clock() - began, places))

    def _came_for(self, op: LoadOp | StoreOp) -> tuple[RevocableCopier, ObjectPlaces | None]:
        return self._given.get(op.op_id, (self._kv, self._places))

    def _arena(self, op: LoadOp | StoreOp) -> Arena | None:
        arena = self._attachment.arena
        return arena if arena is not None and arena.arena_id == op.arena_id else None

    def _load(self, op: LoadOp) -> list[int]:
        """Copy everything into the engine's blocks. Any failure fails all, and stops the writing at once."""
        everything = [copied.index for copied in op.objects]
        arena = self._arena(op)
        if arena is None:
            return everything
        kv, places = self._came_for(op)
        assert places is not None
        extents = parse_extents(op.extents, arena.size_bytes)
        pieces = places.pieces(op.objects, extents, writing=False)
        rows, granted = extents.granted(everything)
        if not arena.check(rows, granted):
            return everything
        for layers, sources, targets in places.moves(op.moves):
            if self._left(op) <= 0:
                return everything
            kv.move(layers, sources, targets)
        for batch in pieces.split():
            left = self._left(op)
            if left <= 0 or not arena.load(kv, extents, batch, left):
                return everything
        kv.wait()
        if not arena.check(rows, granted) or op.op_id in self._cancelled:
            return everything
        if self._audit is not None:
            with kv.use():
                self._audit.record(LOADED, op.request_id, op.objects)
        return []

    def _left(self, op: LoadOp) -> float:
        """Seconds in which a load may still write into the engine's blocks."""
        return 0.0 if op.op_id in self._cancelled else op.deadline - self._clock()

    def _store(self, op: StoreOp) -> list[int]:
        """Copy object by object, in batches over all of them; returns the indices that did not succeed."""
        arena = self._arena(op)
        if arena is None:
            return [copied.index for copied in op.objects]
        kv, places = self._came_for(op)
        assert places is not None
        extents = parse_extents(op.extents, arena.size_bytes)
        good = [copied for copied in op.objects if self._still_granted(arena, extents, copied)]
        for batch in places.pieces(good, extents, writing=True).split():
            if not arena.store(kv, extents, batch, self._yield_to_loads):
                return [copied.index for copied in op.objects]
            self._yield_to_loads()
        kv.wait()
        written = [copied for copied in good if self._still_granted(arena, extents, copied)]
        if self._audit is not None:
            with kv.use():
                self._audit.record(STORED, "", written)
        return sorted({copied.index for copied in op.objects} - {copied.index for copied in written})

    def _still_granted(self, arena: Arena, extents: Extents, copied: ObjectCopy) -> bool:
        return copied.index in extents.fragments and arena.check(*extents.granted([copied.index]))

    def _yield_to_loads(self) -> None:
        """Beside and between the batches of a store, run the loads that have come in: a request waits for them."""
        while self._loads:
            with self._wake:
                if not self._loads or self._stopping:
                    return
                queued = self._loads.popleft()
            self._do(*queued)


class WorkerSide:
    """One rank: takes each step's message, gives back what the copying thread has finished.

    A step that computes nothing waits a moment for the loads that begin in it: what ends just
    behind it would be told a whole turn of the engine later.
    """

    def __init__(
        self,
        rank: int,
        attachment: Attached,
        copies: CopyThread | None,
        layers: RankLayers,
        audit: Audit | None = None,
        digest: str = "",
    ) -> None:
        """`copies` None: this rank can copy nothing, and every operation fails at once.

        So does everything that comes before a geometry that was made with this rank's facts, of which `digest` is one.
        """
        self._rank = rank
        self.attachment = attachment
        self._copies = copies
        self._running: CopyThread | None = None
        self._former: list[CopyThread] = []  # for KV memory that the engine has replaced
        self._layers = layers
        self._audit = audit
        self._digest = digest
        self._geometry: Geometry | None = None  # the last one that came
        self._suspended = False
        self._refused: list[_Outcome] = []  # operations no thread will see
        self._unloadable: set[str] = set()
        self._cancelled: set[int] = set()  # loads whose bytes are void, even if the copy is done and not reported
        self._meta = RankMeta()
        self._stats = KVDepotStats()
        self._loads_step = self._stores_step = 0  # the last ones whose messages were taken
        self._question = 0
        self._told: RankArena | None = None
        self._lingers = False  # this step has loads, and nothing to compute

    # --- KV memory

    def replace(self, copies: CopyThread | None, layers: RankLayers, audit: Audit | None, digest: str) -> None:
        """The engine has other KV caches now. What is copied from or to the former ones ends."""
        if self._copies is not None:
            self._copies.suspend()
            self._copies.close()
            self._former.append(self._copies)
        if self._audit is not None:
            self._audit.close()
        self._copies, self._running, self._layers, self._audit, self._digest = copies, None, layers, audit, digest
        if self._suspended and copies is not None:
            copies.suspend()
        self._run()

    def has(self, layers: RankLayers) -> bool:
        """Whether these are the KV caches that are copied."""
        return self._copies is not None and self._layers.same_memory(layers)

    def suspend(self) -> bool:
        """The engine takes its KV memory away: nothing touches it until `resume`. False: a copy has not ended."""
        self._suspended = True
        return self._copies is None or self._copies.suspend()

    def resume(self) -> None:
        """KV memory is there again."""
        self._suspended = False
        if self._copies is not None:
            self._copies.resume()

    def _run(self) -> None:
        """Copy by the last geometry, if it was made with what this rank has now."""
        geometry, self._running = self._geometry, None
        if geometry is None or self._copies is None:
            return
        if geometry.ranks and self._digest not in geometry.ranks[self._rank : self._rank + 1]:
            LOGGER.warning("kvdepot: rank %d copies nothing: its KV caches are not those of the handshake", self._rank)
            return
        places = ObjectPlaces(Planner(geometry.groups, geometry.chunk_tokens), self._layers, self._rank)
        self._copies.start(places)
        self._running = self._copies

    # --- a step

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads. Loads the scheduler side has given up are reported failed.

        A message that was taken already, or is older than one that was, changes nothing.
        """
        if meta.number:
            if meta.number <= self._loads_step:
                return
            self._loads_step = meta.number
        if meta.geometry is not None:
            self._geometry = meta.geometry
            self._run()
        self._question = meta.question
        self._lingers = meta.idle and bool(meta.loads)
        self._unloadable.update(meta.failed_loads)
        self._cancelled.update(meta.cancelled_loads)
        if meta.loads or meta.cancelled_loads:
            if self._running is None:
                self._refused += [_everything(op) for op in meta.loads]
            else:
                self._running.submit(meta.loads, (), meta.cancelled_loads)

    def start_stores(self, meta: StepMeta) -> None:
        """The step's forward has been submitted: what it wrote may be copied. Likewise."""
        if meta.number:
            if meta.number <= self._stores_step:
                return
            self._stores_step = meta.number
        if not meta.stores:
            return
        if self._running is None:
            self._refused += [_everything(op) for op in meta.stores]
        else:
            self._running.submit((), meta.stores)

    def results(self) -> KVConnectorTransferResults:
        """Loads that are over, for vLLM; the same snapshot goes to the scheduler side by `take_meta`."""
        failed, self._unloadable = self._unloadable, set()
        finished = set(failed)
        rank = 1 << self._rank
        for outcome in self._take_done():
            op = outcome.op
            self._count(outcome)
            if isinstance(op, StoreOp):
                self._meta.stores[op.op_id] = (rank, outcome.failed)
                continue
            void = bool(outcome.failed) or outcome.suspended or op.op_id in self._cancelled
            self._cancelled.discard(op.op_id)
            self._meta.loads[op.op_id] = (rank, rank * void)
            if outcome.suspended:
                self._meta.suspended |= {op.op_id}
            finished.add(op.request_id)
            if void:
                failed.add(op.request_id)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def _take_done(self) -> list[_Outcome]:
        done, self._refused = self._refused, []
        for former in self._former:
            done += former.take_done()
        self._former = [former for former in self._former if not former.over]
        if self._running is not None:
            if self._lingers:
                self._lingers = False
                self._running.wait_for_loads(LINGER_SECONDS)
            done += self._running.take_done()
        elif self._copies is not None:
            done += self._copies.take_done()  # of a geometry before
        return done

    def _count(self, outcome: _Outcome) -> None:
        """What was moved: of a failed load nothing, of a store what succeeded."""
        loading = isinstance(outcome.op, LoadOp)
        moved = [] if loading and outcome.failed else [o for o in outcome.op.objects if o.index not in outcome.failed]
        if outcome.places is not None:
            direction = "load" if loading else "store"
            self._stats.add("copied_bytes", direction, outcome.places.size_bytes(moved, writing=not loading))
            self._stats.add("copy_seconds", direction, outcome.seconds)

    def add_stats(self, stats: KVDepotStats) -> None:
        """What this rank has done since it was last asked."""
        stats.aggregate(self._stats)
        self._stats.reset()

    def take_meta(self) -> RankMeta | None:
        """This step's message to the scheduler side; None when there is nothing new."""
        arena = self.attachment.arena
        arena_id = arena.arena_id if arena is not None and self.attachment.session is not None else 0
        told = RankArena(arena_id, self._question, time.monotonic())
        if told != self._told:
            self._told = self._meta.arenas[self._rank] = told
        meta, self._meta = self._meta, RankMeta()
        return meta if meta.arenas or meta.loads or meta.stores else None

    def close(self) -> None:
        """End the copying thread, then the attachment: in this order the daemon never sees a dead rank that copies."""
        if self._copies is not None:
            self._copies.close()
        self.attachment.close()
        if self._audit is not None:
            self._audit.close()


def _everything(op: LoadOp | StoreOp) -> _Outcome:
    return _Outcome(op, frozenset(copied.index for copied in op.objects))


def _lost(op: LoadOp | StoreOp) -> _Outcome:
    return replace(_everything(op), suspended=True)
