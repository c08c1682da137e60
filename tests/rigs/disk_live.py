"""A disk tier with its real processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvdepot.server.storage.base import IoOutcome, Read, Written
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.factory import make_disk_tier
from kvdepot.server.tiers.disk.tier import DiskTier
from kvdepot.server.tiers.pools import TierContext

from tests.rigs.disk_rig import Listener, Loaned, object_name
from tests.rigs.io_pool_rig import Registry
from tests.rigs.patience import until

ARENA_BYTES = 1 << 20
QUARANTINE_BYTES = 1 << 20
PAYLOAD = bytes(range(256)) * 32  # two pages


class Live:
    """A tier with processes of its own, an arena of one object, and its tick."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.arena_fd = os.memfd_create("arena")
        os.truncate(self.arena_fd, ARENA_BYTES)
        self.listener = Listener()
        settings: dict[str, Any] = {"probe_seconds": 0.2, "deadline_seconds": 10.0, "scrub_bytes_per_second": 0}
        settings["quarantine_bytes"] = QUARANTINE_BYTES
        capacity_bytes = config.pop("capacity_bytes", 32 << 20)
        settings |= config
        self.tier: DiskTier = make_disk_tier(
            DiskConfig("disk", root, capacity_bytes, **settings),
            TierContext(
                ((self.arena_fd, ARENA_BYTES),), 1, Registry(),
            asyncio.get_running_loop(), logging.getLogger("tests.disk"),
                count=lambda name, amount: None,
            ),
        )  # fmt: skip
        self.ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.tier.tick()
            await asyncio.sleep(0.02)

    async def until(self, reached: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        await until(reached, lambda: f"{what}; {self.tier.status()}", seconds)

    async def write(self, number: int, payload: bytes = PAYLOAD) -> Written:
        os.pwrite(self.arena_fd, payload, 0)
        answers: list[Written] = []
        name = object_name(number, raw_bytes=len(payload))
        self.tier.write(name, ((0, len(payload)),), Loaned(), None, answers.append)
        await self.until(lambda: answers, "written")
        if answers[0].outcome is IoOutcome.OK:
            self.listener.held[answers[0].handle] = name
        return answers[0]

    async def read(self, handle: int) -> tuple[IoOutcome, bytes]:
        name = self.listener.held[handle]
        os.pwrite(self.arena_fd, bytes(name.raw_bytes), 0)
        answers: list[Read] = []
        self.tier.read(handle, name, ((0, name.raw_bytes),), Loaned(), answers.append)
        await self.until(lambda: answers, "read")
        return answers[0].outcome, os.pread(self.arena_fd, name.raw_bytes, 0)

    async def close(self) -> None:
        self.ticking.cancel()
        await self.tier.close()
        opener: Any = (
            self.tier._openings.link
        )  # holds the directory till it is dead, for a pid that lives on: the test's own
        await self.until(lambda: not opener._stream._hanging(), "its opening process is dead")
        os.close(self.arena_fd)


@asynccontextmanager
async def live(root: Path, *, opened: bool = True, **config: Any) -> AsyncIterator[Live]:
    under_test = Live(root, **config)
    try:
        under_test.tier.start(under_test.listener)
        if opened:
            await under_test.until(lambda: under_test.tier.writable, "opened")
        yield under_test
    finally:
        await under_test.close()
