"""The connector's worker side: one rank's copies between KV blocks and the arena, mapped or not (DESIGN 4).

One copying thread does all copies, loads before stores, in bounded batches. It alone
reports results, after its last byte: so nothing is written into a block once its load
was reported, and no extent is touched once a copy was acknowledged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
from kvdepot.client.copy.base import BATCH_BYTES, CopyBatch, CopyError, InDoubt, concatenate, object_pieces
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.vllm.audit import LOADED, STORED, Audit
from kvdepot.client.vllm.compat import KVConnectorTransferResults
from kvdepot.client.vllm.metadata import BlockMove, LoadOp, ObjectCopy, RankArena, RankMeta, StepMeta, StoreOp
from kvdepot.client.vllm.stats import KVDepotStats
from kvdepot.core.calls import Kind
from kvdepot.core.planner import Planner

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, BlockCopier, Column
    from kvdepot.client.vllm.guard import Failures
    from kvdepot.client.vllm.layers import RankLayers

JOIN_SECONDS: Final = 5.0
"""How long `close` waits for the copy in progress: one batch takes milliseconds."""

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


Op = TypeVar("Op", LoadOp, StoreOp)
Queued = tuple[Op, object]
"""An operation, and the mark of what the engine had given its device when it came."""


class _LostDevice:
    """A device that failed cannot say whether it still writes: what it was given stays lent until this process ends."""

    proxy_dead = False


class ObjectPlaces:
    """Where the parts of an object lie for one rank: the planner's geometry and the rank's layers, combined."""

    def __init__(self, planner: Planner, layers: RankLayers, rank: int) -> None:
        self._planner = planner
        self._rank = rank
        self._layers = {group: layers.of_group(group) for group in range(len(planner.groups))}
        self._bytes = {
            group: [layers.facts[index].block_bytes for index in indices] for group, indices in self._layers.items()
        }

    def pieces(self, objects: Sequence[ObjectCopy], extents: Extents, *, writing: bool) -> CopyBatch:
        """The rank's share of these objects. Of a replicated part rank 0 writes, everyone reads. Raises CopyError."""
        alike: dict[tuple[int, int, int, int], tuple[list[int], list[tuple[int, ...]]]] = {}
        for copied in objects:
            self._check(copied, extents)
            for span in copied.spans:
                if writing and self._rank and self._planner.groups[span.group].replicated:
                    continue
                shape = (copied.kind, span.group, span.object_block, len(span.block_ids))
                indices, block_ids = alike.setdefault(shape, ([], []))
                indices.append(copied.index)
                block_ids.append(span.block_ids)
        return concatenate(
            [
                object_pieces(
                    extents,
                    indices,
                    self._planner.part_range(Kind(kind), group, self._rank)[0],
                    self._layers[group],
                    self._bytes[group],
                    self._planner.blocks_in_object(group),
                    block_ids,
                    object_block,
                )
                for (kind, group, object_block, _), (indices, block_ids) in alike.items()
            ]
        )

    def size_bytes(self, objects: Sequence[ObjectCopy], *, writing: bool) -> int:
        """Of the rank's share of these objects, as `pieces` has it."""
        return sum(
            len(span.block_ids) * sum(self._bytes[span.group])
            for copied in objects
            for span in copied.spans
            if not (writing and self._rank and self._planner.groups[span.group].replicated)
        )

    def moves(self, moves: Sequence[BlockMove]) -> Iterator[tuple[Sequence[int], Column, Column]]:
        """Layers with the blocks to copy within them, and where to, in batches of about BATCH_BYTES."""
        for move in moves:
            layers = self._layers[move.group]
            most = max(1, BATCH_BYTES // max(1, sum(self._bytes[move.group])))
            for first in range(0, len(move.sources), most):
                part = slice(first, first + most)
                yield layers, np.array(move.sources[part], np.int64), np.array(move.targets[part], np.int64)

    def _check(self, copied: ObjectCopy, extents: Extents) -> None:
        if copied.index not in extents.fragments:
            raise CopyError(f"object {copied.index} of the operation has no extents")
        granted, needed = extents.size_bytes(copied.index), self._planner.object_bytes(Kind(copied.kind))
        if granted != needed:
            raise CopyError(f"{granted} granted bytes for an object of {needed}")


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
        self._places: ObjectPlaces | None = None
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
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def places(self) -> ObjectPlaces | None:
        """None until the geometry has arrived."""
        return self._places

    def start(self, places: ObjectPlaces) -> None:
        """Begin copying: the geometry has arrived."""
        self._places = places
        self._thread.start()

    def submit(self, loads: Sequence[LoadOp], stores: Sequence[StoreOp], cancelled: Sequence[int] = ()) -> None:
        """Queue operations; ids in `cancelled` must not succeed any more. On the engine's thread."""
        mark = self._copier.mark() if loads or stores else None
        with self._wake:
            self._loads.extend((op, mark) for op in loads)
            self._loading += len(loads)
            self._stores.extend((op, mark) for op in stores)
            self._cancelled.update(cancelled)
            self._wake.notify()

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
                self._cancelled.difference_update(op.op_id for op in late)
                self._loading -= len(late)
        return [_everything(op) for op in late]

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
        try:
            self._copy(op, mark)
        finally:
            if isinstance(op, LoadOp):
                with self._wake:
                    self._loading -= 1
                    self._wake.notify_all()

    def _copy(self, op: LoadOp | StoreOp, mark: object) -> None:
        failed = frozenset(copied.index for copied in op.objects)
        began = self._clock()
        try:
            self._copier.after(mark)
            failed = frozenset(self._load(op) if isinstance(op, LoadOp) else self._store(op))
        except InDoubt as doubt:
            self._doubted.append((_Outcome(op, failed), doubt))
            return
        except Exception as error:  # noqa: BLE001 - I3: an operation that fails in any way is a failed copy
            self._failures.record("copy", error)
        try:
            self._copier.wait()  # also for what failed: nothing moves any more once this is reported
        except Exception as error:  # noqa: BLE001
            self._failures.record("wait", error)
            self._doubted.append((_Outcome(op, failed), InDoubt(_LostDevice())))
            return
        self._cancelled.discard(op.op_id)
        self._done.append(_Outcome(op, failed, self._clock() - began))

    def _arena(self, op: LoadOp | StoreOp) -> Arena | None:
        arena = self._attachment.arena
        return arena if arena is not None and arena.arena_id == op.arena_id else None

    def _load(self, op: LoadOp) -> list[int]:
        """Copy everything into the engine's blocks. Any failure fails all, and stops the writing at once."""
        everything = [copied.index for copied in op.objects]
        arena = self._arena(op)
        if arena is None:
            return everything
        assert self._places is not None
        extents = parse_extents(op.extents, arena.size_bytes)
        pieces = self._places.pieces(op.objects, extents, writing=False)
        rows, granted = extents.granted(everything)
        if not arena.check(rows, granted):
            return everything
        for layers, sources, targets in self._places.moves(op.moves):
            if self._left(op) <= 0:
                return everything
            self._copier.move(layers, sources, targets)
        for batch in pieces.split():
            left = self._left(op)
            if left <= 0 or not arena.load(self._copier, extents, batch, left):
                return everything
        self._copier.wait()
        if not arena.check(rows, granted) or op.op_id in self._cancelled:
            return everything
        if self._audit is not None:
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
        assert self._places is not None
        extents = parse_extents(op.extents, arena.size_bytes)
        good = [copied for copied in op.objects if self._still_granted(arena, extents, copied)]
        for batch in self._places.pieces(good, extents, writing=True).split():
            if not arena.store(self._copier, extents, batch, self._yield_to_loads):
                return [copied.index for copied in op.objects]
            self._yield_to_loads()
        self._copier.wait()
        written = [copied for copied in good if self._still_granted(arena, extents, copied)]
        if self._audit is not None:
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
    ) -> None:
        """`copies` None: this rank can copy nothing, and every operation fails at once.

        So does everything that comes before the geometry, which the first message carries.
        """
        self._rank = rank
        self._attachment = attachment
        self._copies = copies
        self._running: CopyThread | None = None
        self._layers = layers
        self._audit = audit
        self._refused: list[_Outcome] = []  # operations no thread will see
        self._unloadable: set[str] = set()
        self._cancelled: set[int] = set()  # loads whose bytes are void, even if the copy is done and not reported
        self._meta = RankMeta()
        self._stats = KVDepotStats()
        self._question = 0
        self._told: RankArena | None = None
        self._lingers = False  # this step has loads, and nothing to compute

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads. Loads the scheduler side has given up are reported failed."""
        self._question = meta.question
        self._lingers = meta.idle and bool(meta.loads)
        self._unloadable.update(meta.failed_loads)
        self._cancelled.update(meta.cancelled_loads)
        if meta.loads or meta.cancelled_loads:
            if self._running is None:
                self._refused += [_everything(op) for op in meta.loads]
            else:
                self._running.submit(meta.loads, (), meta.cancelled_loads)
        if meta.geometry is not None and self._copies is not None and self._running is None:
            planner = Planner(meta.geometry.groups, meta.geometry.chunk_tokens)
            self._copies.start(ObjectPlaces(planner, self._layers, self._rank))
            self._running = self._copies

    def start_stores(self, meta: StepMeta) -> None:
        """The step's forward has been submitted: what it wrote may be copied."""
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
        done, self._refused = self._refused, []
        if self._running is not None:
            if self._lingers:
                self._lingers = False
                self._running.wait_for_loads(LINGER_SECONDS)
            done += self._running.take_done()
        for outcome in done:
            op = outcome.op
            self._count(outcome)
            if isinstance(op, StoreOp):
                self._meta.stores[op.op_id] = (1, outcome.failed)
                continue
            void = bool(outcome.failed) or op.op_id in self._cancelled
            self._cancelled.discard(op.op_id)
            self._meta.loads[op.op_id] = (1, int(void))
            finished.add(op.request_id)
            if void:
                failed.add(op.request_id)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def _count(self, outcome: _Outcome) -> None:
        """What was moved: of a failed load nothing, of a store what succeeded."""
        loading = isinstance(outcome.op, LoadOp)
        moved = [] if loading and outcome.failed else [o for o in outcome.op.objects if o.index not in outcome.failed]
        places = self._copies.places if self._copies is not None else None
        if places is not None:
            direction = "load" if loading else "store"
            self._stats.add("copied_bytes", direction, places.size_bytes(moved, writing=not loading))
            self._stats.add("copy_seconds", direction, outcome.seconds)

    def add_stats(self, stats: KVDepotStats) -> None:
        """What this rank has done since it was last asked."""
        stats.aggregate(self._stats)
        self._stats.reset()

    def take_meta(self) -> RankMeta | None:
        """This step's message to the scheduler side; None when there is nothing new."""
        arena = self._attachment.arena
        arena_id = arena.arena_id if arena is not None and self._attachment.session is not None else 0
        told = RankArena(arena_id, self._question)
        if told != self._told:
            self._told = self._meta.arenas[self._rank] = told
        meta, self._meta = self._meta, RankMeta()
        return meta if meta.arenas or meta.loads or meta.stores else None

    def close(self) -> None:
        """End the copying thread, then the attachment: in this order the daemon never sees a dead rank that copies."""
        if self._running is not None:
            self._running.close()
        self._attachment.close()
        if self._audit is not None:
            self._audit.close()


def _everything(op: LoadOp | StoreOp) -> _Outcome:
    return _Outcome(op, frozenset(copied.index for copied in op.objects))
