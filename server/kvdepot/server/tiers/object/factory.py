"""An object tier: a shared tier whose files are the objects of a bucket (ADR 75)."""

from __future__ import annotations

import time
from typing import Final

from kvdepot.server.io.jobs import Probe
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.object.config import ObjectConfig
from kvdepot.server.tiers.object.meter import Meter, MeteredWorkers
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.prober import Prober
from kvdepot.server.tiers.shared.tier import SharedTier

_FAILING: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE})
"""Outcomes that speak against the bucket. All of its objects are read with the same credentials."""


def make_object_tier(config: ObjectConfig, context: TierContext) -> SharedTier:
    """Make an object tier. No process is made before `start`."""
    meter = Meter(
        requests=config.request_budget, read_bytes=config.read_budget_bytes, wall_clock=time.time, count=context.count
    )
    pool = context.data_pool(config, probe=Probe(PROBE), failing=_FAILING, bucket=config.bucket.pack())
    data = MeteredWorkers(pool, meter, context.loop)
    prober = Prober(
        data, node=f"{context.arena_id:016x}-{config.name}", loop=context.loop, retry_seconds=config.probe_seconds
    )
    return SharedTier(config, data=data, coordinator=prober, log=context.log, count=context.count, limits=meter)
