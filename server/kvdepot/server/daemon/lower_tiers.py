"""The tiers below RAM of a configuration, created once the registry of worker processes exists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvdepot.core.object_keys import NO_KEYS
from kvdepot.core.report import TierStatus
from kvdepot.server.arena.arena_file import ArenaFile
from kvdepot.server.config.config import Config
from kvdepot.server.config.schema import OBJECT_KIND, PEER_KIND, SHARED_KIND, TierTable
from kvdepot.server.config.tier_settings import (
    depot_tier_config,
    disk_config,
    object_config,
    peer_config,
    shared_config,
)
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.types import TierConfig
from kvdepot.server.io.breaker import BreakerState
from kvdepot.server.storage.base import Tier, WorkerRegistry
from kvdepot.server.tiers.disk.factory import make_disk_tier
from kvdepot.server.tiers.health import State
from kvdepot.server.tiers.object.factory import make_object_tier
from kvdepot.server.tiers.peer.tier import PeerTier
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.factory import make_shared_tier
from kvdepot.server.tiers.shared.tier import SharedTier

_TROUBLED: Final = (State.DEGRADED, State.READ_ONLY, State.OFFLINE)


class LowerTiers:
    """`make` is called once. What their workers count goes into `counters`, under each tier's name."""

    def __init__(
        self,
        config: Config,
        *,
        arena: ArenaFile,
        counters: Counters,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._arena = arena
        self._counters = counters
        self._loop = loop
        self._log = log
        self._made: list[Tier] = []

    def make(self, registry: WorkerRegistry) -> list[tuple[Tier, TierConfig]]:
        tables = self._config.tables.tier
        self._made = [self._tier(table, registry) for table in tables]
        return list(zip(self._made, map(depot_tier_config, tables), strict=True))

    def configure(self, config: Config) -> None:
        """Use the keys and the names of peers of another configuration."""
        tenants = {table.name: table.tenant or None for table in config.tables.tier}
        for tier in self._made:
            if isinstance(tier, PeerTier):
                tier.use_names(config.peers.names_of(tenants[tier.name]))
            elif isinstance(tier, SharedTier):
                tier.use_keys(config.keys.get(tier.name, NO_KEYS))

    @property
    def trouble(self) -> str:
        """Return what is wrong with the tiers, for people; empty if nothing is."""
        statuses = [tier.status() for tier in self._made]
        return "; ".join(f"tier {one.name}: {one.state}: {one.reason}" for one in statuses if _in_trouble(one))

    def _tier(self, table: TierTable, registry: WorkerRegistry) -> Tier:
        tables = self._config.tables
        context = TierContext(
            data=self._arena.parts,
            arena_id=self._arena.superblock.arena_id,
            registry=registry,
            loop=self._loop,
            log=self._log,
            count=self._count(table.name),
        )
        keys = self._config.keys.get(table.name, NO_KEYS)
        if table.kind == PEER_KIND:
            return PeerTier(peer_config(tables, table, self._config.peers), context)
        if table.kind == OBJECT_KIND:
            return make_object_tier(object_config(tables, table, keys), context)
        if table.kind == SHARED_KIND:
            return make_shared_tier(shared_config(tables, table, keys), context)
        return make_disk_tier(disk_config(tables, table), context)

    def _count(self, tier: str) -> Callable[[str, float], None]:
        def count(name: str, amount: float) -> None:
            family, _, label = name.partition(".")
            self._counters.add(f"{family}.{tier}/{label}", amount)

        return count


def _in_trouble(status: TierStatus) -> bool:
    return status.state in _TROUBLED or status.breaker != BreakerState.CLOSED
