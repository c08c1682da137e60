"""A pool of real worker processes for tests, with everything written down that it tells the engine."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvdepot.core.errors import NoRoom
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Priority
from kvdepot.server.io.pool import IoPool
from kvdepot.server.io.worker_process import WorkerSettings

from tests.rigs import patience
from tests.rigs.io_rig import ARENA_BYTES, IoRig
from tests.rigs.stopping import state


class Registry:
    """Which workers the engine would have written down."""

    earlier = 0

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.started_in_all = 0
        self.full = False
        self.made: Callable[[int], None] = lambda pid: None  # called before it can have started

    def started(self, pid: int) -> int:
        if self.full:
            raise NoRoom("the table is full")
        self.started_in_all += 1
        self.pids[self.started_in_all] = pid
        self.made(pid)
        return self.started_in_all

    def dead(self, worker: int) -> None:
        pid = self.pids.pop(worker)
        assert not Path(f"/proc/{pid}").exists(), "called dead, and is there"


class Lent:
    """A loan that remembers who had it. `held_by`: a worker's number, None when nobody."""

    def __init__(
        self, registry: Registry, *, refuse: bool = False, log: list[str] | None = None, name: str = "",
        begins: Callable[[int], None] = lambda pid: None,
    ) -> None:  # fmt: skip
        """`begins` is called with the pid of the worker, before it hears of the job."""
        self._begins = begins
        self._registry = registry
        self._refuse = refuse
        self._log = log
        self._name = name
        self.begun = 0
        self.held_by: int | None = None

    def begin(self, worker: int) -> bool:
        assert self.held_by is None
        assert worker in self._registry.pids, "lent to a worker that is not written down"
        if self._refuse:
            return False
        self.begun += 1
        self.held_by = worker
        self._begins(self._registry.pids[worker])
        if self._log is not None:
            self._log.append(self._name)
        return True

    def end(self) -> None:
        assert self.held_by is not None
        assert self.held_by in self._registry.pids, "the worker was called dead first"
        self.held_by = None


class PoolRig:
    """See `pool_on`."""

    def __init__(self, rig: IoRig, directory: Path, **options: Any) -> None:
        self.rig = rig
        self.registry = Registry()
        self.counts: Counter[str] = Counter()
        self.changes: list[bool] = []
        loop = asyncio.get_running_loop()
        failures, probe_seconds = options.pop("failures", 3), options.pop("probe_seconds", 0.2)
        self.breaker = Breaker(failures_max=failures, probe_every_seconds=probe_seconds, clock=loop.time)
        settings = WorkerSettings(
            directory,
            [(options.pop("arena_fd", rig.arena_fd), ARENA_BYTES)],
            options.pop("guard", ""),
            options.pop("bucket", ""),
        )
        options.setdefault("quick_seconds", 0.0)  # so that it does not depend on the machine what a worker is handed
        self.pool = IoPool(
            settings=settings, workers=options.pop("workers", 1), deadline_seconds=options.pop("deadline", 20.0),
            breaker=self.breaker, registry=self.registry, loop=loop, log=logging.getLogger("io"),
            count=self._count, changed=lambda: self.changes.append(self.pool.usable), **options,
        )  # fmt: skip
        self.pool.start()

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += amount  # type: ignore[assignment]

    @property
    def pid(self) -> int:
        """Of the only worker."""
        (pid,) = self.pool.pids
        return pid

    def lent(self, **options: Any) -> Lent:
        return Lent(self.registry, **options)

    def ask(self, job: Job, loan: Lent | None = None, **options: Any) -> asyncio.Future[Answer]:
        """Answered once, and not from within."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        options.setdefault("priority", Priority.LOAD)
        self.pool.submit(job, done=future.set_result, loan=loan, **options)
        assert not future.done()
        return future


@asynccontextmanager
async def pool_on(rig: IoRig, directory: Path | None = None, **options: Any) -> AsyncIterator[PoolRig]:
    """A pool over `directory` (else the rig's). Options: workers, deadline, failures, probe_seconds, and the pool's.

    `started`: whether to wait for its first workers.
    """
    started = options.pop("started", True)
    under_test = PoolRig(rig, directory or rig.directory, **options)
    try:
        if started:
            await until(lambda: not under_test.pool.starting, "the workers have started")
        yield under_test
    finally:
        await under_test.pool.close(2.0)


until = partial(patience.until, seconds=15.0)


def is_gone(pid: int) -> bool:
    """Whether every thread has ended: the first one may be a zombie while another hangs in the kernel."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(state(int(thread.name)) in ("", "Z", "X") for thread in threads)
