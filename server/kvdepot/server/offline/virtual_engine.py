"""The daemon's own depot over an arena without payload: it decides as the daemon does, and moves no byte."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvdepot.core.arena import ArenaLayout, tables_in_memory
from kvdepot.core.eviction import DEFAULT_POLICY
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import DepotConfig, Membership, ProcessIdentity, TierConfig
from kvdepot.server.offline.virtual_disk import VirtualDisk


class VirtualEngine:
    """RAM of `capacity_bytes` for objects, with one attached process. Of the arena only the tables take memory."""

    def __init__(
        self, capacity_bytes: int, rows: int, *, clock: Callable[[], float], eviction: str = DEFAULT_POLICY,
        disks: Sequence[tuple[VirtualDisk, TierConfig]] = (),
    ) -> None:  # fmt: skip
        """Create a depot with a virtual engine. `rows` is the maximum number of objects.

        Without disks RAM is filled to its end. With disks it has the watermarks of a daemon: they take what lies above.
        """
        overhead_bytes = ArenaLayout.plan(1 << 40, rows).overhead_bytes
        layout = ArenaLayout.plan(overhead_bytes + capacity_bytes, rows)
        config = DepotConfig(credit_bytes=layout.size_bytes, eviction=eviction, prefetch_share=0.0)
        if not disks:
            config = replace(config, high_watermark=1.0)
        self.depot = Depot(
            tables_in_memory(layout), arena_id=1, run=1, clock=clock, random_bytes=secrets.token_bytes, config=config,
            tiers=lambda _: disks,
        )  # fmt: skip
        self.depot.ready(layout.data_bytes)
        if disks:
            self.depot.start_tiers()
        process = ProcessIdentity(os.getpid(), 1, b"\1" * 16)
        self.session = self.depot.attach(process, Membership("replay", scheduler=True, rank=0, world_size=1)).session
        self._leases = 0

    def register(self, spec: NamespaceSpec) -> bytes:
        """Register the namespace and return its id."""
        return self.depot.register_namespace(self.session, spec)[0]

    def new_lease_id(self) -> int:
        self._leases += 1
        return self._leases

    def trim(self) -> None:
        """Evict down to the watermarks, and write what disks are to have of it."""
        while self.depot.trim():
            pass
