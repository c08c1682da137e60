"""Whole objects between the daemon's RAM and memory of this process: what a tool is that no engine is.

To the daemon it is an engine of one rank, with leases, credits and checks as any other.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from kvdepot.client.attachment import Attachment, EngineProcess, Transport
from kvdepot.client.copy.base import BATCH_BYTES, Bounds, CopyBatch, CopyError, Direction, IndeterminateError
from kvdepot.client.extents import ExtentError, Extents, parse_extents
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.errors import InvalidArgument, KvDepotError, LoadsOff, StaleEpoch

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, Column, CopyMemory
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.objectfile import ObjectName

READ_SECONDS: Final = 30.0
"""For objects that a lower tier has to read first; that of an engine's load."""
_WAIT_SECONDS: Final = 0.05
_ASK_THE_DAEMON: Final = "`kvdepotctl status`, and the daemon's log"


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease, and where its objects lie. `indices`: of the call's names."""

    lease_id: int
    arena_id: int
    extents: Extents
    indices: tuple[int, ...]


class _MemoryCopier:
    """A `BlockCopier` with one layer of one block: memory that holds an object."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = np.frombuffer(memory, np.uint8)
        self._bounds = Bounds(np.array([1], np.int64), np.array([len(memory)], np.int64))

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        there = np.frombuffer(arena.buffer, np.uint8)
        self._bounds.check(batch, len(there))
        skips, offsets, lengths = batch.skips.tolist(), batch.offsets.tolist(), batch.lengths.tolist()
        for at, offset, length in zip(skips, offsets, lengths, strict=True):
            if direction is Direction.LOAD:
                self._memory[at : at + length] = there[offset : offset + length]
            else:
                there[offset : offset + length] = self._memory[at : at + length]

    def enter(self) -> None:
        """Nothing to set up."""

    def prove(self, mark: object) -> None:
        """Nothing to prove: the native copy is tested on every platform that it runs on."""

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:  # noqa: ARG002
        """Likewise."""
        return True

    def leave(self) -> None:
        """Likewise."""

    def mark(self) -> None:
        """Nothing: it is done."""

    def after(self, mark: object) -> None:
        """Likewise."""

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        raise CopyError(f"{len(sources)} blocks of {len(layers)} layers to {len(targets)} others: there is one block")

    def wait(self, direction: Direction | None = None) -> None:
        """Likewise."""

    def prepare(self, arena: Arena | None, *, at_once: bool = False) -> None:
        """Likewise."""


class BulkEngine:
    """Attached while it is entered. Used by one thread; what it waits for ends with KvDepotError."""

    def __init__(
        self, endpoint: Endpoint, spec: NamespaceSpec, name: str, *, timeout_seconds: float,
        transport: Transport = Transport.AUTO,
    ) -> None:  # fmt: skip
        """`name`: what `kvdepotctl status` shows it as, with this process's number."""
        engine_id = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"  # containers share numbers
        self.spec = spec
        self.namespace = spec.namespace_id()
        self._timeout_seconds = timeout_seconds
        log = logging.getLogger(__name__)
        self._session = DepotSession(endpoint, engine_id, log=log)
        process = EngineProcess(engine_id, scheduler=False, rank=0)
        self._worker = Attachment(endpoint, process, transport=transport, log=log)

    def __enter__(self) -> Self:
        self._session.start()
        self._worker.start()
        self._session.register(self.spec)
        try:
            self._until(self._ready, self._why_not)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The daemon then ends what is left."""
        self._session.close(self._timeout_seconds)
        self._worker.close()

    def _ready(self) -> bool:
        session, arena = self._session, self._worker.arena
        wanted = session.bumps_wanted(self.namespace)
        if wanted is not None:
            raise StaleEpoch(wanted, advice="what was stored under another counter is never served (docs/adr/0036)")
        if session.refusal:
            raise InvalidArgument(f"the daemon refuses: {session.refusal}", advice=_ASK_THE_DAEMON)
        attached = session.attached and session.registered(self.namespace) and session.ranks_attached == 1
        return attached and self._worker.session is not None and arena is not None

    def _why_not(self) -> str:
        return self._worker.refusal or "the daemon does not answer"

    def _until(self, done: Callable[[], bool], why_not: Callable[[], str]) -> None:
        until = time.monotonic() + self._timeout_seconds
        while not done():
            if time.monotonic() >= until:
                raise KvDepotError(f"waited for {self._timeout_seconds:g} s: {why_not()}", advice=_ASK_THE_DAEMON)
            self._session.wait(_WAIT_SECONDS)

    def pause(self, seconds: float) -> None:
        """Wait, and take the daemon's answers meanwhile."""
        self._session.wait(seconds)

    # Out of the depot

    def acquire(self, names: Sequence[ObjectName], *, no_use: bool = True) -> Granted | AcquireOutcome | None:
        """Have all of these objects lent for reading; None: they could not be read in time.

        A refusal may be a quota's, which takes fewer at once. Raises LoadsOff where nothing is lent at all, else
        KvDepotError.
        """
        lease_id = self._session.new_lease_id()
        call = AcquireCall(
            b"", lease_id, self.namespace, b"".join(name.key for name in names),
            bytes(name.kind for name in names), no_use=no_use,
        )  # fmt: skip
        reply = self._answer(call, max(self._timeout_seconds, READ_SECONDS))
        if reply is None:
            return None
        assert isinstance(reply, AcquireReply)
        if reply.outcome is not AcquireOutcome.GRANTED:
            if reply.outcome is AcquireOutcome.REFUSED and reply.reason and not reply.reason.startswith("quota"):
                raise LoadsOff(f"nothing is lent: {reply.reason}", advice=_ASK_THE_DAEMON)
            return reply.outcome
        return self._granted(lease_id, reply, range(len(names)))

    def read(self, granted: Granted, index: int, memory: bytearray | None = None) -> bytearray | None:
        """Return the bytes of one object, in `memory` if given, or None if its extents were reused meanwhile."""
        if memory is None:
            memory = bytearray(granted.extents.size_bytes(index))
        arena = self._arena(granted)
        held = granted.extents.granted([index])
        if arena is None or not arena.check(*held):
            return None
        copier = _MemoryCopier(memoryview(memory))
        try:
            batches = _batches(granted.extents, index)
            copied = all(arena.load(copier, granted.extents, batch, self._timeout_seconds) for batch in batches)
        except CopyError as error:
            raise KvDepotError(f"what was granted does not fit: {error}") from error
        return memory if copied and arena.check(*held) else None

    def release(self, granted: Granted) -> None:
        self._session.release((granted.lease_id,))

    # Into the depot

    def reserve(self, names: Sequence[ObjectName]) -> tuple[list[ReserveOutcome], Granted | None, str]:
        """One outcome an object, what was granted, and a reason where the daemon has one. Parents first."""
        lease_id = self._session.new_lease_id()
        call = ReserveCall(
            b"", lease_id, self.namespace, b"".join(name.key for name in names),
            b"".join(name.parent for name in names), bytes(name.kind for name in names),
            struct.pack(f"<{len(names)}I", *(name.boundary_tokens for name in names)), "all",
        )  # fmt: skip
        reply = self._answer(call, self._timeout_seconds)
        assert isinstance(reply, ReserveReply)
        outcomes = [ReserveOutcome(outcome) for outcome in reply.outcomes]
        indices = [index for index, outcome in enumerate(outcomes) if outcome is ReserveOutcome.GRANTED]
        return outcomes, self._granted(lease_id, reply, indices) if indices else None, reply.reason

    def write(self, granted: Granted, index: int, payload: bytes | bytearray | memoryview) -> bool:
        """Whether all of it is in the arena, and the place was this call's until then."""
        if granted.extents.size_bytes(index) != len(payload):
            raise KvDepotError(f"the daemon granted {granted.extents.size_bytes(index)} bytes for {len(payload)}")
        arena, held = self._arena(granted), granted.extents.granted([index])
        if arena is None or not arena.check(*held):
            return False
        copier = _MemoryCopier(memoryview(payload))
        try:
            stored = all(arena.store(copier, granted.extents, batch) for batch in _batches(granted.extents, index))
            return stored and arena.check(*held)
        except CopyError as error:
            raise KvDepotError(f"what was granted does not fit: {error}") from error
        except IndeterminateError as error:  # the lease is left as it is: the daemon ends it when the proxy is dead
            raise KvDepotError(str(error), advice="run it again: what is there is passed over") from error

    def commit(self, granted: Granted, indices: Sequence[int]) -> list[CommitOutcome]:
        """Commit the written objects, and end the rest of the lease."""
        rest = sorted(set(granted.indices) - set(indices))
        if rest:
            self._session.abandon(granted.lease_id, rest)
        if not indices:
            return []
        got: list[bytes] = []
        self._session.commit(granted.lease_id, indices, got.append)
        self._until(lambda: bool(got), lambda: "a commit was not answered")
        return [CommitOutcome(outcome) for outcome in got[0]]

    # Both

    def _answer(self, call: AcquireCall | ReserveCall, timeout_seconds: float) -> Any:
        got: list[Any] = []
        self._session.submit(call, timeout_seconds, got.append)
        while not got:
            self._session.wait(_WAIT_SECONDS)
        answer = got[0]
        if not isinstance(answer, CallFailure):
            return answer
        if answer.reason is FailureReason.DEADLINE and isinstance(call, AcquireCall):
            return None
        said = f"{answer.code}: {answer.message}".rstrip(": ")
        if answer.reason is FailureReason.REFUSED:
            raise InvalidArgument(f"the daemon refuses: {said}", advice=_ASK_THE_DAEMON)
        raise KvDepotError(f"no answer: {said}", advice=_ASK_THE_DAEMON)

    def _granted(self, lease_id: int, reply: AcquireReply | ReserveReply, indices: Iterable[int]) -> Granted:
        arena = self._worker.arena
        try:
            extents = parse_extents(reply.extents, arena.size_bytes if arena is not None else 0)
        except ExtentError as error:
            raise KvDepotError(str(error)) from error
        return Granted(lease_id, reply.arena_id, extents, tuple(indices))

    def _arena(self, granted: Granted) -> Arena | None:
        arena = self._worker.arena
        return arena if arena is not None and arena.arena_id == granted.arena_id else None


def _batches(extents: Extents, index: int) -> Iterable[CopyBatch]:
    """Yield the fragments of one object, in pieces of at most BATCH_BYTES, as copies of one block."""
    fragments = slice(*extents.fragments[index])
    starts = extents.starts[fragments]
    columns = (starts - starts[0], extents.offsets[fragments], extents.lengths[fragments])
    pieces = [
        (start + skip, offset + skip, min(length - skip, BATCH_BYTES))
        for start, offset, length in zip(*(column.tolist() for column in columns), strict=True)
        for skip in range(0, length, BATCH_BYTES)
    ]
    skips, offsets, lengths = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    zeros = np.zeros(len(pieces), np.int64)
    return CopyBatch(zeros, zeros, skips, offsets, lengths).split()
