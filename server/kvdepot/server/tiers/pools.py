"""What tiers below RAM are made of by the daemon, and the pools of I/O workers that they have alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.core.data_mapping import DataParts
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Probe
from kvdepot.server.io.pool import FAILING, IoPool
from kvdepot.server.io.worker_process import WorkerSettings
from kvdepot.server.storage.base import IoOutcome, WorkerRegistry
from kvdepot.server.tiers.config import LowerTierConfig


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier gets from its daemon. `count`: where its counters go, see `IoPool`."""

    data: DataParts
    arena_id: int
    registry: WorkerRegistry
    loop: asyncio.AbstractEventLoop
    log: logging.Logger
    count: Callable[[str, float], None]

    def data_pool(
        self, config: LowerTierConfig, *, probe: Probe, failing: frozenset[IoOutcome] = FAILING, bucket: str = "",
        peer: str = "", changed: Callable[[], None] = lambda: None,  # the engine asks at every tick
    ) -> IoPool:  # fmt: skip
        """Return a pool of workers that have the arena.

        `bucket`, `peer`: packed `BucketSettings` or `PeerSettings`, instead of a directory. `changed`: see `IoPool`.
        """
        settings = WorkerSettings(config.path, self.data, bucket=bucket, peer=peer)
        return self._pool(config, settings, config.io_workers, self.registry, probe, failing, changed)

    def journal_pool(self, config: LowerTierConfig, *, probe: Probe) -> IoPool:
        """Return a pool of one worker, which is never given a loan."""
        return self._pool(config, WorkerSettings(config.path), 1, None, probe, FAILING)

    def _pool(
        self, config: LowerTierConfig, settings: WorkerSettings, workers: int, registry: WorkerRegistry | None,
        probe: Probe, failing: frozenset[IoOutcome], changed: Callable[[], None] = lambda: None,
    ) -> IoPool:  # fmt: skip
        breaker = Breaker(failures_max=config.failures, probe_every_seconds=config.probe_seconds, clock=self.loop.time)
        return IoPool(
            settings=settings, workers=workers, deadline_seconds=config.deadline_seconds, breaker=breaker,
            registry=registry, loop=self.loop, log=self.log, count=self.count,
            changed=changed, failing=failing, probe=probe,
        )  # fmt: skip
