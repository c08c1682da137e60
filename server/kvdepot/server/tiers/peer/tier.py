"""A peer tier: a shared tier whose files are the objects in the RAM of another daemon (ADR 78). It is only read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvdepot.server.io.jobs import Probe
from kvdepot.server.io.pool import IoPool
from kvdepot.server.storage.base import IoOutcome, ObjectName, TierTraits
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.peer.config import PeerConfig
from kvdepot.server.tiers.peer.source import SourceWorkers
from kvdepot.server.tiers.pools import TierContext
from kvdepot.server.tiers.shared.prober import Prober
from kvdepot.server.tiers.shared.tier import SharedTier

_FAILING: Final = frozenset(
    {IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE, IoOutcome.CORRUPT, IoOutcome.LENGTH}
)
"""Outcomes that speak against the peer: also bytes that are not those of its own lease."""


class PeerTier(SharedTier):
    """Lookups, handles, breaker and reads are a shared tier's. Nothing is written, touched or quarantined."""

    def __init__(self, config: PeerConfig, context: TierContext) -> None:
        """Build the tier. No process is made before `start`."""
        self._pool: IoPool = context.data_pool(config, probe=Probe(PROBE), failing=_FAILING, peer=config.peer.pack())
        self._peer = config.peer
        self._workers = SourceWorkers(self._pool, place=str(config.path), log=context.log, count=context.count)
        prober = Prober(
            self._workers, node=f"{context.arena_id:016x}-{config.name}", loop=context.loop,
            retry_seconds=config.probe_seconds,
        )  # fmt: skip
        super().__init__(config, data=self._workers, coordinator=prober, log=context.log, count=context.count)
        self.traits = TierTraits(shared=True, read_only=True)

    @property
    def source_id(self) -> int:
        return self._workers.source_id

    @property
    def writable(self) -> bool:
        return False

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """Do not look for it again for a while, and never take these bytes: the source may have had them from here."""
        self._reading.doubt(name, raw_sums)
        self._directory.absent.add(name, damaged=True)

    def use_names(self, names: tuple[str, ...]) -> None:
        """Accept certificates with these names from now on. Workers of before finish their jobs."""
        if names != self._peer.names:
            self._peer = replace(self._peer, names=names)
            self._directory.absent.clear()
            self._pool.renew("", self._peer.pack())
