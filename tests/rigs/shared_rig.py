"""A shared tier whose workers and coordinator are calls in this process: real files, no waiting, faults at will."""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import Answer, Job
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome, Loan, Read, Written
from kvdepot.server.tiers.conformance_harness import RecordingListener, RecordingLoan, extents_of, payload_of
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.links import Message, Report
from kvdepot.server.tiers.shared.tier import SharedTier

from tests.rigs.disk_rig import InlineWorkers

_NODES = count(1)
_Job = TypeVar("_Job", bound=Job)


class InlineCoordinator:
    """Makes marker and folders, and says that all is well: once started, and whenever a test has it say something."""

    def __init__(self, root: Path, limit_bytes: int = 1 << 40) -> None:
        self._root = root
        self._on_message: Callable[[Message], None] | None = None
        self.node = f"node-{next(_NODES)}"
        self.published: list[int] = []
        self.settled = ""
        self.refused = False
        self.answers = True
        self.running = False
        self.report = Report(
            self.node, self.node, is_janitor=True, used_bytes=0, quarantined_bytes=0, objects=0,
            limit_bytes=limit_bytes, marker_ok=True, device=0,
        )  # fmt: skip

    def start(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self.running = True

    def publish(self, total_bytes: int, wanted_bytes: int = 0, settled: str = "", *, refused: bool = False) -> None:
        if total_bytes != (self.published or [0])[-1]:
            self.published.append(total_bytes)
        self.settled = settled
        self.refused = refused

    def end(self) -> None:
        self.running = False
        self._on_message = None

    def open(self) -> None:
        """What the first report says."""
        self._root.mkdir(exist_ok=True)
        for folder in layout.FOLDERS:
            (self._root / folder).mkdir(exist_ok=True)
        (self._root / layout.MARKER).write_bytes(layout.Marker("ab" * 16, "a test").pack())
        self.report = replace(self.report, device=self._root.stat().st_dev)
        self.send_message(self.report)

    def send_message(self, message: Message) -> None:
        assert self._on_message is not None
        self._on_message(message)


def fails(kind: type[Job], outcome: IoOutcome, detail: str = "injected") -> Callable[[Job], Answer | None]:
    """A fault of the workers."""
    return lambda job: Answer(outcome, detail) if isinstance(job, kind) else None


class SharedRig:
    """A tier over a directory; several over one are several nodes. `start` begins anew on the same files."""

    guard: Guard | None = None  # of the workers

    def __init__(
        self, root: Path, *, arena: memoryview | None = None, opens: bool = True, handles_max: int | None = None,
        **config: object,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.slept_seconds = 0.0
        """For which the machine slept: CLOCK_MONOTONIC stood still."""
        self.root = root
        self.arena = memoryview(mmap.mmap(-1, 4 << 20)) if arena is None else arena
        self.config = SharedConfig("shared", root, 1 << 30, **config)  # type: ignore[arg-type]
        self._handles_max = handles_max
        self.start(opens=opens)

    def start(self, *, opens: bool = True) -> None:
        self.workers = InlineWorkers(self.root, self.arena, self.clock, self.guard)
        self.coordinator = InlineCoordinator(self.root)
        self.listener = RecordingListener()
        self.counts: Counter[str] = Counter()
        self.tier = SharedTier(
            self.config, data=self.workers, coordinator=self.coordinator, log=logging.getLogger("tests.shared"),
            count=self._count, clock=self.clock, wall_clock=self.wall_clock, handles_max=self._handles_max,
            boot_clock=lambda: self.now + self.slept_seconds,
        )  # fmt: skip
        self.tier.start(self.listener)
        if opens:
            self.coordinator.open()

    def another(self, **config: Any) -> Self:
        """A second node on the same directory."""
        return type(self)(self.root, **config)

    def clock(self) -> float:
        return self.now

    def wall_clock(self) -> float:
        return self.wall

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)

    def writable(self) -> bool:
        return self.tier.writable

    def settle(self) -> None:
        while self.workers.step():
            pass

    def jobs(self, kind: type[_Job]) -> list[_Job]:
        """What the workers did of this kind."""
        return [job for job, _ in self.workers.done if isinstance(job, kind)]

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.wall += seconds
        self.tier.tick()

    def path(self, handle: int) -> Path:
        return self.path_of(self.tier._directory.holdings.name(handle))

    def path_of(self, name: ObjectName) -> Path:
        return self.root / layout.object_file(name)

    def submit_write(self, name: ObjectName, loan: Loan | None = None) -> list[Written]:
        answers: list[Written] = []
        self.arena[: name.raw_bytes] = payload_of(name)
        self.tier.write(name, extents_of(name), loan or RecordingLoan(), None, answers.append)
        return answers

    def write(self, name: ObjectName) -> Written:
        answers = self.submit_write(name)
        self.settle()
        (answer,) = answers
        return answer

    def stored(self, name: ObjectName) -> int:
        written = self.write(name)
        assert written.outcome is IoOutcome.OK, written
        return written.handle

    def submit_read(self, handle: int, name: ObjectName) -> list[Read]:
        answers: list[Read] = []
        self.arena[: name.raw_bytes] = bytes(name.raw_bytes)
        self.tier.read(handle, name, extents_of(name), RecordingLoan(), answers.append)
        return answers

    def read(self, handle: int, name: ObjectName) -> tuple[IoOutcome, bytes]:
        answers = self.submit_read(handle, name)
        self.settle()
        (answer,) = answers
        return answer.outcome, bytes(self.arena[: name.raw_bytes])

    def look_up(self, *names: ObjectName) -> dict[ObjectName, int]:
        """The handles of those that were found."""
        known = len(self.listener.found_objects)
        answers: list[bool] = []
        self.tier.look_up(names, lambda: answers.append(True))
        self.settle()
        assert answers == [True]
        return {name: handle for handle, name in self.listener.found_objects[known:]}
