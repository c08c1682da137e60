"""A disk tier whose workers and opening process are calls in this process: real files, no waiting, faults at will."""

from __future__ import annotations

import logging
import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from typing import TypeVarTuple

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName, payload_sum
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.bucket import Bucket
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import JOBS, Answer, Job, Priority, ServePeer
from kvdepot.server.io.perform import perform
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Loan, Read, Tier, Written
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.messages import MESSAGES, Begin, Compact, Locked, Message, Open, Request, Sync
from kvdepot.server.tiers.disk.opening import Opener
from kvdepot.server.tiers.disk.tier import DiskTier

from tests.fakes.raising import Injected

Fault = Callable[[Job], Answer | None]
_Args = TypeVarTuple("_Args")
NAMESPACE = b"namespace-16byte"
PAGE = 4096


def object_name(number: int, raw_bytes: int = 2 * PAGE, boundary: int = 32, parent: bytes = bytes(16)) -> ObjectName:
    key = blake2b(b"%d" % number, digest_size=16).digest()
    return ObjectName(NAMESPACE, key, parent, 1 + number % 3, boundary, raw_bytes)


@dataclass(eq=False)
class Task:
    job: Job
    priority: Priority
    done: Callable[[Answer], None]
    loan: Loan | None
    refused: str = ""  # why, when it was submitted


class InlineWorkers:
    """Jobs wait until `step`, which does them as a worker would, as they come over the wire.

    `late` are those that were answered TIMEOUT. With a `guard` callbacks that raise cost nothing else, as in a pool;
    without one they fail the test.
    """

    def __init__(self, root: Path, arena: memoryview, clock: Callable[[], float], guard: Guard | None = None) -> None:
        self._guard = guard
        self._numbers = count(1)
        self.root = root
        self.arena = arena
        self.bucket: Bucket | None = None
        self.breaker = Breaker(failures_max=5, probe_every_seconds=5, clock=clock)
        self.tasks: deque[Task] = deque()
        self.late: list[Task] = []
        self.fault: Fault = lambda _: None
        self.deaths = 0  # so many workers die over the next jobs, which others try again
        self.why_unusable = "not started"
        self.closed = False
        self.done: list[tuple[Job, Answer]] = []

    @property
    def usable(self) -> bool:
        return not self.why_unusable

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        """Answers what cannot be packed as a pool does: without the daemon's limits a fake knows of no jam."""
        refused = self.why_unusable
        try:
            ((_, packed),) = JOBS.take(bytearray(JOBS.pack(job, next(self._numbers))))
            assert not isinstance(packed, ServePeer)
            job = packed
        except Exception as error:  # noqa: BLE001
            refused = refused or str(error)
        self.tasks.append(Task(job, priority, done, loan, refused))

    def renew(self, guard: str) -> None:
        self.why_unusable = ""

    async def close(self, seconds: float = 3.0) -> int:
        self.closed = True
        self.why_unusable = "closed"
        while self.tasks:
            self._call(self.tasks.popleft().done, Answer(IoOutcome.CANCELLED))
        return 0

    def step(self) -> bool:
        if not self.tasks:
            return False
        task = min(self.tasks, key=lambda task: task.priority)
        self.tasks.remove(task)
        if task.refused or not self.usable or not self._lend(task):
            self._call(task.done, Answer(IoOutcome.CANCELLED, task.refused or self.why_unusable))
            return True
        if self.deaths and task.loan is not None:
            self.deaths -= 1
            self._call(task.loan.end)
            self.tasks.appendleft(task)
            return True
        answer = self.fault(task.job)
        if answer is None:
            context = Context(str(self.root), self.arena, bucket=self.bucket)
            answer = perform(task.job, context)
            context.close()
        self.done.append((task.job, answer))
        if answer.outcome is IoOutcome.OK:
            self.breaker.worked()
        if answer.outcome is IoOutcome.TIMEOUT:
            self.late.append(task)
        elif task.loan is not None:
            self._call(task.loan.end)
        self._call(task.done, answer)
        return True

    def _lend(self, task: Task) -> bool:
        loan = task.loan
        if loan is None:
            return True
        return loan.begin(7) if self._guard is None else self._guard.value("a loan", False, loan.begin, 7)

    def _call(self, callback: Callable[[*_Args], object], *arguments: *_Args) -> None:
        if self._guard is None:
            callback(*arguments)
        else:
            self._guard.call("a callback", callback, *arguments)

    def end_late(self) -> None:
        """The workers that hung are dead now."""
        for task in self.late:
            if task.loan is not None:
                self._call(task.loan.end)
        self.late.clear()


class InlineOpener:
    """The opening process without its locks."""

    def __init__(self, config: DiskConfig, random: Random) -> None:
        self._opener = Opener(config.path, config.capacity_bytes, config.quarantine_bytes, random.randbytes)
        self._on_message: Callable[[Message], None] = lambda _: None
        self._root = config.path
        self.requests: deque[Request] = deque()
        self.messages: deque[Message] = deque()
        self.running = False
        self.starts = 0
        self.openings = 0
        self.opening: Callable[[], None] = lambda: None  # called before each

    def start(self, on_message: Callable[[Message], None]) -> None:
        self.starts += 1
        self.running = True
        self._on_message = on_message

    def send(self, request: Request) -> None:
        self.requests.append(request)

    def wait(self, seconds: float) -> Message | None:
        return None

    def end(self) -> None:
        self.running = False
        self.requests.clear()
        self.messages.clear()

    def send_message(self, message: Message) -> None:
        self.messages.append(message)

    def step(self) -> bool:
        if not self.running:
            return False
        if not self.messages:
            if not self.requests:
                return False
            self._answer(self.requests.popleft())
        self._on_message(self.messages.popleft())
        return True

    def _answer(self, request: Request) -> None:
        match request:
            case Begin():
                self._root.mkdir(exist_ok=True)
                self.messages.append(Locked("token", self._root.stat().st_dev))
            case Open() | Compact() | Sync():
                if isinstance(request, Open):
                    self.openings += 1
                    self.opening()
                sent = bytearray().join(map(MESSAGES.pack, self._opener.answer(request)))
                self.messages.extend(message for _, message in MESSAGES.take(sent))


@dataclass
class Loaned:
    """A loan that remembers."""

    refuses: bool = False
    begun: int = 0
    ended: int = 0

    def begin(self, worker: int) -> bool:
        self.begun += not self.refuses
        return not self.refuses

    def end(self) -> None:
        self.ended += 1


@dataclass
class Listener:
    """What the engine would know: name by handle, and what it was told is lost."""

    held: dict[int, ObjectName] = field(default_factory=dict)
    found_order: list[ObjectName] = field(default_factory=list)
    lost_names: list[ObjectName] = field(default_factory=list)

    def found(self, tier: Tier, objects: FoundObjects) -> None:
        for handle, name in objects:
            assert handle not in self.held
            self.held[handle] = name
            self.found_order.append(name)

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:
        self.lost_names += [self.held.pop(handle) for handle in handles]


class DiskRig:
    """One directory and, at a time, one tier over it. `crash` starts the next one on the same files."""

    guard: Guard | None = None  # of the workers
    wall_raises = False  # at the next look at it

    def __init__(self, root: Path, *, capacity_bytes: int = 32 << 20, seed: int = 0, **config: object) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.arena = memoryview(mmap.mmap(-1, 4 << 20))
        self.arena_base = 0  # where the next payload lies; tests with several in flight move it
        settings = {"quarantine_bytes": 1 << 20, "scrub_bytes_per_second": 0} | config
        self.config = DiskConfig("disk", root, capacity_bytes, **settings)  # type: ignore[arg-type]
        self.log = logging.getLogger("tests.disk")
        self.listener = Listener()
        self.counts: Counter[str] = Counter()  # of all runs
        self.start()

    def start(self, *, settle: bool = True) -> None:
        self.data = InlineWorkers(self.config.path, self.arena, self.clock, self.guard)
        self.journal = InlineWorkers(self.config.path, self.arena, self.clock, self.guard)
        self.opener = InlineOpener(self.config, self.random)
        self.listener = Listener()
        self.tier = DiskTier(
            self.config, data=self.data, journal=self.journal, opener=self.opener, log=self.log,
            clock=self.clock, wall_clock=self.wall_clock, count=self._count,
        )  # fmt: skip
        self.tier.start(self.listener)
        if settle:
            self.settle()

    crash = start

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)

    def clock(self) -> float:
        return self.now

    def wall_clock(self) -> float:
        if self.wall_raises:
            self.wall_raises = False
            raise Injected("wall clock")
        return self.wall

    def writable(self) -> bool:
        return self.tier.writable

    def budget_spent(self) -> bool:
        return self.tier.budget_spent

    def settle(self) -> None:
        """Until nobody has anything to do."""
        for _ in range(1_000_000):
            if not (self.data.step() or self.journal.step() or self.opener.step()):
                return
        raise AssertionError("never at rest")

    def step(self) -> bool:
        """One party, at random, does one thing."""
        parties = [self.data.step, self.journal.step, self.opener.step]
        self.random.shuffle(parties)
        return any(party() for party in parties)

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.wall += seconds
        self.tier.tick()

    def payload(self, name: ObjectName, variant: int = 0) -> bytes:
        return Random(name.key + bytes([variant])).randbytes(name.raw_bytes)

    def extents(self, name: ObjectName) -> tuple[Extent, ...]:
        """In two pieces where there are two pages, the second one first."""
        base = self.arena_base
        if name.raw_bytes <= PAGE:
            return ((base + PAGE, name.raw_bytes),)
        return ((len(self.arena) - PAGE - base, PAGE), (base, name.raw_bytes - PAGE))

    def fill(self, name: ObjectName, payload: bytes) -> tuple[Extent, ...]:
        extents, at = self.extents(name), 0
        for offset, length in extents:
            self.arena[offset : offset + length] = payload[at : at + length]
            at += length
        return extents

    def submit_write(self, name: ObjectName, variant: int = 0, raw_sum: int | None = None) -> list[Written]:
        """The answer appears in the list. The arena holds one payload at a time: settle before the next."""
        answers: list[Written] = []
        extents = self.fill(name, self.payload(name, variant))

        def done(written: Written) -> None:
            if written.outcome is IoOutcome.OK:
                self.listener.held[written.handle] = name
            answers.append(written)

        self.tier.write(name, extents, Loaned(), raw_sum, done)
        return answers

    def write(self, name: ObjectName, variant: int = 0, raw_sum: int | None = None) -> Written:
        answers = self.submit_write(name, variant, raw_sum)
        self.settle()
        (written,) = answers
        return written

    def stored(self, number: int, **shape: int) -> int:
        """The handle of an object that was written."""
        written = self.write(object_name(number, **shape))  # type: ignore[arg-type]
        assert written.outcome is IoOutcome.OK, written
        return written.handle

    def read(self, handle: int) -> tuple[Read, bytes]:
        name = self.listener.held[handle]
        extents = self.fill(name, bytes(name.raw_bytes))
        answers: list[Read] = []
        self.tier.read(handle, name, extents, Loaned(), answers.append)
        self.settle()
        (read,) = answers
        if read.outcome in DAMAGED:
            del self.listener.held[handle]
        data = b"".join(bytes(self.arena[offset : offset + length]) for offset, length in extents)
        if read.outcome is IoOutcome.OK:
            assert read.raw_sum == payload_sum([data])
        return read, data

    def drop(self, handle: int) -> None:
        del self.listener.held[handle]
        self.tier.drop(handle)

    def names(self) -> set[ObjectName]:
        return set(self.listener.held.values())

    def check(self) -> None:
        """Everything served has bytes of its own, and the free ones are nobody's."""
        medium = self.tier._medium
        used = [fragment for handle in medium.catalog.handles() for fragment in medium.catalog.fragments(handle)]
        used += [fragment for held in medium.space._held.values() for fragment in held.fragments]
        end = 0
        for address, length in sorted(used):
            assert address >= end, "two places overlap"
            end = address + length
        medium.space._allocator.check()
        assert medium.space._allocator.used_bytes == sum(length for _, length in used)
        assert sorted(medium.catalog.handles()) == sorted(self.listener.held)

    def disk_usage_bytes(self) -> int:
        """As `du` counts."""
        paths = [self.config.path, *self.config.path.rglob("*")]
        return sum(path.lstat().st_blocks * 512 for path in paths)


def failing(kind: type[Job], outcome: IoOutcome, times: int = 1_000_000) -> Callable[[Job], Answer | None]:
    left = times

    def fault(job: Job) -> Answer | None:
        nonlocal left
        if not isinstance(job, kind) or not left:
            return None
        left -= 1
        return Answer(outcome, "injected")

    return fault


def flip(rig: DiskRig, handle: int, at: int) -> None:
    """One bit of an object, counted from its header."""
    medium = rig.tier._medium
    (part, *_) = medium.layout.parts([(medium.catalog.fragments(handle)[0][0] + at, PAGE)], PAGE)
    with (rig.config.path / part.file).open("r+b") as file:
        file.seek(part.offset)
        byte = file.read(1)[0]
        file.seek(part.offset)
        file.write(bytes([byte ^ 1]))
