"""The process that sends to peers: its leases end by themselves, and it is killed if it does not say so (ADR 78)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from kvdepot.core.calls import ROOT_KEY
from kvdepot.core.errors import ConfigError, NoRoom
from kvdepot.server.config.peers import Peers
from kvdepot.server.daemon import peer_source
from kvdepot.server.depot.loads.peer_reads import Done
from kvdepot.server.depot.sessions.workers import Workers
from kvdepot.server.io.peer_wire import Leased, Locate, Pull, Refusal, Refused
from kvdepot.server.storage.base import ObjectName

from tests.rigs.live_peer_source import FILL, KEYS, OBJECT_BYTES, Live, live, run
from tests.rigs.patience import patient, until
from tests.rigs.peer_fleet import PEER
from tests.rigs.stopping import stop


@pytest.mark.requirement("B5")
def test_a_lease_ends_with_the_last_byte_and_a_connection_serves_several(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            for at in (0, 1, 0):
                assert await one.pulled(peer, at) == bytes([FILL]) * OBJECT_BYTES
            await one.counted("peer_pulls.whole", 3)
            await one.none_lent()
            assert one.counters.get("peer_sent_bytes.stream") == 3 * OBJECT_BYTES
            peer.close()

    run(test)


@pytest.mark.requirement("B5")
def test_a_reader_that_takes_nothing_loses_its_lease_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_source, "CONFIRM_SECONDS", 600.0)  # the process that sends may be slow, and is not killed

    async def test() -> None:
        async with live(tmp_path, patient(5.0)) as one:
            peer, other = one.peer(), one.peer()
            for each in (peer, other):  # connected before the lease begins
                await asyncio.to_thread(each.ask, Locate(()))
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
            stop(first)
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


def test_a_server_that_is_killed_counts_once_and_each_of_its_leases_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_source, "CONFIRM_SECONDS", 0.2)

    async def test() -> None:
        async with live(tmp_path, 5.0) as one:
            one.leases.bytes_max = 2 * OBJECT_BYTES
            peers = one.peer(), one.peer()
            for at, peer in enumerate(peers):
                assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(at))), Leased)
            first = one.source.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            await one.counted("peer_pulls.cut", 2)
            assert one.counters.get("peer_servers.killed") == 1
            assert one.counters.get("peer_servers.crashed") == 0
            (reader,) = one.source.readers()
            assert reader.refused_objects == {"cut": 2}, "both counters say the same"
            for peer in peers:
                peer.close()

    run(test)


def test_a_server_that_cannot_be_written_down_counts_as_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Workers, "started", Mock(side_effect=NoRoom("the table is full")))
            async with live(tmp_path) as one:
                await until(lambda: one.counters.get("peer_servers.killed"), "it is killed")
                assert one.counters.get("peer_servers.crashed") == 0

    run(test)


def test_the_end_of_the_daemon_is_no_kill(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            await one.pulled(one.peer())
        assert one.counters.get("peer_servers.killed") == 0

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


@pytest.mark.requirement("T3")
def test_a_name_of_addresses_that_this_host_does_not_have_is_listened_at_where_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: object, **__: object) -> list[object]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("203.0.113.1", 0)), (*kind, ("127.0.0.1", 0))]

    async def test() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", found)
            one = Live(tmp_path, 30.0)
            await one.source.listen()
        try:
            assert [host for host, _ in one.source.addresses] == ["127.0.0.1"]
            assert await one.pulled(one.peer()) == bytes([FILL]) * OBJECT_BYTES
        finally:
            await one.source.close()
            os.close(one.arena_fd)

    run(test)


@pytest.mark.requirement("T3")
def test_an_address_that_is_taken_is_refused_by_the_name_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            other = Live(tmp_path, 30.0)
            monkeypatch.setattr(other.source, "_address", one.source.addresses[0])
            with pytest.raises(ConfigError, match="listen_peers"):
                await other.source.listen()
            os.close(other.arena_fd)

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


@pytest.mark.requirement("S3", "S4")
@pytest.mark.parametrize(("peers", "why"), [({}, Refusal.NOT_ALLOWED), ({PEER: "another tenant"}, Refusal.GONE)])
def test_who_is_no_peer_any_more_gets_nothing_that_was_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: dict[str, str | None], why: Refusal
) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            reads: list[Done] = []

            def read(_: str | None, __: ObjectName, done: Done) -> bool:
                reads.append(done)
                return True

            monkeypatch.setattr(one.leases, "read", read)
            peer = one.peer()
            asked = asyncio.create_task(asyncio.to_thread(peer.ask, Pull(one.name(0))))
            await until(lambda: bool(reads), "a disk is read for it")
            one.source.configure(Peers(peers))
            reads.pop()(None)
            assert await asked == Refused(why)
            assert one.counters.get("peer_pulls.whole") == 0 == len(one.leases)
            peer.close()

    run(test)
