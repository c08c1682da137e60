"""A tier below RAM as the daemon makes it, with all its processes and its tick, in the loop of a test."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kvdepot.core.objectfile import ObjectName
from kvdepot.server.storage.base import IoOutcome, Read, Tier, Written
from kvdepot.server.tiers.conformance_harness import RecordingListener, extents_of, payload_of
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.factory import make_disk_tier
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.factory import make_shared_tier
from kvdepot.server.tiers.shared.tier import SharedTier

from tests.rigs.io_pool_rig import Lent, Registry
from tests.rigs.patience import until

ARENA_BYTES: Final = 4 << 20
PATIENCE_SECONDS: Final = 60.0
_TICK_SECONDS = 0.02


class TierLive:
    """See `tier_on`."""

    def __init__(self, kind: str, root: Path, **config: Any) -> None:
        self.arena_fd = os.memfd_create("arena")
        os.truncate(self.arena_fd, ARENA_BYTES)
        self.root = root
        self.registry = Registry()
        self.listener = RecordingListener()
        self.tier: Tier = self._made(kind, root, config)
        self.tier.start(self.listener)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _made(self, kind: str, root: Path, config: dict[str, Any]) -> Tier:
        context = TierContext(
            ((self.arena_fd, ARENA_BYTES),), 1, self.registry,
            asyncio.get_running_loop(), logging.getLogger("tests.tier"),
            lambda name, amount: None,
        )  # fmt: skip
        settings = {"io_workers": 1, "deadline_seconds": 20.0, "failures": 3, "probe_seconds": 0.2} | config
        if kind == "shared":
            return make_shared_tier(SharedConfig(kind, root, 1 << 28, on_root_filesystem=True, **settings), context)
        return make_disk_tier(DiskConfig(kind, root, 32 << 20, scrub_bytes_per_second=0, **settings), context)

    async def _tick(self) -> None:
        while True:
            self.tier.tick()
            await asyncio.sleep(_TICK_SECONDS)

    async def until(self, reached: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        await until(reached, lambda: f"{what}; {self.tier.status()}", seconds, pause_seconds=_TICK_SECONDS)

    async def write(self, name: ObjectName) -> Written:
        os.pwrite(self.arena_fd, payload_of(name), 0)
        answers: list[Written] = []
        self.tier.write(name, extents_of(name), Lent(self.registry), None, answers.append)
        await self.until(lambda: answers, "the write is answered")
        return answers[0]

    async def read(self, handle: int, name: ObjectName) -> IoOutcome:
        """What is answered as OK has the right bytes."""
        os.pwrite(self.arena_fd, bytes(name.raw_bytes), 0)
        answers: list[Read] = []
        self.tier.read(handle, name, extents_of(name), Lent(self.registry), answers.append)
        await self.until(lambda: answers, "the read is answered")
        assert answers[0].outcome is not IoOutcome.OK or os.pread(self.arena_fd, name.raw_bytes, 0) == payload_of(name)
        return answers[0].outcome

    async def look_up(self, *names: ObjectName) -> None:
        """Have the listener told of those that a shared directory has; a disk tier says it by itself."""
        if isinstance(self.tier, SharedTier):
            answers: list[bool] = []
            self.tier.look_up(names, lambda: answers.append(True))
            await self.until(lambda: answers, "looked up")

    async def close(self) -> None:
        self._ticking.cancel()
        await self.tier.close()
        os.close(self.arena_fd)


@asynccontextmanager
async def tier_on(kind: str, root: Path, *, opens: bool = True, **config: Any) -> AsyncIterator[TierLive]:
    """`kind`: "disk" or "shared". `opens`: wait until it takes writes."""
    live = TierLive(kind, root, **config)
    try:
        if opens:
            await live.until(lambda: live.tier.writable, "it is open")
        yield live
    finally:
        await live.close()
