"""A shared tier with its processes: what the daemon uses, where tests put the parts together themselves."""

from __future__ import annotations

import socket
from typing import Final

from kvdepot.server.io.jobs import Probe
from kvdepot.server.tiers.base import IoOutcome
from kvdepot.server.tiers.pools import TierMeans
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.keeper.settings import KeeperSettings
from kvdepot.server.tiers.shared.keeper_process import KeeperProcess
from kvdepot.server.tiers.shared.layout import PROBE
from kvdepot.server.tiers.shared.tier import SharedTier

FAILING: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.TIMEOUT})
"""Outcomes that speak against the mount. Who may not read one file of several owners may well read the others."""


def make_shared_tier(config: SharedConfig, means: TierMeans) -> SharedTier:
    """No process is made before `start`."""
    return SharedTier(
        config,
        data=means.data_pool(config, probe=Probe(PROBE, write=True), failing=FAILING),
        keeper=KeeperProcess(
            keeper_settings(config, f"{means.arena_id:016x}-{config.name}"),
            means.loop,
            lambda: not means.registry.earlier,
        ),
        log=means.log,
        count=means.count,
    )


def keeper_settings(config: SharedConfig, owner: str) -> KeeperSettings:
    """`owner`: the arena's, for its tables tell of every process that wrote for the tier, and one daemon has it."""
    return KeeperSettings(
        root=config.path,
        capacity_bytes=config.capacity_bytes,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        quarantine_keep_seconds=config.quarantine_keep_seconds,
        quarantine_bytes=config.quarantine_bytes_max,
        created_by=f"kvdepotd on {socket.gethostname()}",
        on_root_filesystem=config.on_root_filesystem,
        owner=owner,
    )
