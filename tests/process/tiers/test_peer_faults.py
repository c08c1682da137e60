"""Peers that lie, hang or stop, as the daemon meets them that loads from them: misses, never wrong bytes (ADR 78)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.lying_source import OF_LOOKUPS, OF_PULLS, LyingSource
from tests.rigs.child_processes import children
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import Fleet, located, payloads, port_of, served_again, stored, tier_of
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of, payload_of, status_of

DAMAGING = {"first bit", "bit in the middle", "last bit", "sum", "exchanged", "longer", "shorter"}
"""Lies about the bytes. The others are failures of the connection."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


# Sources that lie


@pytest.mark.requirement("N2")
@pytest.mark.parametrize("lie", OF_PULLS)
def test_what_a_source_sends_instead_of_an_object_is_a_miss_and_never_served(fleet: Fleet, lie: str) -> None:
    keys, own, good = keys_of("lie", 3), keys_of("own", 3), keys_of("good", 3)
    with LyingSource(fleet.files, fleet.authority.pem, payload_of) as source:
        source.keys.update(keys, good)
        reader = fleet.reader(source.port, deadline="2s")
        with RawEngine(reader.socket) as engine:
            engine.store(own)
            located(engine, keys)
            source.pulls = OF_PULLS[lie]
            assert engine.load(keys) is None
            assert source.lied > 0
            assert engine.load(own) == payloads(own)
            damaged = {"longer": "length", "shorter": "length"}.get(lie, "corrupt")
            if lie in DAMAGING:
                assert engine.counter(f"tier_damaged_objects.peer-0/{damaged}") >= 1
            assert engine.counter("io_workers.peer-0/crashed") == 0
            source.pulls = None
            wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
            assert served_again(engine, good) == payloads(good)
            assert served_again(engine, keys) == payloads(keys)
        assert status_of(reader.socket).tiers[0].lent_bytes == 0


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("lie", OF_LOOKUPS)
def test_what_a_source_says_instead_of_lengths_is_a_miss_and_kills_no_worker(fleet: Fleet, lie: str) -> None:
    keys, own = keys_of("lie", 3), keys_of("own", 3)
    with LyingSource(fleet.files, fleet.authority.pem, payload_of) as source:
        source.keys.update(keys)
        reader = fleet.reader(source.port, deadline="2s")
        with RawEngine(reader.socket) as engine:
            engine.store(own)
            source.lookups = OF_LOOKUPS[lie]
            wait_until(lambda: not engine.locate(keys) and source.lied, "it was asked")
            assert engine.load(own) == payloads(own)
            assert engine.load(keys) is None
            assert engine.counter("io_workers.peer-0/crashed") == 0
            source.lookups = None
            wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
            assert served_again(engine, keys) == payloads(keys)


# Sources that are stopped


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("stopped", ["all within a transfer", "all before it", "the daemon alone"])
def test_a_stopped_source_costs_its_request_alone_and_ends_its_leases_when_it_continues(
    fleet: Fleet, stopped: str
) -> None:
    keys, own, spec = keys_of("stops", 2), keys_of("own", 3), dense_spec("large", 16 << 20)  # more than sockets hold
    expected = [payload_of(key, 16 << 20) for key in keys]
    source = fleet.source()
    with RawEngine(source.socket, spec=spec) as owner, FaultyProxy(port_of(source)) as proxy:
        lease_id, _, extents = owner.reserve(keys)
        owner.write(keys, extents, lambda key: payload_of(key, 16 << 20))
        owner.commit(lease_id, len(keys))
        wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
        reader = fleet.reader(proxy.port, deadline="5s")
        processes = [source.pid] if stopped == "the daemon alone" else [source.pid, *children(source.pid)]
        with (
            RawEngine(reader.socket, spec=spec) as engine, RawEngine(reader.socket, "other") as other,
            ThreadPoolExecutor(1) as pool,
        ):  # fmt: skip
            other.store(own)
            located(engine, keys)
            if stopped == "all within a transfer":
                proxy.held_at = 100_000
                loading = pool.submit(engine.load, keys)
                wait_until(lambda: proxy.held, "a transfer is under way")
            try:
                for pid in processes:
                    os.kill(pid, signal.SIGSTOP)
                proxy.clear()
                if stopped != "all within a transfer":
                    loading = pool.submit(engine.load, keys)
                assert other.load(own) == payloads(own)
                assert not loading.done(), "others are served meanwhile"
                assert loading.result() is None
                wait_until(lambda: status_of(reader.socket).tiers[0].lent_bytes == 0, "the extents were given back")
            finally:
                for pid in processes:
                    os.kill(pid, signal.SIGCONT)
            wait_until(lambda: status_of(source.socket).tiers[0].lent_bytes == 0, "all leases have ended")
            wait_until(lambda: tier_of(reader).breaker == "closed", "the peer is back")
            assert served_again(engine, keys) == expected
        assert status_of(source.socket).counters.get("peer_servers.crashed", 0.0) == 0


@pytest.mark.requirement("T3")
def test_a_peer_may_have_a_name(fleet: Fleet) -> None:
    keys = keys_of("named", 3)
    source = fleet.source()
    stored(source, keys)
    reader = fleet.reader(port_of(source), host="localhost")
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
