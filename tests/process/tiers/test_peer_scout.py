"""A list longer than a tier has peers: the scout finds who has what is asked for (ADR 85)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.calls import LocateCall
from kvdepot.core.objectfile import ObjectName
from kvdepot.proto.methods import decode_reply
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import payload_of
from kvdepot.server.tiers.peer import group, scout
from kvdepot.server.tiers.peer.seats import Seats

from tests.fakes.lying_source import FAILED_SUMMARIES, OF_LOOKUPS, REFUSED_SUMMARIES, TAKEN_SUMMARIES, LyingSource
from tests.rigs.patience import patient, until, wait_until
from tests.rigs.peer_fleet import Fleet, chosen_by, located, payloads, served_again, stopped, stored
from tests.rigs.peer_live import ARENA_ID, PeerLive
from tests.rigs.peer_sources import NAMES, Sources, found, readable, with_sources
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, status_of
from tests.rigs.seeds import one_in

QUICK: dict[str, Any] = {"count": 6, "peers_max": 2, "summary_seconds": 0.2, "exchange_seconds": 0.1}


def seats_of(live: PeerLive) -> Seats:
    assert live.peer_tier._seats is not None
    return live.peer_tier._seats


def members(live: PeerLive) -> set[int]:
    return {port for _, port in seats_of(live)._choice.members}


def others(sources: Sources, live: PeerLive) -> list[LyingSource]:
    """Return the sources that are no peers, the one that would be next by hash first."""
    listed = [port for _, port in seats_of(live)._choice.listed]
    return sorted(sources.at(set(listed) - members(live)), key=lambda source: listed.index(source.port))


async def summarized(live: PeerLive, sources: Collection[LyingSource]) -> None:
    """Wait until each of these has been asked for a summary from now on, and has answered."""
    before = {source: source.summarized for source in sources}
    await live.until(lambda: all(one.summarized > before[one] + 1 for one in sources), "all are asked for summaries")


async def wanted(live: PeerLive, names: Collection[ObjectName], reached: Callable[[], object], what: str) -> None:
    """Look these up again and again, as requests do, until something is reached."""

    async def look_up() -> None:
        while True:
            await live.look_up(*names)
            await asyncio.sleep(0.05)

    looking = asyncio.create_task(look_up())
    try:
        await live.until(reached, what)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


@pytest.mark.requirement("T3")
def test_what_was_absent_is_found_after_an_exchange_when_a_summary_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        before, last = members(live), others(sources, live)[-1]
        assert len(before) == 2
        assert not await live.look_up(*NAMES[:3])
        last.keys.update(name.key for name in NAMES[:3])
        await summarized(live, [last])
        handles = await found(live, *NAMES[:3])
        for name in NAMES[:3]:
            assert await live.read(handles[name], name) == (IoOutcome.OK, payload_of(name))
        assert last.port in members(live) and len(members(live) & before) == 1
        assert f"127.0.0.1:{last.port} (by summary: 3 names)" in caplog.text
        assert f"127.0.0.1:{(members(live) & before).pop()} (by hash)" in caplog.text
        assert live.counts["peer_summaries.new"] >= 6 and not live.counts["peer_summaries.refused"]
        await summarized(live, sources.each)
        assert live.counts["peer_summaries.unchanged"] >= 6

    with_sources(tmp_path, test, **QUICK, negative_ttl_seconds=3600.0)


def test_a_peer_is_not_exchanged_while_nobody_else_has_more(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        for source in sources.each:
            source.keys.update(name.key for name in NAMES[:4])
        await readable(live)
        before = members(live)
        await summarized(live, sources.each)
        await found(live, *NAMES[:4])
        for _ in range(3):
            await live.look_up(*NAMES[4:8])
            await summarized(live, sources.each)
        assert members(live) == before

    with_sources(tmp_path, test, **QUICK)


@pytest.mark.parametrize("count", [1, 2])
def test_a_list_that_is_not_longer_needs_no_scout(tmp_path: Path, count: int) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        sources.each[0].keys.add(NAMES[0].key)
        await found(live, NAMES[0])
        assert seats_of(live).scout.pid is None
        assert not any(source.summarized for source in sources.each)

    with_sources(tmp_path, test, **{**QUICK, "count": count})


def test_the_scout_ends_when_the_list_has_become_short(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        scout = seats_of(live).scout
        assert scout.pid is not None
        sources.list(*sources.each[:2])
        await live.until(lambda: scout.pid is None, "nobody is asked for summaries")
        assert members(live) == {source.port for source in sources.each[:2]}
        sources.list(*sources.each)
        await live.until(lambda: scout.pid is not None, "there is a choice again")

    with_sources(tmp_path, test, **QUICK)


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("lie", one_in(3, sorted(REFUSED_SUMMARIES | FAILED_SUMMARIES | TAKEN_SUMMARIES), 4))
def test_a_hostile_answer_costs_at_most_an_exchange(tmp_path: Path, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        for source in sources.each:
            source.summaries = FAILED_SUMMARIES["not allowed"]  # who has sent a summary may say "unchanged"
        await readable(live)
        liar, honest = others(sources, live)[:2]
        liar.keys.update(name.key for name in NAMES[:4])
        honest.keys.update(name.key for name in NAMES[:6])
        for source in sources.each:
            source.summaries = (REFUSED_SUMMARIES | FAILED_SUMMARIES | TAKEN_SUMMARIES)[lie] if source is liar else None
        outcome = "refused" if lie in REFUSED_SUMMARIES else "failed" if lie in FAILED_SUMMARIES else "new"
        asked, answered = live.counts[f"peer_summaries.{outcome}"], liar.summarized
        await live.until(lambda: liar.summarized > answered, "it has lied")
        await live.until(lambda: live.counts[f"peer_summaries.{outcome}"] > asked, "and is heard")
        await wanted(live, NAMES[:6], lambda: honest.port in members(live), "another one is still chosen")
        assert liar.port not in members(live), "it is chosen by hash alone"
        if outcome == "refused":
            assert f"summary of 127.0.0.1:{liar.port} is refused: " in caplog.text
        assert seats_of(live).scout.pid is not None

    with_sources(tmp_path, test, **QUICK)


@pytest.mark.requirement("N3")
def test_sources_that_hang_delay_no_other(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        *hanging, last = others(sources, live)
        for source in hanging:
            source.summaries = FAILED_SUMMARIES["stalled summary"]
        await asyncio.sleep(0)
        last.keys.update(name.key for name in NAMES[:3])
        await summarized(live, [last])
        await found(live, *NAMES[:3])
        assert last.port in members(live)

    with_sources(tmp_path, test, **QUICK)


def test_this_daemon_has_no_seat_in_its_own_tier(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        own = sources.at(members(live))[0]
        own.arena_id = ARENA_ID
        await live.until(lambda: own.port not in members(live), "it is recognised by its summary")
        assert len(members(live)) == 2
        asked = own.summarized
        await summarized(live, [one for one in sources.each if one is not own])
        assert own.summarized <= asked + 1, "it is not asked again"

    async def listed(sources: Sources, live: PeerLive) -> None:
        await live.until(lambda: len(members(live)) == 2, "the list is read")
        await test(sources, live)

    with_sources(tmp_path, listed, **QUICK)


def test_a_scout_that_dies_is_replaced_and_knows_all_again(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        last, scout = others(sources, live)[-1], seats_of(live).scout
        first = scout.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await live.until(lambda: scout.pid not in (None, first), "another one has started")
        last.keys.update(name.key for name in NAMES[:3])
        await summarized(live, [last])
        await found(live, *NAMES[:3])

    with_sources(tmp_path, test, **QUICK)


@pytest.mark.requirement("S2")
def test_after_a_reload_the_scout_believes_other_names(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        scout = seats_of(live).scout
        first = scout.pid
        live.peer_tier.use_names(("URI:spiffe://fleet/other",))
        await until(lambda: scout.pid not in (None, first), "it is started again")
        failed = live.counts["peer_summaries.failed"]
        await live.until(lambda: live.counts["peer_summaries.failed"] >= failed + 6, "nobody has such a name")

    with_sources(tmp_path, test, **QUICK)


@pytest.fixture
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lookups wait for the scout and for guests as long as a busy machine needs."""
    monkeypatch.setattr(scout, "FIND_SECONDS", 30.0)
    monkeypatch.setattr(group, "GUEST_SECONDS", 30.0)


async def known(sources: Sources, live: PeerLive) -> None:
    """Wait until the scout has summaries of what all sources have now."""
    await readable(live)
    await summarized(live, sources.each)


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("spare", ["has started", "was killed"])
def test_the_first_lookup_finds_what_a_source_has_that_is_no_peer(
    tmp_path: Path, spare: str, patient_lookups: None
) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        first, second = others(sources, live)[-2:]
        first.keys.update(name.key for name in NAMES[:3])
        second.keys.update(name.key for name in NAMES[3:6])
        await known(sources, live)
        for source, names in ((first, NAMES[:3]), (second, NAMES[3:6])):
            (one,) = spares(live)
            if spare == "was killed":
                os.kill(one, signal.SIGKILL)
            handles = await live.look_up(*names)
            assert set(handles) == set(names)
            assert source.port in members(live)
            for name in names:
                assert await live.read(handles[name], name) == (IoOutcome.OK, payload_of(name))
            if spare == "has started":
                assert one in pids(live, source.port)
            await live.until(lambda: spares(live), "another one can join")
        assert len(members(live)) <= 2

    with_sources(tmp_path, test, count=6, peers_max=1, summary_seconds=0.2)


def pids(live: PeerLive, port: int) -> tuple[int, ...]:
    """Return the workers of the peer with this port."""
    peers = live.peer_tier._workers
    assert isinstance(peers, group.PeerGroup)
    (member,) = (one for place, one in peers._members.items() if place[1] == port)
    return member.workers._pool.pids


def spares(live: PeerLive) -> tuple[int, ...]:
    """Return the workers that have no peer yet."""
    peers = live.peer_tier._workers
    assert isinstance(peers, group.PeerGroup)
    return peers._spare._pool.pids if peers._spare is not None else ()


@pytest.mark.requirement("N3")
def test_a_source_that_hangs_delays_one_lookup_of_what_only_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scout, "FIND_SECONDS", 30.0)
    monkeypatch.setattr(group, "GUEST_SECONDS", 0.2)

    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        hanging = others(sources, live)[-1]
        hanging.keys.update(name.key for name in NAMES[:8])
        hanging.lookups = OF_LOOKUPS["stalled lookup"]
        await known(sources, live)
        before = members(live)
        assert not await live.look_up(*NAMES[:4])
        await live.until(lambda: hanging.lied == 1, "it is asked")
        await live.until(lambda: hanging.port not in members(live), "it leaves at the deadline")
        assert members(live) == before and not await live.look_up(*NAMES[4:8])
        assert hanging.lied == 1, "it is not asked again"

    with_sources(tmp_path, test, **QUICK, deadline_seconds=patient(2.0))


@pytest.mark.requirement("N3")
def test_a_source_whose_summary_is_a_lie_gets_no_seat_and_serves_nothing_that_it_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, patient_lookups: None
) -> None:
    caplog.set_level("INFO")

    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        liar = others(sources, live)[0]
        true_keys = liar.keys

        def all_wanted(source: LyingSource, question: Any) -> Any:
            source.keys = {name.key for name in NAMES[:4]}
            pieces = list(LyingSource._summarize(source, question))
            source.keys = true_keys
            return iter(pieces)

        liar.summaries = all_wanted
        await known(sources, live)
        before = members(live)
        assert not await live.look_up(*NAMES[:4])
        assert f"127.0.0.1:{liar.port} (by lookup: 4 names)" in caplog.text
        for _ in range(3):
            await summarized(live, sources.each)
            assert not await live.look_up(*NAMES[:4])
        assert members(live) == before and caplog.text.count(f"{liar.port} (by") == 1, "it is believed once"

    with_sources(tmp_path, test, **QUICK)


def chosen_in(reader: Any, prompt: str) -> tuple[int, list[bytes], list[bytes] | None]:
    """Look a prompt up once, and load it. Return the tokens that the lookup found, the keys and what was loaded."""
    keys = keys_of(prompt, 3)
    with RawEngine(reader.socket) as engine:
        call = engine.locate_call(keys, prompt, wait_seconds=20.0)
        found = decode_reply(LocateCall, engine.stub.Locate(call, timeout=patient(60.0))).boundary_tokens
        return found, keys, engine.load(keys, prompt)


@pytest.mark.requirement("T3")
def test_the_first_lookup_of_a_conversation_that_moved_finds_it_in_another_daemon(fleet: Fleet, tmp_path: Path) -> None:
    ports = [fleet.port() for _ in range(3)]
    for port in ports:
        stored(fleet.source(port=port), keys_of(f"of {port}", 3))
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier="io_workers = 1\npeers_max = 1\n", deadline="20s",
        under=("tests.fakes.peer_waits",),
    )  # fmt: skip
    wait_until(
        lambda: status_of(reader.socket).counters.get("peer_summaries.peer-0/new", 0.0) >= 3, "all have summaries"
    )
    (member,) = chosen_by(reader)
    for moved in (port for port in ports if port != member):
        found, keys, loaded = chosen_in(reader, f"of {moved}")
        assert found == 3 * CHUNK_TOKENS and loaded == payloads(keys)
        assert chosen_by(reader)[moved] in ("by lookup", "by summary")


@pytest.mark.requirement("B3")
def test_a_request_may_name_a_daemon_that_is_no_peer_and_whose_summary_lacks_it(fleet: Fleet, tmp_path: Path) -> None:
    ports = [fleet.port() for _ in range(3)]
    sources = {port: fleet.source(port=port) for port in ports}
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier="io_workers = 1\npeers_max = 1\n", deadline="20s",
        more='[policy]\nnegative_ttl = "1h"\n',
    )  # fmt: skip
    wait_until(
        lambda: status_of(reader.socket).counters.get("peer_summaries.peer-0/new", 0.0) >= 3, "all have summaries"
    )
    prefill = next(port for port in ports if port not in chosen_by(reader))
    arena_id = status_of(sources[prefill].socket).arena_id
    with RawEngine(reader.socket) as engine:
        early = engine.locate_at(keys_of("p", 3), arena_id)
        assert (early.boundary_tokens, early.source_tier) == (0, "peer-0"), "the engine waits for it"
        assert chosen_by(reader)[prefill] == "by name"
        stored(sources[prefill], keys_of("p", 3))
        named = engine.located_at(keys_of("p", 3), arena_id)
        assert (named.boundary_tokens, named.source_tier) == (3 * CHUNK_TOKENS, "peer-0")
        assert engine.load(keys_of("p", 3)) == payloads(keys_of("p", 3))
        assert engine.counter("named_sources.unknown") == 0


@pytest.mark.requirement("T3", "N3")
def test_a_daemon_loads_from_whichever_daemons_of_a_long_list_have_it(fleet: Fleet, tmp_path: Path) -> None:
    ports = [fleet.port() for _ in range(6)]
    sources = {port: fleet.source(port=port) for port in ports}
    for port, source in sources.items():
        stored(source, keys_of(f"of {port}", 3))
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier="io_workers = 1\npeers_max = 2\n", deadline="3s",
    )  # fmt: skip
    others = [port for port in ports if port not in chosen_by(reader)]
    assert len(others) == 4
    moved, hung, ended = others[:3]
    with RawEngine(reader.socket) as engine:
        located(engine, keys_of(f"of {moved}", 3))
        assert engine.load(keys_of(f"of {moved}", 3)) == payloads(keys_of(f"of {moved}", 3))
        assert chosen_by(reader)[moved] != "by hash"
        with stopped(sources[hung]):
            located(engine, keys_of(f"of {ended}", 3))
            assert engine.load(keys_of(f"of {ended}", 3)) == payloads(keys_of(f"of {ended}", 3))
        assert chosen_by(reader)[ended] != "by hash"
        sources[hung].kill()
        engine.locate(keys_of(f"of {hung}", 3))
        sources[hung].start()
        located(engine, keys_of(f"of {hung}", 3))
        assert served_again(engine, keys_of(f"of {hung}", 3)) == payloads(keys_of(f"of {hung}", 3))
    counters = status_of(reader.socket).counters
    assert counters["peer_summaries.peer-0/new"] >= 6
    del sources[hung]  # it may not have been asked since its start
    answered = [status_of(source.socket).counters for source in sources.values()]
    assert all(sum(one.get(f"peer_given_summaries.{how}", 0.0) for how in ("new", "kept")) for one in answered)
