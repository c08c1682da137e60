"""The connector's worker side: one rank's copies between KV blocks and the arena (DESIGN 4).

One copying thread does all copies, loads before stores, in bounded batches. It alone
reports results, after its last byte: so nothing is written into a block once its load
was reported, and no extent is touched once a copy was acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvdepot.client.copy.base import CopyBatch, CopyError, Direction, concatenate, object_pieces
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.vllm.audit import LOADED, STORED, Audit
from kvdepot.client.vllm.compat import KVConnectorTransferResults
from kvdepot.client.vllm.metadata import LoadOp, ObjectCopy, RankMeta, StepMeta, StoreOp
from kvdepot.core.calls import Kind
from kvdepot.core.planner import Planner

if TYPE_CHECKING:
    from kvdepot.client.arena_map import ArenaMap
    from kvdepot.client.copy.base import BlockCopier
    from kvdepot.client.vllm.guard import Failures
    from kvdepot.client.vllm.layers import RankLayers

JOIN_SECONDS: Final = 5.0
"""How long `close` waits for the copy in progress: one batch takes milliseconds."""


class Attached(Protocol):
    """What is used of `kvdepot.client.attachment.Attachment`."""

    @property
    def arena(self) -> ArenaMap | None: ...
    @property
    def session(self) -> bytes | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the copying thread has finished. `failed` are object indices; of a load any means all."""

    op: LoadOp | StoreOp
    failed: frozenset[int]


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
        self._loads: deque[LoadOp] = deque()
        self._stores: deque[StoreOp] = deque()
        self._done: deque[_Outcome] = deque()  # appended and popped atomically
        self._cancelled: set[int] = set()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, places: ObjectPlaces) -> None:
        """Begin copying: the geometry has arrived."""
        self._places = places
        self._thread.start()

    def submit(self, loads: Sequence[LoadOp], stores: Sequence[StoreOp], cancelled: Sequence[int] = ()) -> None:
        """Queue operations; ids in `cancelled` must not succeed any more."""
        with self._wake:
            self._loads.extend(loads)
            self._stores.extend(stores)
            self._cancelled.update(cancelled)
            self._wake.notify()

    def take_done(self) -> list[_Outcome]:
        """Everything finished since the last call. Each operation appears once, ever."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Finish the copy in progress, drop the rest. Bounded by JOIN_SECONDS."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _next(self) -> LoadOp | StoreOp | None:
        with self._wake:
            while not (self._stopping or self._loads or self._stores):
                self._wake.wait()
            if self._stopping:
                return None
            return self._loads.popleft() if self._loads else self._stores.popleft()

    def _run(self) -> None:
        while (op := self._next()) is not None:
            self._do(op)

    def _do(self, op: LoadOp | StoreOp) -> None:
        failed = frozenset(copied.index for copied in op.objects)
        try:
            failed = frozenset(self._load(op) if isinstance(op, LoadOp) else self._store(op))
        except Exception as error:  # noqa: BLE001 - I3: an operation that fails in any way is a failed copy
            self._failures.record("copy", error)
        self._cancelled.discard(op.op_id)
        self._done.append(_Outcome(op, failed))

    def _arena(self, op: LoadOp | StoreOp) -> ArenaMap | None:
        arena = self._attachment.arena
        return arena if arena is not None and arena.arena_id == op.arena_id else None

    def _load(self, op: LoadOp) -> list[int]:
        """Copy everything into the engine's blocks. Any failure fails all, and stops the writing at once."""
        everything = [copied.index for copied in op.objects]
        arena = self._arena(op)
        if arena is None:
            return everything
        assert self._places is not None
        extents = parse_extents(op.extents, arena.layout.size_bytes)
        pieces = self._places.pieces(op.objects, extents, writing=False)
        rows, granted = extents.granted(everything)
        if not arena.check(rows, granted):
            return everything
        for batch in pieces.split():
            if self._clock() >= op.deadline or op.op_id in self._cancelled:
                return everything
            self._copier.copy(arena, batch, Direction.LOAD)
        self._copier.wait()
        if not arena.check(rows, granted) or op.op_id in self._cancelled:
            return everything
        if self._audit is not None:
            self._audit.record(LOADED, op.request_id, op.objects)
        return []

    def _store(self, op: StoreOp) -> list[int]:
        """Copy object by object, in batches over all of them; returns the indices that did not succeed."""
        arena = self._arena(op)
        if arena is None:
            return [copied.index for copied in op.objects]
        assert self._places is not None
        extents = parse_extents(op.extents, arena.layout.size_bytes)
        good = [copied for copied in op.objects if self._still_granted(arena, extents, copied)]
        for batch in self._places.pieces(good, extents, writing=True).split():
            self._copier.copy(arena, batch, Direction.STORE)
            self._yield_to_loads()
        self._copier.wait()
        written = [copied for copied in good if self._still_granted(arena, extents, copied)]
        if self._audit is not None:
            self._audit.record(STORED, "", written)
        return sorted({copied.index for copied in op.objects} - {copied.index for copied in written})

    def _still_granted(self, arena: ArenaMap, extents: Extents, copied: ObjectCopy) -> bool:
        return copied.index in extents.fragments and arena.check(*extents.granted([copied.index]))

    def _yield_to_loads(self) -> None:
        """Between two batches of a store, run the loads that have come in: a request waits for them."""
        while self._loads:
            with self._wake:
                if not self._loads:
                    return
                op = self._loads.popleft()
            self._do(op)


class WorkerSide:
    """One rank: takes each step's message, gives back what the copying thread has finished."""

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
        self._told_arena: int | None = None

    def start_loads(self, meta: StepMeta) -> None:
        """Queue this step's loads. Loads the scheduler side has given up are reported failed."""
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
            done += self._running.take_done()
        for outcome in done:
            op = outcome.op
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

    def take_meta(self) -> RankMeta | None:
        """This step's message to the scheduler side; None when there is nothing new."""
        arena = self._attachment.arena
        told = arena.arena_id if arena is not None and self._attachment.session is not None else 0
        if told != self._told_arena:
            self._told_arena = told
            self._meta.arenas[self._rank] = told
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
