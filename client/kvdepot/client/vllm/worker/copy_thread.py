"""The copying thread of one rank: it does all copies between KV blocks and the arena (design.md#copies).

One thread copies in bounded batches, loads before stores, and alone reports results, after the last byte. So nothing
is written into a block after its load was reported, and no extent is touched after its copy was acknowledged.

An operation belongs to the KV memory and to the geometry with which it came. When the engine takes its memory away
(sleep, other tensors) or another geometry comes, the operation fails.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvdepot.client.copy.base import Direction, IndeterminateError, WrongBytesError
from kvdepot.client.copy.revocable import RevocableCopier, Revoked
from kvdepot.client.extents import Extents, parse_extents
from kvdepot.client.vllm.base.operations import LoadOp, ObjectCopy, StoreOp
from kvdepot.client.vllm.worker.audit import LOADED, STORED, Audit
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, BlockCopier
    from kvdepot.client.vllm.base.guard import Failures
    from kvdepot.client.vllm.worker.places import ObjectPlaces

JOIN_SECONDS: Final = 5.0
"""How long `close` and `suspend` wait for the copy in progress: one batch takes milliseconds."""
PROVE_SECONDS: Final = 60.0
"""How often a start says that it waits for the self-test, which takes milliseconds, and a kernel's build seconds."""


class Attached(Protocol):
    """The part of `kvdepot.client.attachment.Attachment` that a rank uses."""

    @property
    def arena(self) -> Arena | None: ...
    @property
    def session(self) -> bytes | None: ...
    def close(self) -> None: ...


Op = TypeVar("Op", LoadOp, StoreOp)
Queued = tuple[Op, object]
"""An operation, and the mark of the work that the engine had given its device when the operation came."""


class _LostDevice:
    """A device that failed. Nobody knows whether it still writes, so its extents stay lent until this process ends."""

    proxy_dead = False


class CopyThread:
    """Copies operations in their order, loads first.

    An operation is queued, then in progress, and then reported by `take_done` exactly once. `submit` and `take_done`
    never wait for a copy. A copy that nobody can vouch for (`IndeterminateError`) is reported when its writer is dead.
    """

    def __init__(
        self,
        attachment: Attached,
        copier: BlockCopier,
        failures: Failures,
        *,
        clock: Callable[[], float] = time.monotonic,
        audit: Audit | None = None,
        read_back: int = 0,
        verify_loads: float = 0.0,
        name: str = "kvdepot-copy",
    ) -> None:
        self._attachment = attachment
        self._copier = copier
        self._kv = RevocableCopier(copier)  # a new one after each suspension
        self._places: ObjectPlaces | None = None
        self._targets: dict[int, tuple[RevocableCopier, ObjectPlaces | None]] = {}  # op id -> memory and geometry of it
        self._failures = failures
        self._clock = clock
        self._audit = audit
        self._to_read_back = read_back  # so many more loads
        self._verify_loads = verify_loads  # the share of them whose objects are compared with their checksums
        self._verified: bool | None = None  # the last load
        self._intact: bool | None = None  # the objects of the last load
        self._proof: object = None  # the engine's mark, where the copier is to be proved
        self._proved = threading.Event()
        self._problem = ""
        self._at_once = False  # the engine's start waits for all that makes copies fast
        self._prepared = threading.Event()
        self._loads: deque[Queued[LoadOp]] = deque()
        self._stores: deque[Queued[StoreOp]] = deque()
        # Both are appended and popped atomically.
        self._done: deque[CopyOutcome] = deque()
        self._indeterminate: deque[tuple[CopyOutcome, IndeterminateError]] = deque()
        self._cancelled: set[int] = set()
        self._wake = threading.Condition()
        self._loading = 0  # loads that are not over
        self._working = 0  # operations that the thread has begun
        self._suspended = False
        self._stopping = False
        self._usable = True  # the copier's device
        self._lost = False  # and nobody has taken note of it
        self._ended = threading.Event()  # the thread copies no more
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def on_device(self) -> bool:
        """Return whether these are copies of a device, which has proved them."""
        return self._proof is not None

    def prove(self) -> str:
        """Let the copier test itself on the thread. Return why it cannot be used; empty if it can.

        Called once, on the engine's thread, before `start`. The layers hold nothing yet.
        """
        self._proof = self._copier.mark()
        self._thread.start()
        while not self._proved.wait(PROVE_SECONDS):  # an engine that began to serve now would be written into
            self._failures.logger.warning(
                "kvdepot: the self-test of copies takes over %g s; cuda_copies = torch asks the least of a driver",
                PROVE_SECONDS,
            )
        return self._problem

    def prepare_at_once(self) -> None:
        """Wait until what makes copies fast is done, as far as it can be. Called once, after `prove`, at the start."""
        with self._wake:
            self._at_once = True
            self._wake.notify()
        self._prepared.wait()

    def start(self, places: ObjectPlaces) -> None:
        """Begin to copy by a geometry. Operations that came before keep to the former geometry."""
        self._places = places
        if not self._thread.is_alive():
            self._thread.start()

    def submit(self, loads: Sequence[LoadOp], stores: Sequence[StoreOp], cancelled: Sequence[int] = ()) -> None:
        """Queue operations, and see that those in `cancelled` do not succeed. Called on the engine's thread."""
        mark: object = None
        try:
            mark = self._copier.mark() if loads or stores else None
        except Exception as error:  # noqa: BLE001 - I3: `_copy` raises it: what is lost here is never reported
            mark = error
        with self._wake:
            ops: list[LoadOp | StoreOp] = [*loads, *stores]
            if self._suspended or self._stopping:
                self._done.extend(map(CopyOutcome.memory_gone, ops))
                return
            self._targets |= {op.op_id: (self._kv, self._places) for op in ops}
            self._loads.extend((op, mark) for op in loads)
            self._loading += len(loads)
            self._stores.extend((op, mark) for op in stores)
            self._cancelled.update(cancelled)
            self._wake.notify()

    def suspend(self) -> bool:
        """Fail all operations until `resume`, and keep the copies away from KV memory.

        Finished loads that are not reported fail too, because their bytes go with the memory. Wait at most
        JOIN_SECONDS. Return False if a copy has not ended by then; it touches nothing after its current batch.
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
            done = [
                replace(CopyOutcome.memory_gone(outcome.op), verified=outcome.verified, intact=outcome.intact)
                if isinstance(outcome.op, LoadOp)
                else outcome
                for outcome in self._done
            ]
            self._done = deque([*done, *map(CopyOutcome.memory_gone, queued)])
            self._wake.notify_all()
        ended = self._kv.revoke(max(until - time.monotonic(), 0.0))
        with self._wake:
            return self._wake.wait_for(lambda: not self._working, max(until - time.monotonic(), 0.0)) and ended

    def resume(self) -> None:
        """Copy again: the engine has its KV memory back, with undefined content."""
        with self._wake:
            if self._suspended:
                self._suspended = False
                self._kv = RevocableCopier(self._copier)

    def take_done(self) -> list[CopyOutcome]:
        """Return what has finished since the last call. Each operation is returned once."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        for _ in range(len(self._indeterminate)):
            outcome, error = self._indeterminate.popleft()
            if error.over:
                done.append(outcome)
            else:
                self._indeterminate.append((outcome, error))
        return done + self._withdraw_late()

    def wait_for_loads(self, seconds: float) -> None:
        """Wait until no load is queued or in progress, for at most `seconds`."""
        with self._wake:
            self._wake.wait_for(lambda: not self._loading, seconds)

    def _withdraw_late(self) -> list[CopyOutcome]:
        """Take back loads that have not begun by their deadline, so that they end in time if the thread hangs."""
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
        return [CopyOutcome.all_failed(op) for op in late]

    def _forget(self, op: LoadOp | StoreOp) -> None:
        self._cancelled.discard(op.op_id)
        self._targets.pop(op.op_id, None)

    @property
    def over(self) -> bool:
        """Whether the thread is closed and has reported all that it ever will."""
        copying = self._thread.is_alive() and not self._ended.is_set()
        return self._stopping and not (copying or self._done or self._indeterminate)

    def close(self) -> None:
        """Finish the copy in progress and drop the rest. Wait at most JOIN_SECONDS."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._ended.wait(JOIN_SECONDS)

    def _next(self) -> Queued[LoadOp] | Queued[StoreOp] | None:
        while True:
            pause = self._prepare()
            with self._wake:
                if self._stopping:
                    return None
                if self._loads or self._stores:
                    return self._loads.popleft() if self._loads else self._stores.popleft()
                if pause is not None or not self._at_once:  # else the engine began to wait since `_prepare`
                    self._wake.wait(pause)

    def _prepare(self) -> float | None:
        at_once, pause = self._at_once, None
        try:
            pause = self._copier.prepare(self._attachment.arena, at_once=at_once)
        except Exception as error:  # noqa: BLE001 - copies work without it
            self._failures.record("prepare", error, by_text=True)
        if not at_once or pause is not None:
            return pause
        self._at_once = False
        self._prepared.set()
        return 0.0  # what is left is done at leisure

    def _run(self) -> None:
        try:
            self._copier.enter()
            if self._proof is not None:
                self._copier.prove(self._proof)
        except Exception as error:  # noqa: BLE001 - I3: a device that cannot be used fails every copy
            if self._proof is None:
                self._failures.record("enter", error)
            self._problem = str(error) or repr(error)
            self._usable = False
        self._proved.set()
        while (queued := self._next()) is not None:
            self._do(*queued)
        self._prepared.set()
        self._ended.set()
        with contextlib.suppress(Exception):
            self._copier.leave()

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
        if not self._usable:
            with self._wake:
                self._done.append(CopyOutcome.all_failed(op))
            return
        failed = frozenset(copied.index for copied in op.objects)
        began, self._verified, self._intact = self._clock(), None, None
        kv, places = self._target(op)
        revoked = False
        try:
            if isinstance(mark, Exception):
                raise mark
            kv.after(mark)
            failed = frozenset(self._load(op) if isinstance(op, LoadOp) else self._store(op))
        except Revoked:
            revoked = True
        except IndeterminateError as error:
            self._indeterminate.append((CopyOutcome(op, failed), error))
            return
        except WrongBytesError as error:
            self._failures.record("verify", error)
            self._usable = False
        except Exception as error:  # noqa: BLE001 - I3: an operation that fails in any way is a failed copy
            self._failures.record("copy", error, by_text=True)
        try:
            kv.wait(_direction(op))  # after a failure too: nothing may move after the report
        except Exception as error:  # noqa: BLE001
            self._failures.record("wait", error, by_text=True)
            self._lose_device()
            self._indeterminate.append((CopyOutcome(op, failed), IndeterminateError(_LostDevice())))
            return
        verified, intact = (self._verified, self._intact) if isinstance(op, LoadOp) else (None, None)
        with self._wake:
            if revoked or (kv.revoked and isinstance(op, LoadOp)):
                self._done.append(replace(CopyOutcome.memory_gone(op), verified=verified, intact=intact))
            else:
                self._done.append(CopyOutcome(op, failed, self._clock() - began, places, verified, intact))

    def _lose_device(self) -> None:
        """Copy no more: nothing that this device is given from now on could be proved."""
        self._usable, self._lost = False, True
        self._failures.logger.error(
            "kvdepot: the device failed, and this rank copies nothing more; what it was given stays reserved until "
            "this process ends"
        )

    def take_lost(self) -> bool:
        """Return whether the device has failed since the last call."""
        lost, self._lost = self._lost, False
        return lost

    def _target(self, op: LoadOp | StoreOp) -> tuple[RevocableCopier, ObjectPlaces | None]:
        return self._targets.get(op.op_id, (self._kv, self._places))

    def _arena(self, op: LoadOp | StoreOp) -> Arena | None:
        arena = self._attachment.arena
        return arena if arena is not None and arena.arena_id == op.arena_id else None

    def _load(self, op: LoadOp) -> list[int]:
        """Copy all objects into the engine's blocks. Return the indices that failed: none, or all of them.

        The first failure stops the writing.
        """
        everything = [copied.index for copied in op.objects]
        arena = self._arena(op)
        if arena is None:
            return everything
        kv, places = self._target(op)
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
        read_back = self._to_read_back > 0
        for batch in pieces.split():
            seconds_left = self._left(op)
            if seconds_left <= 0 or not arena.load(kv, extents, batch, seconds_left):
                return everything
            if read_back:
                kv.wait(Direction.LOAD)
                self._judge(arena.verify(kv, batch) or not arena.check(rows, granted))
        kv.wait(Direction.LOAD)
        compared = random.random() < self._verify_loads  # noqa: S311 - a sample
        intact = arena.intact(extents, op.checksums) if compared else None
        if not arena.check(rows, granted):
            return everything  # the extents may have had other bytes when they were compared
        self._intact = intact
        if read_back:
            self._verified = True
            self._to_read_back -= 1
        if intact is False or op.op_id in self._cancelled:
            return everything
        if self._audit is not None:
            with kv.use():
                self._audit.record(LOADED, op.request_id, op.objects)
        return []

    def _judge(self, right: bool) -> None:
        """Raise WrongBytesError at the first wrong batch: a deadline that is missed afterwards makes no byte right."""
        if not right:
            self._verified = False
            raise WrongBytesError("a load put wrong bytes into the KV cache; this rank stops copying")

    def _left(self, op: LoadOp) -> float:
        """Return the seconds in which a load may still write into the engine's blocks."""
        return 0.0 if op.op_id in self._cancelled else op.deadline - self._clock()

    def _store(self, op: StoreOp) -> list[int]:
        """Copy the engine's blocks into the objects, in batches over all of them. Return the indices that failed."""
        arena = self._arena(op)
        if arena is None:
            return [copied.index for copied in op.objects]
        kv, places = self._target(op)
        assert places is not None
        extents = parse_extents(op.extents, arena.size_bytes)
        good = [copied for copied in op.objects if self._still_granted(arena, extents, copied)]
        for batch in places.pieces(good, extents, writing=True).split():
            if not arena.store(kv, extents, batch, self._yield_to_loads):
                return [copied.index for copied in op.objects]
            self._yield_to_loads()
            if not self._usable:
                break
        kv.wait(Direction.STORE)
        if not self._usable:  # since a load meanwhile that put wrong bytes
            return [copied.index for copied in op.objects]
        written = [copied for copied in good if self._still_granted(arena, extents, copied)]
        if self._audit is not None:
            with kv.use():
                self._audit.record(STORED, "", written)
        return sorted({copied.index for copied in op.objects} - {copied.index for copied in written})

    def _still_granted(self, arena: Arena, extents: Extents, copied: ObjectCopy) -> bool:
        return copied.index in extents.fragments and arena.check(*extents.granted([copied.index]))

    def _yield_to_loads(self) -> None:
        """Run the loads that came in during a store: requests wait for them."""
        while self._loads:
            with self._wake:
                if not self._loads or self._stopping:
                    return
                queued = self._loads.popleft()
            self._do(*queued)


def _direction(op: LoadOp | StoreOp) -> Direction:
    return Direction.LOAD if isinstance(op, LoadOp) else Direction.STORE
