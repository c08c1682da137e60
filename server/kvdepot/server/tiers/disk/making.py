"""A disk tier with its processes: what the daemon uses, where tests put the parts together themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.pool import IoPool
from kvdepot.server.io.worker_process import WorkerSettings
from kvdepot.server.tiers.base import WorkerRegistry
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.opener_process import OpenerProcess
from kvdepot.server.tiers.disk.tier import DiskTier


def make_disk_tier(
    config: DiskConfig, *, arena_fd: int, arena_bytes: int, registry: WorkerRegistry,
    loop: asyncio.AbstractEventLoop, log: logging.Logger,
    count: Callable[[str, float], None], changed: Callable[[], None],
) -> DiskTier:  # fmt: skip
    """No process is made before `start`. Raises ConfigError for an impossible capacity.

    `count` and `changed`: see `IoPool`; both pools use them.
    """

    def pool(settings: WorkerSettings, workers: int, registry: WorkerRegistry | None) -> IoPool:
        breaker = Breaker(failures_max=config.failures, probe_every_seconds=config.probe_seconds, clock=loop.time)
        return IoPool(
            settings=settings, workers=workers, deadline_seconds=config.deadline_seconds, breaker=breaker,
            registry=registry, loop=loop, log=log, count=count, changed=changed,
        )  # fmt: skip

    return DiskTier(
        config,
        data=pool(WorkerSettings(config.path, arena_fd, arena_bytes), config.io_workers, registry),
        journal=pool(WorkerSettings(config.path), 1, None),
        opener=OpenerProcess(config, loop),
        log=log,
    )
