"""A device in host memory whose queues are threads: what is queued happens later, as on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.runs import Runs

from benchmarks.host_device import HostDevice


class Queue:
    """A stream. After work that failed it does nothing more, and whoever waits for it is told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._work: SimpleQueue[Callable[[], object] | Mark | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, Mark):
                work.reached.set()
            elif self.error is None:
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - whoever waits is told
                    self.error = error

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self) -> Mark:
        mark = Mark(self)
        self._work.put(mark)
        return mark

    def end(self) -> None:
        """End the thread when everything before has been done, and wait for that."""
        self._work.put(None)
        self._thread.join()


class Mark:
    """An event of a queue."""

    def __init__(self, queue: Queue) -> None:
        self.reached = threading.Event()
        self._queue = queue

    def wait(self) -> None:
        self.reached.wait()
        if self._queue.error is not None:
            raise RuntimeError("the stand-in's device is lost") from self._queue.error


class QueuedDevice(HostDevice):
    """Two queues beside the engine's."""

    def __init__(self, engine: Queue) -> None:
        self._engine = engine
        self._queues = {direction: Queue() for direction in Direction}

    def leave(self) -> None:
        for queue in self._queues.values():
            queue.end()

    def engine_mark(self) -> object:
        return self._engine.mark()

    def run_after(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        for queue in self._queues.values():
            queue.put(mark.wait)

    def run(self, direction: Direction, work: Callable[[], None]) -> None:
        self._queues[direction].put(work)

    def transfer(self, direction: Direction, runs: Runs, *, pinned: bool) -> None:
        copy = super().transfer
        self._queues[direction].put(lambda: copy(direction, runs, pinned=pinned))

    def mark(self, direction: Direction) -> object:
        return self._queues[direction].mark()

    def wait(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        mark.wait()


class StandIn:
    """See Machine."""

    name = "a stand-in"
    stands_in = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._engine = Queue()

    def copies(self) -> QueuedDevice:
        return QueuedDevice(self._engine)

    def delay(self, seconds: float) -> None:
        self._engine.put(lambda: time.sleep(seconds))

    def on_engine(self, work: Callable[[], object]) -> None:
        self._engine.put(work)

    def enter(self) -> None: ...

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        return lambda: self._engine.put(work)

    def wait(self) -> None:
        self._engine.mark().wait()

    def synchronize(self) -> None:
        self.wait()

    def close(self) -> None:
        self._engine.end()
