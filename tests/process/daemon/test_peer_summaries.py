"""A peer asks for a summary: the daemon gathers, the process that sends makes the filter (ADR 85)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from kvdepot.server.config.peers import Peers
from kvdepot.server.daemon import peer_summaries
from kvdepot.server.depot.loads.peer_leases import PeerChunks
from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_summary import Filter
from kvdepot.server.io.peer_wire import Refusal, Refused, Reply, Summarize, Summary, Unchanged

from tests.rigs.engine_rig import ARENA_ID, path
from tests.rigs.live_peer_source import FILL, KEYS, OBJECT_BYTES, Live, live, run
from tests.rigs.patience import until
from tests.rigs.peer_fleet import PEER


async def summary(peer: Peer, version: int = 0) -> Reply:
    return await asyncio.to_thread(peer.ask, Summarize(version))


def has(one: Live, found: Summary) -> list[bool]:
    names = [(one.client.namespace, key) for key in (*KEYS, *path("other", 2))]
    return Filter(found).has(words_of_names(names).tolist())


@pytest.mark.requirement("T3")
def test_a_summary_names_all_that_can_be_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_summaries, "SLICE", 1)

    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            found = await summary(peer)
            assert isinstance(found, Summary)
            assert (found.arena_id, found.chunks) == (ARENA_ID, len(KEYS))
            assert has(one, found) == [True, True, False, False]
            assert await summary(peer, found.version) == Unchanged(ARENA_ID)
            assert await summary(peer, found.version ^ 1) == found
            assert await one.pulled(peer) == bytes([FILL]) * OBJECT_BYTES, "the connection goes on"
            assert one.counters.get("peer_given_summaries.new") == 1, "it is gathered seldom"
            assert one.counters.get("peer_given_summaries.kept") == 2
            peer.close()

    run(test)


def test_what_has_changed_since_is_in_the_next_summary(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path, gather_seconds=0.0) as one:
            peer = one.peer()
            before = await summary(peer)
            assert isinstance(before, Summary)
            assert await summary(peer, before.version) == Unchanged(ARENA_ID), "nothing has"
            one.rig.depot.deletion(one.client.namespace, KEYS[1]).run_once()
            after = await summary(peer, before.version)
            assert isinstance(after, Summary)
            assert has(one, after) == [True, False, False, False]
            peer.close()

    run(test)


@pytest.mark.requirement("S7")
def test_who_is_no_peer_gets_no_summary(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            files = one.authority.issue("stranger", "URI:spiffe://fleet/engine")
            peer = one.peer(files=files)
            assert await summary(peer) == Refused(Refusal.NOT_ALLOWED)
            await one.counted("peer_refused_connections.not_allowed")
            assert one.counters.get("peer_given_summaries.new") == 0

    run(test)


@pytest.mark.requirement("S3", "S7")
@pytest.mark.parametrize("peers", [{}, {PEER: "another tenant"}])
def test_who_is_no_peer_any_more_gets_no_summary_that_was_gathered_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: dict[str, str | None]
) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            chunks = one.leases.chunks

            def gathered(tenant: str | None) -> PeerChunks:
                one.source.configure(Peers(peers))
                return chunks(tenant)

            monkeypatch.setattr(one.leases, "chunks", gathered)
            assert await summary(one.peer()) == Refused(Refusal.NOT_ALLOWED)

    run(test)


def test_the_next_process_that_sends_gets_the_words_anew(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            peer = one.peer()
            found = await summary(peer)
            assert one.source.pid is not None
            os.kill(one.source.pid, signal.SIGKILL)
            await one.counted("peer_servers.crashed")
            await until(lambda: one.source.pid is not None, "another one has started")
            peer.close()
            assert await summary(one.peer()) == found
            assert one.counters.get("peer_given_summaries.new") == 2

    run(test)
