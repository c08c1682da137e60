"""A disk tier with its processes: what the daemon uses, where tests put the parts together themselves."""

from __future__ import annotations

from kvdepot.server.io.jobs import Probe
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.layout import JOURNALS, PROBE, SEGMENTS
from kvdepot.server.tiers.disk.opener_process import OpenerProcess
from kvdepot.server.tiers.disk.tier import DiskTier
from kvdepot.server.tiers.pools import TierContext


def make_disk_tier(config: DiskConfig, context: TierContext) -> DiskTier:
    """Make a disk tier. No process is made before `start`. Raise ConfigError for an impossible capacity."""
    return DiskTier(
        config,
        data=context.data_pool(config, probe=Probe(PROBE, folder=SEGMENTS)),
        journal=context.journal_pool(config, probe=Probe(PROBE, folder=JOURNALS)),
        opener=OpenerProcess(config, context.loop),
        log=context.log,
        count=context.count,
    )
