"""A shared tier with its processes: what the daemon uses, where tests put the parts together themselves."""

from __future__ import annotations

import socket
from typing import Final

from kvdepot.server.io.jobs import Probe
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.coordinator.settings import CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator_process import CoordinatorProcess
from kvdepot.server.tiers.shared.tier import SharedTier

FAILING: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.TIMEOUT})
"""Outcomes that speak against the mount. Who may not read one file of several owners may well read the others."""


def make_shared_tier(config: SharedConfig, context: TierContext) -> SharedTier:
    """Make a shared tier. No process is made before `start`."""
    return SharedTier(
        config,
        data=context.data_pool(config, probe=Probe(PROBE), failing=FAILING),
        coordinator=CoordinatorProcess(
            coordinator_settings(config, f"{context.arena_id:016x}-{config.name}"),
            context.loop,
            lambda: not context.registry.earlier,
        ),
        log=context.log,
        count=context.count,
    )


def coordinator_settings(config: SharedConfig, owner: str) -> CoordinatorSettings:
    """Return the settings of the tier's coordinator.

    `owner` is the arena's: its tables list every process that wrote for the tier, and one daemon has the arena.
    """
    return CoordinatorSettings(
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
