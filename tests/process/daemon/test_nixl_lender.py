"""The process that lends RAM over NIXL: what it gives, to whom, for how long, and what a reader cannot do (ADR 82)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from kvdepot.server.config.peers import Peers
from kvdepot.server.daemon import peer_source
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_wire import Borrow, Lane, Leased, Lent, Locate, Located, Pull, Refusal, Refused

from tests.rigs.live_peer_source import FILL, OBJECT_BYTES, Live, live, run
from tests.rigs.patience import patient, until
from tests.rigs.peer_fleet import PEER


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def lender_of(one: Live) -> int | None:
    assert one.source._lender is not None
    return one.source._lender.pid if one.source._lender.lender is not None else None


async def lending(one: Live) -> int:
    """Wait until it lends. Return the lender's pid."""
    await until(lambda: lender_of(one) is not None, "it lends over NIXL")
    pid = lender_of(one)
    assert pid is not None
    return pid


async def borrowed(peer: Peer, one: Live, at: int = 0) -> Lent:
    lent = await asyncio.to_thread(peer.ask, Borrow(one.name(at)))
    assert isinstance(lent, Lent)
    return lent


@pytest.mark.requirement("B5")
def test_what_is_borrowed_is_lent_until_it_is_given_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            await lending(one)
            peer = one.peer(Lane.NIXL)
            assert await asyncio.to_thread(peer.lends) and peer.lane == "nixl"
            for times in (1, 2):
                lent = await borrowed(peer, one)
                assert lent.lender.digest == xxhash.xxh3_128_intdigest(lent.lender.metadata)
                assert sum(length for _, length in lent.extents) == OBJECT_BYTES == one.leases.lent_bytes
                assert await asyncio.to_thread(peer.give_back)
                await one.counted("peer_pulls.whole", times)
                await one.none_lent()
            assert one.counters.get("peer_sent_bytes.nixl") == 2 * OBJECT_BYTES
            assert await one.pulled(peer) == bytes([FILL]) * OBJECT_BYTES, "the connection streams, too"
            await one.counted("peer_sent_bytes.stream", OBJECT_BYTES)
            peer.close()

    run(test)


@pytest.mark.requirement("B5")
def test_a_borrower_that_disconnects_or_asks_something_else_loses_its_lease_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            await lending(one)
            peer = one.peer(Lane.NIXL)
            await borrowed(peer, one)
            peer.close()
            await one.counted("peer_pulls.cut")
            await one.none_lent()
            await borrowed(peer, one)
            assert isinstance(await asyncio.to_thread(peer.ask, Locate(())), Located), "by another connection"
            await one.counted("peer_pulls.cut", 2)
            await one.none_lent()
            peer.close()

    run(test)


@pytest.mark.requirement("B5")
def test_a_borrower_that_gives_back_late_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_source, "CONFIRM_SECONDS", 600.0)

    async def test() -> None:
        async with live(tmp_path, patient(3.0), lends=True) as one:
            await lending(one)
            peer = one.peer(Lane.NIXL)
            await borrowed(peer, one)
            await one.counted("peer_pulls.late")
            await one.none_lent()
            assert not await asyncio.to_thread(peer.give_back)
            assert one.counters.get("peer_sent_bytes.nixl") == 0

    run(test)


@pytest.mark.requirement("S3")
def test_nobody_borrows_where_one_side_alone_wants_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer(Lane.NIXL)
            assert not await asyncio.to_thread(peer.lends)
            assert peer.lane == "stream: the peer lends nothing over NIXL"
            with pytest.raises(OSError, match="closed the connection"):
                await asyncio.to_thread(peer.ask, Borrow(one.name(0)))
            assert await one.pulled(peer) == bytes([FILL]) * OBJECT_BYTES
            peer.close()
        async with live(tmp_path, lends=True) as one:
            await lending(one)
            peer = one.peer()
            with pytest.raises(OSError, match="closed the connection"):
                await asyncio.to_thread(peer.ask, Borrow(one.name(0)))
            assert one.counters.get("peer_pulls.whole") == 0 == len(one.leases)
            peer.close()

    run(test)


@pytest.mark.requirement("N3")
def test_a_lender_that_dies_is_replaced_by_one_with_other_metadata(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            first = await lending(one)
            peer = one.peer(Lane.NIXL)
            before = await borrowed(peer, one)
            os.kill(first, signal.SIGKILL)
            await one.counted("peer_lenders.crashed")
            assert await asyncio.to_thread(peer.give_back), "the lease is not the lender's"
            refused_or_lent = await asyncio.to_thread(peer.ask, Borrow(one.name(1)))
            if isinstance(refused_or_lent, Refused):  # while the next one starts
                assert refused_or_lent.reason is Refusal.NOT_LENT
                assert isinstance(await asyncio.to_thread(peer.ask, Pull(one.name(1))), Leased)
            peer.close()
            await until(lambda: lender_of(one) not in (None, first), "another one has started")
            after = await borrowed(peer, one)
            assert after.lender.digest != before.lender.digest
            peer.close()
            await one.none_lent()

    run(test)


@pytest.mark.requirement("S3")
def test_the_lender_is_replaced_when_a_peer_is_none_any_more(tmp_path: Path) -> None:
    """Who has borrowed knows where RAM is, and NIXL takes nothing back."""

    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            first = await lending(one)
            peer = one.peer(Lane.NIXL)
            before = await borrowed(peer, one)
            one.source.configure(Peers({PEER: None, "DNS:another": None}))
            assert lender_of(one) == first, "nobody has lost a right"
            one.source.configure(Peers({"DNS:another": None}))
            assert lender_of(one) is None, "nothing is lent meanwhile"
            await until(lambda: lender_of(one) not in (None, first), "another one has started")
            assert await asyncio.to_thread(peer.give_back)
            assert await asyncio.to_thread(peer.ask, Borrow(one.name(0))) == Refused(Refusal.NOT_ALLOWED)
            peer.close()
            one.source.configure(Peers({PEER: None, "DNS:another": None}))
            after = await borrowed(peer, one)
            assert after.lender.digest != before.lender.digest
            assert one.counters.get("peer_lenders.crashed") == 0
            peer.close()

    run(test)


@pytest.mark.requirement("N2", "S3")
def test_a_reader_that_writes_ends_the_lender_and_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            first = await lending(one)
            peer = one.peer(Lane.NIXL)
            lent = await borrowed(peer, one)
            before = bytes(one.rig.buffer)
            told = {"metadata": lent.lender.metadata.hex(), "base": lent.lender.base, "offset": lent.extents[0][0]}
            read, written = await asyncio.to_thread(_written, json.dumps(told))
            assert read == f"DONE {FILL:02x}{FILL:02x}{FILL:02x}{FILL:02x}", "so it is the lender that it reaches"
            assert written != "DONE"
            await one.counted("peer_lenders.crashed")
            assert bytes(one.rig.buffer) == before
            assert lender_of(one) != first
            peer.close()

    run(test)


def _written(told: str) -> list[str]:
    command = [sys.executable, "-m", "tests.rigs.nixl_writer"]
    return subprocess.run(command, input=f"{told}\n", stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_a_lender_takes_no_time_while_nothing_is_lent_and_serves_when_something_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, lends=True) as one:
            pid = await lending(one)
            peer = one.peer(Lane.NIXL)
            await until(_Waiting(pid), "it waits for the daemon")
            await borrowed(peer, one)
            switches = _switches(pid)
            await until(lambda: _switches(pid) > switches + 100, "it serves")
            assert await asyncio.to_thread(peer.give_back)
            await until(_Waiting(pid), "it waits again")
            peer.close()

    run(test)


class _Waiting:
    """Whether a process has not run since several looks. One that polls runs between any two."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[int] = []

    def __call__(self) -> bool:
        self._seen.append(_switches(self._pid))
        return self._seen[-5:] == self._seen[-1:] * 5


def _switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
