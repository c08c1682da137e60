"""The process that sends to peers: its leases end by themselves, and it is killed if it does not say so (ADR 78)."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.objectfile import payload_sum
from kvdepot.core.planner import GroupSpec
from kvdepot.server.config.config import check
from kvdepot.server.daemon import peer_source
from kvdepot.server.daemon.peer_source import PeerSource
from kvdepot.server.depot.counters import Counters
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_wire import Leased, PeerSettings, Pull, Refusal, Refused
from kvdepot.server.storage.base import ObjectName

from tests.rigs.certificates import Authority
from tests.rigs.engine_rig import CHUNK, Client, Rig, audit, path, spec_of
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

    def __init__(self, folder: Path, lease_seconds: float) -> None:
        authority = Authority(folder)
        files = authority.issue("peer", PEER)
        tls = {"cert": f"{files.cert}", "key": f"{files.key}", "client_ca": f"{authority.pem}", "allow_peers": [PEER]}
        daemon = {"listen": ["unix:///run/k.sock"], "listen_peers": "tcp://127.0.0.1:0"}
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
            config, ((self.arena_fd, self.rig.layout.data_bytes),), self.leases, loop=asyncio.get_running_loop(),
            log=logging.getLogger("tests.peers"), counters=self.counters, lease_seconds=lease_seconds,
        )  # fmt: skip
        self.settings = PeerSettings(
            "127.0.0.1", 0, f"{files.cert}", f"{files.key}", f"{authority.pem}", (PEER,), timeout_seconds=60.0
        )

    def peer(self) -> Peer:
        port = self.source.addresses[0][1]
        settings = PeerSettings.unpack(self.settings.pack().replace('"port": 0', f'"port": {port}'))
        return Peer(settings)

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

    async def none_lent(self) -> None:
        await until(lambda: not len(self.leases), "all leases have ended")
        assert self.rig.depot.status().tier.lent_bytes == self.leases.lent_bytes == 0
        audit(self.rig.depot)


@asynccontextmanager
async def live(folder: Path, lease_seconds: float = 30.0) -> AsyncIterator[Live]:
    one = Live(folder, lease_seconds)
    await one.source.listen()
    try:
        yield one
    finally:
        await one.source.close()
        os.close(one.arena_fd)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


@pytest.mark.requirement("B5")
def test_a_lease_ends_with_the_last_byte_and_a_connection_serves_several(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            for at in (0, 1, 0):
                assert await one.pulled(peer, at) == bytes([FILL]) * OBJECT_BYTES
            await one.counted("peer_pulls.whole", 3)
            await one.none_lent()
            assert one.counters.get("peer_sent_bytes") == 3 * OBJECT_BYTES
            peer.close()

    run(test)


@pytest.mark.requirement("B5")
def test_a_reader_that_takes_nothing_loses_its_lease_at_the_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, 5.0) as one:
            peer, other = one.peer(), one.peer()
            assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(0))), Leased)
            assert isinstance(await asyncio.to_thread(other.ask, Pull(one.name(1))), Refused), "one alone has the part"
            await one.counted("peer_pulls.late")
            await one.none_lent()
            assert one.counters.get("peer_servers.killed") == 0
            with pytest.raises(OSError, match="closed the connection within an object"):
                await asyncio.to_thread(peer.receive, memoryview(bytearray(OBJECT_BYTES)))
            other.close()

    run(test)


@pytest.mark.requirement("B5")
def test_a_reader_that_disconnects_loses_its_lease_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(0))), Leased)
            peer.close()
            await one.counted("peer_pulls.cut")
            await one.none_lent()

    run(test)


@pytest.mark.requirement("I6")
def test_a_server_that_does_not_confirm_is_killed_and_what_it_has_is_free_when_it_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_source, "CONFIRM_SECONDS", 0.2)

    async def test() -> None:
        async with live(tmp_path, 5.0) as one:
            peer = one.peer()
            assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(0))), Leased)
            assert one.source.pid is not None
            first = one.source.pid
            os.kill(first, signal.SIGSTOP)
            killed_with: list[int] = []
            ended = one.leases.end_all

            def end_all() -> None:
                killed_with.append(len(one.leases))
                ended()

            monkeypatch.setattr(one.leases, "end_all", end_all)
            await one.counted("peer_servers.killed")
            await until(lambda: killed_with, "it is reaped")
            assert killed_with == [1], "until then the extents were lent"
            await one.none_lent()
            await until(lambda: one.source.pid not in (None, first), "another one has started")
            again = one.peer()
            assert isinstance(await asyncio.to_thread(again.ask, Pull(one.name(0))), Leased)
            again.close()
            peer.close()

    run(test)


@pytest.mark.requirement("T3")
def test_a_server_that_dies_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(0))), Leased)
            assert one.source.pid is not None
            os.kill(one.source.pid, signal.SIGKILL)
            await one.counted("peer_servers.crashed")
            await one.none_lent()
            await until(lambda: one.source.pid is not None, "another one has started")
            assert await one.pulled(one.peer()) == bytes([FILL]) * OBJECT_BYTES

    run(test)


def test_what_is_gone_or_another_object_is_said_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer, name = one.peer(), one.name(1)
            other = ObjectName(name.namespace, name.key, ROOT_KEY, name.kind, name.boundary_tokens, name.raw_bytes)
            assert await asyncio.to_thread(peer.ask, Pull(other)) == Refused(Refusal.FOREIGN)
            one.rig.depot.deletion(one.client.namespace, KEYS[1]).run_once()
            assert await asyncio.to_thread(peer.ask, Pull(name)) == Refused(Refusal.GONE)
            assert await one.pulled(peer) == bytes([FILL]) * OBJECT_BYTES, "the connection goes on"
            peer.close()

    run(test)
