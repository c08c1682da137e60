"""A peer tier with its real workers and its tick, in the loop of a test."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.tiers.conformance_harness import RecordingListener
from kvdepot.server.tiers.peer.config import PeerConfig
from kvdepot.server.tiers.peer.tier import PeerTier
from kvdepot.server.tiers.pools import TierContext

from tests.rigs.io_pool_rig import Registry
from tests.rigs.peer_fleet import PEER
from tests.rigs.shared_live import ARENA_BYTES, SharedLive

NEGATIVE_SECONDS = 0.5
ARENA_ID = 1


class PeerLive(SharedLive):
    """Its methods are those of a shared tier. `folder` has the certificates, `more` is of the tier's configuration."""

    def __init__(self, folder: Path, port: int = 0, **more: Any) -> None:
        self.arena_fd = os.memfd_create("arena")
        os.truncate(self.arena_fd, ARENA_BYTES)
        self.registry = Registry()
        self.listener = RecordingListener()
        self.counts: Counter[str] = Counter()
        files = (f"{folder / 'peer.pem'}", f"{folder / 'peer.key'}", f"{folder / 'ca.pem'}")
        config = PeerConfig(
            "peer", Path("tcp:"), 1 << 30, io_workers=1, failures=3, probe_seconds=0.2,
            peer=PeerSettings("127.0.0.1", port, *files, (PEER,), timeout_seconds=40.0),
            **{"negative_ttl_seconds": NEGATIVE_SECONDS, "deadline_seconds": 20.0, **more},
        )  # fmt: skip
        context = TierContext(
            ((self.arena_fd, ARENA_BYTES),), ARENA_ID, self.registry,
            asyncio.get_running_loop(), logging.getLogger("tests.peer"), self._count,
        )  # fmt: skip
        self.tier = self.peer_tier = PeerTier(config, context)
        self.tier.start(self.listener)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
