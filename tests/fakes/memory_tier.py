"""A tier whose medium is a dict: the reference of the interface, with every answer under a test's control.

Jobs wait in `jobs` until the test begins and finishes them, in any order, with any outcome,
or never. What it stores is in the on-medium format, so that damage is what it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    Codec,
    Damage,
    ObjectDamageError,
    ObjectHeader,
    object_bytes,
    payload_sum,
)
from kvdepot.core.report import TierStatus
from kvdepot.server.storage.base import (
    DAMAGED,
    NO_HANDLE,
    IoOutcome,
    Loan,
    ObjectName,
    Read,
    Stored,
    TierListener,
    TierTraits,
    WorkerRegistry,
    Written,
)
from kvdepot.server.storage.found import FoundObjects

from tests.fakes.raising import Injected


@dataclass
class Medium:
    """What survives the tier: by handle, header and payload as they would lie on a disk."""

    stored: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, ObjectName] = field(default_factory=dict)  # as a journal knows them, whatever lies there
    quarantined: list[bytes] = field(default_factory=list)
    undropped: dict[int, bytes] = field(default_factory=dict)  # while it could not be written


@dataclass(eq=False)
class Job:
    """A read (with a handle) or a write."""

    name: ObjectName
    extents: Sequence[Extent]
    loan: Loan
    done: Callable[[Read], None] | Callable[[Written], None]
    handle: int = NO_HANDLE
    raw_sum: int | None = None
    cost_bytes: int = 0
    begun: bool = False
    doubtful: tuple[int, ...] = ()  # sums that the stored bytes must not have
    snapshot: bytes = b""  # of the object when it was asked for: a drop does not change the answer

    @property
    def reads(self) -> bool:
        return self.handle != NO_HANDLE


class Unlent:
    """The loan of a job that touches no extents."""

    def begin(self, worker: int) -> bool:
        return True

    def end(self) -> None:
        """There is none."""


class MemoryTier:
    """Implements `Tier`. `automatic`: jobs are done at once, in `read` and `write` themselves."""

    def __init__(
        self,
        arena: memoryview,
        registry: WorkerRegistry,
        *,
        medium: Medium | None = None,
        name: str = "memory",
        capacity_bytes: int = 1 << 20,
        handles_max: int = 256,
        slots: int = 4,
        automatic: bool = False,
        pid: int = 4242,
    ) -> None:
        self.name = name
        self.handles_max = handles_max
        self.traits = TierTraits()
        self.medium = medium or Medium()
        self.jobs: list[Job] = []
        self.automatic = automatic
        self.readable = False
        self.writable = False
        self.budget_spent = False
        self.opens_at_start = True
        self.state = "opening"  # until it opens
        self.late: list[Job] = []  # answered TIMEOUT, and still in a worker's hands
        self.capacity_bytes = capacity_bytes
        self._arena = arena
        self.registry = registry
        self.pid = pid
        self._worker = -1
        self._slots = slots
        self._used = sum(len(blob) for blob in self.medium.stored.values())
        self._sequences = count(1)
        self._listener: TierListener | None = None
        self._fails: list[IoOutcome] = []
        self._raises: tuple[str, bool] | None = None

    # Tier

    @property
    def write_slots(self) -> int:
        return self._slots - sum(not job.reads for job in self.jobs) if self.writable else 0

    @property
    def used_bytes(self) -> int:
        return self._used

    def cost_bytes(self, raw_bytes: int) -> int:
        return object_bytes(raw_bytes)

    def too_large(self, raw_bytes: int) -> bool:
        return self.cost_bytes(raw_bytes) > self.capacity_bytes

    def start(self, listener: TierListener) -> None:
        self._listener = listener
        if self.opens_at_start:
            self.open()

    def tick(self) -> None:
        """Nothing happens by itself."""
        with self._may_raise("tick"):
            return

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        cost_bytes = self.cost_bytes(name.raw_bytes)
        handles = len(self.handles) + sum(not job.reads for job in self.jobs)
        with self._may_raise("write"):
            if not self.writable:
                done(Written(IoOutcome.CANCELLED))
            elif self._used + cost_bytes > self.capacity_bytes or handles >= self.handles_max:
                done(Written(IoOutcome.NO_SPACE))
            else:
                self._used += cost_bytes
                self._add(Job(name, extents, loan, done, raw_sum=raw_sum, cost_bytes=cost_bytes))

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        with self._may_raise("read"):
            if not self.readable:
                done(Read(IoOutcome.CANCELLED))
                return
            self._add(Job(name, extents, loan, done, handle=handle, snapshot=self.medium.stored[handle]))

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        """A read into nothing, which nobody lends."""
        if not self.readable or handle not in self.handles:
            done(IoOutcome.CANCELLED)
            return

        def verified(read: Read) -> None:
            if handle not in self.handles and self._listener is not None:
                self._listener.lost(self, [handle])
            done(read.outcome)

        snapshot = self.medium.stored.get(handle, b"")
        self._add(Job(self._named(handle), (), Unlent(), verified, handle=handle, snapshot=snapshot))

    def _named(self, handle: int) -> ObjectName:
        return self.medium.names[handle]

    def drop(self, handle: int) -> None:
        blob = self.medium.stored.pop(handle)
        self._used -= self._cost(blob)
        if not self.writable:  # nothing can be noted there: who opens it next finds the object
            self.medium.undropped[handle] = blob

    def stored(self, handle: int) -> Stored:
        try:
            header = ObjectHeader.unpack(self.medium.stored[handle])
        except ObjectDamageError:  # a tier knows this without its medium
            return Stored(self._named(handle).raw_bytes, 0, None)
        return Stored(header.stored_bytes, header.sequence, header.stored_sum)

    async def close(self) -> None:
        self.stop()

    def status(self) -> TierStatus:
        works = "ready" if self.readable and self.writable else "degraded"
        state = works if self._worker >= 0 else self.state
        return TierStatus(self.name, "memory", self.capacity_bytes, self.capacity_bytes, self._used, state=state)

    # The test's part

    @property
    def handles(self) -> set[int]:
        """In use."""
        return set(self.medium.stored)

    @property
    def opened(self) -> bool:
        """Whether it has said so in this run, and was not stopped."""
        return self._worker >= 0

    def open(self) -> None:
        """Say what is there and serve."""
        assert self._listener is not None
        self._worker = self.registry.started(self.pid)
        self.medium.stored.update(self.medium.undropped)
        self.medium.undropped.clear()
        found = [(handle, self.medium.names[handle]) for handle in self.medium.stored]
        found.sort(key=lambda one: one[1].boundary_tokens)
        self.readable = self.writable = True
        self._listener.found(self, FoundObjects.of(found))

    def lose(self, *handles: int) -> None:
        """They vanish from the medium, and the tier notices."""
        assert self._listener is not None
        for handle in handles:
            self._used -= self._cost(self.medium.stored.pop(handle))
        self._listener.lost(self, handles)

    def raise_next(self, name: str, *, after: bool) -> None:
        """The next call of this name raises: before it does anything, or when it has done all."""
        self._raises = name, after

    @contextmanager
    def _may_raise(self, name: str) -> Iterator[None]:
        due = self._raises if self._raises is not None and self._raises[0] == name else None
        if due is not None:
            self._raises = None
            if not due[1]:
                raise Injected(name)
        yield
        if due is not None:
            raise Injected(name)

    def fail_next(self, *outcomes: IoOutcome) -> None:
        """The next jobs to be finished end so."""
        self._fails.extend(outcomes)

    def begin(self, job: Job) -> bool:
        """A worker takes it in hand; False: it was refused, and is over."""
        if not job.begun and not job.loan.begin(self._worker):
            self._end(job, IoOutcome.CANCELLED, lent=False)
            return False
        job.begun = True
        return True

    def finish(self, job: Job, outcome: IoOutcome | None = None) -> None:
        """Do it and answer, or fail with `outcome`."""
        if not self.begin(job):
            return
        outcome = outcome or (self._fails.pop(0) if self._fails else None)
        if outcome is IoOutcome.TIMEOUT:
            self.late.append(job)
            self._end(job, outcome, lent=False)
        elif outcome is not None:
            self._end(job, outcome, lent=True)
        elif job.reads:
            self._finish_read(job)
        else:
            self._finish_write(job)

    def run(self) -> int:
        """Finish everything that waits, loads first; how many."""
        done = 0
        while self.jobs:
            self.finish(next((job for job in self.jobs if job.reads), self.jobs[0]))
            done += 1
        return done

    def worker_dies(self) -> None:
        """What was answered TIMEOUT comes back at last."""
        late, self.late = self.late, []
        for job in late:
            job.loan.end()

    def stop(self) -> None:
        """Answer what is left, as a closing tier does, and end the worker."""
        self.readable = self.writable = False
        for job in list(self.jobs):
            self._end(job, IoOutcome.CANCELLED, lent=job.begun)
        self.worker_dies()
        if self._worker >= 0:
            self.registry.dead(self._worker)
            self._worker = -1

    # Within

    def _add(self, job: Job) -> None:
        self.jobs.append(job)
        if self.automatic:
            self.finish(job)

    @staticmethod
    def _cost(blob: bytes) -> int:
        return object_bytes(max(len(blob) - HEADER_BYTES, 0))

    def _end(self, job: Job, outcome: IoOutcome, *, lent: bool, raw_sum: int = 0, handle: int = NO_HANDLE) -> None:
        self.jobs.remove(job)
        if lent:
            job.loan.end()
        if job.reads:
            self._note_read(job, outcome)
            job.done(Read(outcome, raw_sum))  # type: ignore[arg-type]
            return
        if outcome is not IoOutcome.OK:
            self._used -= job.cost_bytes
        stored_bytes = job.name.raw_bytes if outcome is IoOutcome.OK else 0
        job.done(Written(outcome, handle, raw_sum, stored_bytes))  # type: ignore[arg-type]

    def _note_read(self, job: Job, outcome: IoOutcome) -> None:
        """What is proved bad leaves the tier."""
        if outcome in DAMAGED and self.medium.stored.get(job.handle) is job.snapshot:
            self.medium.quarantined.append(job.snapshot)
            self.drop(job.handle)

    def _finish_read(self, job: Job) -> None:
        try:
            payload = self._verified(job)
        except ObjectDamageError as damage:
            self._end(job, IoOutcome(damage.damage.value), lent=True)
            return
        at = 0
        for offset, length in job.extents:
            self._arena[offset : offset + length] = payload[at : at + length]
            at += length
        self._end(job, IoOutcome.OK, lent=True, raw_sum=payload_sum([payload]))

    def _verified(self, job: Job) -> bytes:
        header = ObjectHeader.unpack(job.snapshot)
        header.check(job.name)
        payload = job.snapshot[HEADER_BYTES:]
        header.check_room(len(payload))
        payload = payload[: header.stored_bytes]
        if payload_sum([payload]) != header.stored_sum:
            raise ObjectDamageError(Damage.CORRUPT, "payload")
        if header.raw_sum in job.doubtful:
            raise ObjectDamageError(Damage.CORRUPT, "doubtful")
        return payload

    def _finish_write(self, job: Job) -> None:
        payload = b"".join(bytes(self._arena[offset : offset + length]) for offset, length in job.extents)
        raw_sum = payload_sum([payload])
        if job.raw_sum is not None and job.raw_sum != raw_sum:
            self._end(job, IoOutcome.CORRUPT, lent=True)
            return
        header = ObjectHeader(job.name, Codec.NONE, len(payload), raw_sum, raw_sum, next(self._sequences), 0)
        padding = object_bytes(len(payload)) - HEADER_BYTES - len(payload)
        handle = self._put(job, header.pack() + payload + bytes(padding))
        self._end(job, IoOutcome.OK, lent=True, raw_sum=raw_sum, handle=handle)

    def _put(self, job: Job, blob: bytes) -> int:
        """The object's handle from now on."""
        handle = next(number for number in range(self.handles_max) if number not in self.medium.stored)
        self.medium.names[handle] = job.name
        self.medium.stored[handle] = blob
        return handle
