"""A shared tier with a real pool of worker processes, its tick, and a coordinator under a test's control."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import Probe
from kvdepot.server.storage.base import IoOutcome, Read, Written
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.conformance_harness import RecordingListener, extents_of, payload_of
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared import factory
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.tier import SharedTier

from tests.rigs.io_pool_rig import Lent, Registry
from tests.rigs.patience import until
from tests.rigs.shared_rig import InlineCoordinator

ARENA_BYTES = 4 << 20
_TICK_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


class SharedLive:
    """See `shared_on`."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.arena_fd = os.memfd_create("arena")
        os.truncate(self.arena_fd, ARENA_BYTES)
        self.registry = Registry()
        self.listener = RecordingListener()
        self.counts: Counter[str] = Counter()
        self.coordinator = InlineCoordinator(root)
        settings = {"io_workers": 1, "deadline_seconds": 20.0, "failures": 3, "probe_seconds": 0.2} | config
        self.config = SharedConfig("shared", root, 1 << 30, **settings)
        context = TierContext(
            ((self.arena_fd, ARENA_BYTES),), 1, self.registry,
            asyncio.get_running_loop(), logging.getLogger("tests.shared"),
            self._count,
        )  # fmt: skip
        self.pool = context.data_pool(self.config, probe=Probe(PROBE), failing=factory.FAILING)
        self.tier = SharedTier(
            self.config, data=self.pool, coordinator=self.coordinator, log=context.log, count=self._count
        )
        self.tier.start(self.listener)
        self.coordinator.open()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _count(self, name: str, amount: float) -> None:
        self.counts[name] += int(amount)

    async def _tick(self) -> None:
        while True:
            self.tier.tick()
            await asyncio.sleep(_TICK_SECONDS)

    async def until(self, reached: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        await until(reached, lambda: f"{what}; {self.tier.status()}", seconds)

    def submit_write(self, name: ObjectName) -> list[Written]:
        os.pwrite(self.arena_fd, payload_of(name), 0)
        answers: list[Written] = []
        self.tier.write(name, extents_of(name), Lent(self.registry), None, answers.append)
        return answers

    async def write(self, name: ObjectName) -> Written:
        answers = self.submit_write(name)
        await self.until(lambda: answers, "written")
        return answers[0]

    async def stored(self, name: ObjectName) -> int:
        written = await self.write(name)
        assert written.outcome is IoOutcome.OK, written
        return written.handle

    def submit_read(self, handle: int, name: ObjectName) -> list[Read]:
        answers: list[Read] = []
        self.tier.read(handle, name, extents_of(name), Lent(self.registry), answers.append)
        return answers

    async def read(self, handle: int, name: ObjectName) -> tuple[IoOutcome, bytes]:
        os.pwrite(self.arena_fd, bytes(name.raw_bytes), 0)
        answers = self.submit_read(handle, name)
        await self.until(lambda: answers, "read")
        return answers[0].outcome, os.pread(self.arena_fd, name.raw_bytes, 0)

    def submit_look_up(self, *names: ObjectName) -> list[bool]:
        answers: list[bool] = []
        self.tier.look_up(names, lambda: answers.append(True))
        return answers

    async def look_up(self, *names: ObjectName) -> dict[ObjectName, int]:
        known = len(self.listener.found_objects)
        answers = self.submit_look_up(*names)
        await self.until(lambda: answers, "looked up")
        return {name: handle for handle, name in self.listener.found_objects[known:]}

    async def close(self) -> None:
        self._ticking.cancel()
        await self.tier.close()
        os.close(self.arena_fd)


@asynccontextmanager
async def shared_on(root: Path, **config: Any) -> AsyncIterator[SharedLive]:
    live = SharedLive(root, **config)
    try:
        yield live
    finally:
        await live.close()
