"""A depot with two objects in this process, and the real process that sends them to peers."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.objectfile import payload_sum
from kvdepot.core.planner import GroupSpec
from kvdepot.server.config.config import check
from kvdepot.server.daemon.peer_source import PeerSource
from kvdepot.server.depot.counters import Counters
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_wire import Lane, Leased, PeerSettings, Pull
from kvdepot.server.storage.base import ObjectName

from tests.rigs.certificates import Authority, Files
from tests.rigs.engine_rig import ARENA_ID, CHUNK, Client, Rig, audit, path, spec_of
from tests.rigs.patience import until
from tests.rigs.peer_fleet import PEER
from tests.rigs.tier_rig import store, verify

OBJECT_BYTES = 16 << 20
"""More than the sockets of both sides hold."""
SPEC = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(OBJECT_BYTES // 2,)))
KEYS = path("p", 2)
FILL = 9


class Live:
    """A depot with two objects, and the process that sends them."""

    def __init__(
        self, folder: Path, lease_seconds: float, gather_seconds: float = 600.0, *, lends: bool = False
    ) -> None:
        self.authority = authority = Authority(folder)
        files = authority.issue("peer", PEER)
        tls = {"cert": f"{files.cert}", "key": f"{files.key}", "client_ca": f"{authority.pem}", "allow_peers": [PEER]}
        daemon = {"listen": ["unix:///run/k.sock"], "listen_peers": "tcp://127.0.0.1:0", "lend_nixl": lends}
        config = check("f", {"daemon": daemon, "ram": {"capacity": "1GiB"}, "tls": tls})
        self.rig = Rig(3 * OBJECT_BYTES // 4096)
        self.arena_fd = os.memfd_create("arena")
        os.truncate(self.arena_fd, self.rig.layout.data_bytes)
        self.rig.buffer = memoryview(mmap.mmap(self.arena_fd, self.rig.layout.data_bytes))
        self.client: Client = self.rig.attach(spec=SPEC)
        store(self.client, KEYS, FILL)
        verify(self.rig)
        self.counters = Counters()
        self.leases = self.rig.depot.peer_leases
        self.source = PeerSource(
            config, ((self.arena_fd, self.rig.layout.data_bytes),), self.leases, arena_id=ARENA_ID,
            loop=asyncio.get_running_loop(),
            log=logging.getLogger("tests.peers"), counters=self.counters, lease_seconds=lease_seconds,
            gather_seconds=gather_seconds,
        )  # fmt: skip
        self.settings = PeerSettings(
            "127.0.0.1", 0, f"{files.cert}", f"{files.key}", f"{authority.pem}", (PEER,), timeout_seconds=60.0
        )

    def peer(self, lane: Lane = Lane.STREAM, files: Files | None = None) -> Peer:
        """Return a connection, with another certificate if there are `files` of one."""
        settings = self.settings
        if files is not None:
            settings = replace(settings, cert=f"{files.cert}", key=f"{files.key}")
        return Peer(replace(settings, port=self.source.addresses[0][1], lane=lane))

    def name(self, at: int) -> ObjectName:
        parent = KEYS[at - 1] if at else ROOT_KEY
        return ObjectName(self.client.namespace, KEYS[at], parent, Kind.ATTENTION, (at + 1) * CHUNK, OBJECT_BYTES)

    async def pulled(self, peer: Peer, at: int = 0) -> bytes:
        """Return all bytes of an object."""
        leased = await asyncio.to_thread(peer.ask, Pull(self.name(at)))
        assert isinstance(leased, Leased)
        data = bytearray(leased.raw_bytes)
        await asyncio.to_thread(peer.receive, memoryview(data))
        assert payload_sum([memoryview(data)]) == leased.raw_sum
        return bytes(data)

    async def counted(self, name: str, times: int = 1) -> None:
        await until(lambda: self.counters.get(name) == times, lambda: f"{name}: {self.counters.snapshot()}")

    async def counted_at_least(self, family: str, times: int) -> None:
        """Wait for all counters of a family together."""
        await until(
            lambda: (
                sum(value for name, value in self.counters.snapshot().items() if name.startswith(f"{family}.")) >= times
            ),
            lambda: f"{family}: {self.counters.snapshot()}",
        )

    async def none_lent(self) -> None:
        await until(lambda: not len(self.leases), "all leases have ended")
        assert self.rig.depot.status().tier.lent_bytes == self.leases.lent_bytes == 0
        audit(self.rig.depot)


@asynccontextmanager
async def live(
    folder: Path, lease_seconds: float = 30.0, *, lends: bool = False, gather_seconds: float = 600.0
) -> AsyncIterator[Live]:
    """`lends`: over NIXL, too. `gather_seconds`: between summaries."""
    one = Live(folder, lease_seconds, gather_seconds, lends=lends)
    try:
        await one.source.listen()
        yield one
    finally:
        await one.source.close()
        os.close(one.arena_fd)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())
