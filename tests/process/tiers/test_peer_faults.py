"""Peers that lie, hang or stop, as the daemon meets them that loads from them: misses, never wrong bytes (ADR 78)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.lying_source import OF_LOOKUPS, OF_PULLS, LyingSource
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.peer_fleet import Fleet, located, payloads, port_of, served_again, stored, tier_of
from tests.rigs.raw_client import RawEngine, dense_spec, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

OF_BYTES = {"first bit", "bit in the middle", "last bit", "sum", "exchanged"}
OF_LENGTH = {"longer", "shorter"}
"""The other lies are failures of the connection."""


# Sources that lie


class Liar:
    """A source that lies, a daemon that reads from it, and an engine of that daemon."""

    def __init__(self, source: LyingSource, reader: DaemonProcess, engine: RawEngine) -> None:
        self.source = source
        self.reader = reader
        self.engine = engine
        self.own = keys_of("own", 3)
        engine.store(self.own)

    def crashed(self) -> float:
        return self.engine.counter("io_workers.peer-0/crashed")

    def tells_the_truth(self) -> None:
        self.source.pulls = self.source.lookups = None
        self.source.lied = 0
        wait_until(lambda: tier_of(self.reader).breaker == "closed", "the breaker is closed")


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    """For all lies: each test has its own objects, and leaves the tier enabled."""
    fleet = Fleet(tmp_path_factory.mktemp("liar"))
    try:
        with LyingSource(fleet.files, fleet.authority.pem, payload_of) as source:
            reader = fleet.reader(source.port, deadline="2s")
            with RawEngine(reader.socket) as engine:
                yield Liar(source, reader, engine)
    finally:
        fleet.close()


@pytest.mark.requirement("N2")
@pytest.mark.parametrize("lie", OF_PULLS)
def test_what_a_source_sends_instead_of_an_object_is_a_miss_and_never_served(liar: Liar, lie: str) -> None:
    source, engine, prompt = liar.source, liar.engine, f"pull{list(OF_PULLS).index(lie)}"
    keys, good = keys_of(prompt, 3), keys_of(f"{prompt}g", 3)
    source.keys.update(keys, good)
    liar.tells_the_truth()
    located(engine, keys)
    damaged = f"tier_damaged_objects.peer-0/{'length' if lie in OF_LENGTH else 'corrupt'}"
    before = engine.counter(damaged), liar.crashed()
    is_damage = lie in OF_BYTES | OF_LENGTH

    def is_refused() -> bool:
        """Ask again: on a busy machine a read may be too late, whatever it reads."""
        assert engine.load(keys) is None
        engine.locate(keys)
        return source.lied > 0 and (engine.counter(damaged) > before[0] or not is_damage)

    source.pulls = OF_PULLS[lie]
    wait_until(is_refused, "the lie is told and noticed")
    assert engine.load(liar.own) == payloads(liar.own)
    assert (engine.counter(damaged) > before[0]) == is_damage
    liar.tells_the_truth()
    assert served_again(engine, good) == payloads(good)
    assert served_again(engine, keys) == payloads(keys)
    assert liar.crashed() == before[1]
    wait_until(lambda: status_of(liar.reader.socket).tiers[0].lent_bytes == 0, "all extents were given back")


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("lie", OF_LOOKUPS)
def test_what_a_source_says_instead_of_lengths_is_a_miss_and_kills_no_worker(liar: Liar, lie: str) -> None:
    source, engine, keys = liar.source, liar.engine, keys_of(f"look{list(OF_LOOKUPS).index(lie)}", 3)
    source.keys.update(keys)
    liar.tells_the_truth()
    crashed = liar.crashed()
    source.lookups = OF_LOOKUPS[lie]
    wait_until(lambda: not engine.locate(keys) and source.lied, "it was asked")
    assert engine.load(liar.own) == payloads(liar.own)
    assert engine.load(keys) is None
    liar.tells_the_truth()
    assert served_again(engine, keys) == payloads(keys)
    assert liar.crashed() == crashed


# Sources that are stopped


@pytest.mark.requirement("N3")
@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param("all within a transfer", marks=pytest.mark.long(seconds=15)),
        pytest.param("all before it", marks=pytest.mark.long(seconds=15)),
        "the daemon alone",
    ],
)
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
        reader = fleet.reader(proxy.port, deadline=f"{patient(5.0):.0f}s")
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
                    stop(pid)
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
@pytest.mark.long(seconds=10)
def test_a_peer_may_have_a_name(fleet: Fleet) -> None:
    keys = keys_of("named", 3)
    source = fleet.source()
    stored(source, keys)
    reader = fleet.reader(port_of(source), host="localhost")
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
