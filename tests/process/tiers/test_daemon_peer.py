"""Real daemons that load from each other's RAM over TLS: sources that die, hang, evict, restart and lie (ADR 78)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.core.control import EvictCall
from kvdepot.core.health import health
from kvdepot.core.verdict import Health, Verdict
from kvdepot.proto.methods import encode
from kvdepot.proto.v1 import control_pb2_grpc

from tests.fakes.faulty_proxy import FaultyProxy
from tests.rigs.certificates import DAY, Authority, Files
from tests.rigs.child_processes import children, kill
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import (
    PEER,
    Fleet,
    counter,
    filled,
    located,
    payloads,
    port_of,
    served_again,
    stored,
    tier_of,
)
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, dense_spec, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

SERVER = b"kvdepot.server.io.peer_server"
WORKER = b"kvdepot.server.io.worker"
SUMS = b"kvdepot.server.io.checksum_worker"


def no_problems(daemon: DaemonProcess) -> bool:
    """Return whether a status like this one is well after an hour."""
    later = replace(status_of(daemon.socket), uptime_seconds=3600.0)
    return health(later, lambda _family, _seconds: {}) == Health(Verdict.OK)


@pytest.mark.requirement("T3")
def test_what_one_daemon_stored_another_one_loads_from_its_ram(fleet: Fleet) -> None:
    keys = keys_of("peer", 12)
    source = fleet.source()
    stored(source, keys)
    reader = fleet.reader(port_of(source))
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.tier_of(keys) == "peer-0"
        assert engine.load(keys) == payloads(keys)
        assert engine.tier_of(keys) == "ram"
        engine.store(keys_of("own", 4))
    assert tier_of(reader).kind == "peer" and tier_of(reader).queued_objects == 0
    assert no_problems(reader), "a peer has no janitor that could be missing"
    assert counter(reader, "io_bytes.peer-0/read") == 12 * OBJECT_BYTES
    wait_until(lambda: counter(source, "peer_pulls.whole") == 12, "all leases have ended")
    assert counter(source, "peer_sent_bytes.stream") == 12 * OBJECT_BYTES
    assert status_of(source.socket).tiers[0].lent_bytes == 0


@pytest.mark.requirement("T3")
@pytest.mark.long(seconds=8)
def test_two_daemons_load_from_each_other(fleet: Fleet) -> None:
    source = fleet.source()
    both = fleet.reader(port_of(source), tls=f'[daemon]\nlisten_peers = "tcp://127.0.0.1:0"\n{fleet.tls()}')
    third = fleet.reader(port_of(source), port_of(both))
    stored(source, keys_of("one", 3))
    stored(both, keys_of("two", 3))
    with RawEngine(third.socket) as engine:
        for prompt in ("one", "two"):
            located(engine, keys_of(prompt, 3))
            assert engine.load(keys_of(prompt, 3)) == payloads(keys_of(prompt, 3))
    with RawEngine(both.socket) as engine:
        located(engine, keys_of("one", 3))
        assert engine.load(keys_of("one", 3)) == payloads(keys_of("one", 3))


# Sources that end, hang or forget


@pytest.mark.requirement("N3")
def test_a_killed_source_costs_its_own_requests_and_comes_back_by_probes(fleet: Fleet) -> None:
    keys, own, port = keys_of("gone", 6), keys_of("own", 6), fleet.port()
    source = fleet.source(port=port)
    stored(source, keys)
    reader = fleet.reader(port, deadline="2s")
    with RawEngine(reader.socket) as engine:
        engine.store(own)
        located(engine, keys)
        source.kill()
        assert engine.load(keys) is None
        wait_until(lambda: _disabled(engine, reader, keys), "the breaker is open")
        assert engine.load(own) == payloads(own)
        source.start()  # its RAM was adopted: the bytes are verified, and are the same
        wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
        assert served_again(engine, keys) == payloads(keys)


def _disabled(engine: RawEngine, reader: DaemonProcess, keys: list[bytes]) -> bool:
    engine.locate([*keys, *keys_of("ask", 1)])
    return tier_of(reader).breaker != "closed"


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("listed", [False, True], ids=["one peer", "a list"])
def test_what_was_absent_is_asked_for_again_when_its_source_is_back(fleet: Fleet, tmp_path: Path, listed: bool) -> None:
    keys, port = keys_of("back", 6), fleet.port()
    source = fleet.source(port=port)
    file = tmp_path / "peers"
    file.write_text(f"127.0.0.1:{port}\n")
    reader = fleet.reader(
        port, url=f"file://{file}" if listed else "", deadline="2s", ram="1GiB",
        more='[policy]\nnegative_ttl = "1h"\n',
    )  # fmt: skip
    with RawEngine(reader.socket) as engine:
        wait_until(lambda: not engine.locate(keys) and counter(reader, "shared_probes.peer-0/absent"), "it is absent")
        stored(source, keys)
        assert engine.locate(keys) == 0, "it is remembered as absent"
        source.kill()
        wait_until(lambda: _fails(engine, reader), "nobody answers")
        source.start()  # its RAM was adopted: the bytes are verified, and are the same
        assert served_again(engine, keys) == payloads(keys)


@pytest.mark.requirement("N3")
def test_what_has_no_checksum_yet_is_not_remembered_as_absent(fleet: Fleet) -> None:
    """As after an unnoticed restart of the source: all is there, and nothing is verified."""
    keys = keys_of("pending", 6)
    source = fleet.source()
    wait_until(lambda: children(source.pid, SUMS), "it computes checksums")
    (sums,) = children(source.pid, SUMS)
    stop(sums)
    with RawEngine(source.socket) as engine:
        engine.store(keys)
    reader = fleet.reader(port_of(source), deadline="2s", more='[policy]\nnegative_ttl = "1h"\n')
    with RawEngine(reader.socket) as engine:
        wait_until(lambda: not engine.locate(keys) and counter(source, "peer_located_objects.pending"), "it is asked")
        os.kill(sums, signal.SIGCONT)
        assert served_again(engine, keys) == payloads(keys)
    assert not counter(reader, "shared_probes.peer-0/absent")


def _fails(engine: RawEngine, reader: DaemonProcess) -> bool:
    """Ask for what nobody has asked for."""
    engine.locate(keys_of(os.urandom(4).hex(), 1))
    return counter(reader, "shared_probes.peer-0/failed") > 0


@pytest.mark.requirement("N3")
def test_what_the_source_evicts_after_the_lookup_is_a_miss(fleet: Fleet) -> None:
    keys = keys_of("evicted", 6)
    source = fleet.source()
    stored(source, keys)
    reader = fleet.reader(port_of(source))
    with RawEngine(reader.socket) as engine, RawEngine(source.socket) as owner:
        located(engine, keys)
        control = control_pb2_grpc.ControlStub(owner.admin_channel)  # type: ignore[no-untyped-call]
        control.Evict(encode(EvictCall(owner.namespace, keys[3])))
        assert engine.load(keys) is None
        wait_until(lambda: engine.locate(keys) == 3 * 256, "only what is there is offered")
        assert engine.load(keys[:3]) == payloads(keys[:3])
        assert engine.counter("tier_reads.peer-0/gone") >= 1
        assert tier_of(reader).breaker == "closed"


@pytest.mark.requirement("N2")
def test_a_source_without_checksums_offers_nothing_wrong_after_a_crash(fleet: Fleet) -> None:
    keys, port = keys_of("crash", 6), fleet.port()
    source = fleet.source(port=port)
    with RawEngine(source.socket) as engine:
        engine.store(keys)
    reader = fleet.reader(port)
    source.kill()
    source.start()
    wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
    with RawEngine(reader.socket) as engine:
        for count in range(1, len(keys) + 1):
            engine.locate(keys[:count])
            loaded = engine.load(keys[:count])
            assert loaded is None or loaded == payloads(keys[:count])


@pytest.mark.requirement("N2")
def test_bytes_that_changed_at_the_source_are_refused_and_count_against_it(fleet: Fleet) -> None:
    keys, good = keys_of("flipped", 4), keys_of("good", 4)
    source = fleet.source()
    reader_port = port_of(source)
    with RawEngine(source.socket) as owner:
        lease_id, _, extents = owner.reserve(keys)
        owner.write(keys, extents)
        owner.commit(lease_id, len(keys))
        owner.store(good)
        wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
        owner.write(keys, extents, lambda key: payload_of(key)[:-1] + b"!")  # as memory that was damaged
        reader = fleet.reader(reader_port)
        with RawEngine(reader.socket) as engine:
            located(engine, keys)
            assert engine.load(keys) is None
            assert engine.counter("tier_damaged_objects.peer-0/corrupt") >= 1
            wait_until(lambda: _asked_again(engine, keys), "three in a row disable the peer")
            wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
            assert served_again(engine, good) == payloads(good)


def _asked_again(engine: RawEngine, keys: list[bytes]) -> bool:
    """Ask for what is damaged until the breaker opens. It is never served."""
    engine.locate(keys)
    assert engine.load(keys) is None
    return engine.counter("io_breaker_openings.peer-0/") > 0


# Nothing is written to extents that were given back


@pytest.mark.requirement("N1")
@pytest.mark.parametrize("fault", ["stopped", "held", "worker killed"])
def test_no_byte_arrives_in_extents_that_were_given_back(fleet: Fleet, fault: str) -> None:
    keys = keys_of("late", 8)
    source = fleet.source()
    stored(source, keys)
    with FaultyProxy(port_of(source)) as proxy:
        reader = fleet.reader(proxy.port, deadline="1s" if fault != "worker killed" else "60s")
        (server,) = children(source.pid, SERVER)
        with RawEngine(reader.socket) as engine:
            located(engine, keys)
            proxy.held_at = 100_000  # of each connection's answers from now on: within an object
            if fault == "worker killed":
                workers = children(reader.pid, WORKER)
                lease = _acquire_later(engine, keys)
                wait_until(lambda: proxy.held, "a transfer is under way")
                kill(workers)
                proxy.clear()
                assert lease() == payloads(keys), "another worker has done the jobs again"
                return
            if fault == "stopped":
                stop(server)
            assert engine.load(keys) is None
            wait_until(lambda: status_of(reader.socket).tiers[0].lent_bytes == 0, "the extents were given back")
            prompts = filled(engine, reader, "own")
            proxy.clear()
            os.kill(server, signal.SIGCONT)
            wait_until(lambda: tier_of(reader).breaker == "closed", "the peer is back")
            for prompt in prompts:
                loaded = engine.load(prompt)
                assert loaded == payloads(prompt), "bytes of an object changed after it was stored"


def _acquire_later(engine: RawEngine, keys: list[bytes]) -> Callable[[], list[bytes] | None]:
    """Load in a thread. Return what waits for the bytes."""
    pool = ThreadPoolExecutor(1)
    loading = pool.submit(engine.load, keys)
    return lambda: loading.result()


@pytest.mark.requirement("B5")
def test_a_reader_that_dies_within_a_transfer_ends_its_leases(fleet: Fleet) -> None:
    keys, spec = keys_of("dies", 2), dense_spec(object_bytes=16 << 20)  # more than sockets hold
    source = fleet.source()
    with RawEngine(source.socket, spec=spec) as owner, FaultyProxy(port_of(source)) as proxy:
        lease_id, _, extents = owner.reserve(keys)
        owner.write(keys, extents, lambda key: payload_of(key, 16 << 20))
        owner.commit(lease_id, len(keys))
        wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
        reader = fleet.reader(proxy.port)
        with RawEngine(reader.socket, spec=spec) as engine:
            located(engine, keys)
            proxy.held_at = 100_000
            _acquire_later(engine, keys)
            wait_until(
                lambda: status_of(source.socket).tiers[0].lent_bytes > 0 and proxy.held, "a transfer is under way"
            )
            reader.kill()
            proxy.drops = True
            proxy.held_at = None
            proxy.wake()
        wait_until(lambda: status_of(source.socket).tiers[0].lent_bytes == 0, "all leases have ended")
        assert counter(source, "peer_pulls.cut") > 0
        assert counter(source, "peer_servers.killed") == 0


# Who may ask, and who may answer


def _is_offline(reader: DaemonProcess, why: str) -> bool:
    """A busy machine may say first that the answer is late."""
    tier = tier_of(reader)
    return tier.state == "offline" and why in tier.reason


ROGUES: dict[str, tuple[Callable[[Fleet, Authority], Files], str]] = {
    "another CA": (lambda _, other: other.issue("a", PEER), "handshake"),
    "expired": (lambda fleet, _: fleet.authority.issue("b", PEER, life=(-3 * DAY, -DAY)), "handshake"),
    "for servers only": (lambda fleet, _: fleet.authority.issue("c", PEER, client=False), "handshake"),
    "another name": (lambda fleet, _: fleet.authority.issue("d", "URI:spiffe://fleet/other"), "not_allowed"),
    "a longer name": (lambda fleet, _: fleet.authority.issue("e", f"{PEER}/x"), "not_allowed"),
    "no name": (lambda fleet, _: fleet.authority.issue("kvdepot"), "not_allowed"),
}


@pytest.mark.requirement("S3")
@pytest.mark.parametrize("rogue", ROGUES)
def test_a_rogue_reader_is_refused(fleet: Fleet, rogue: str, tmp_path: Path) -> None:
    make, reason = ROGUES[rogue]
    files = make(fleet, Authority.in_folder(tmp_path / "other", "other"))
    source = fleet.source()
    reader = fleet.reader(port_of(source), ready=False, tls=fleet.tls(files))
    wait_until(lambda: counter(source, f"peer_refused_connections.{reason}") > 0, "it is refused, and counted")
    why = "the peer does not allow this daemon" if reason == "not_allowed" else ""
    wait_until(lambda: _is_offline(reader, why), "the reader's tier says so")


@pytest.mark.requirement("S3")
@pytest.mark.parametrize("rogue", ["another CA", "another name", "a longer name", "no name"])
def test_a_rogue_source_is_not_asked(fleet: Fleet, rogue: str, tmp_path: Path) -> None:
    make, _ = ROGUES[rogue]
    files = make(fleet, Authority.in_folder(tmp_path / "other", "other"))
    keys = keys_of("rogue", 3)
    source = fleet.source(tls=fleet.tls(files))
    stored(source, keys)
    reader = fleet.reader(port_of(source), ready=False)
    why = "" if rogue == "another CA" else "no name of its certificate is that of a peer"
    wait_until(lambda: _is_offline(reader, why), "the reader's tier says so")
    with RawEngine(reader.socket) as engine:
        assert engine.locate(keys) == 0
    assert counter(source, "peer_located_objects.found") == 0


@pytest.mark.requirement("S3")
def test_a_reload_takes_a_peer_s_right_away_and_gives_it_back(fleet: Fleet) -> None:
    keys, more = keys_of("first", 3), keys_of("second", 3)
    source = fleet.source()
    stored(source, keys)
    stored(source, more)
    reader = fleet.reader(port_of(source))
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
        _allow(source, PEER, "URI:spiffe://fleet/nobody")
        wait_until(lambda: counter(source, "peer_refused_connections.not_allowed") > 0 or _none(engine), "refused")
        assert engine.load(more) is None
        _allow(source, "URI:spiffe://fleet/nobody", PEER)
        wait_until(lambda: tier_of(reader).breaker == "closed", "the breaker is closed")
        assert served_again(engine, more) == payloads(more)


def _none(engine: RawEngine) -> bool:
    engine.locate(keys_of(os.urandom(4).hex(), 1))
    return False


def _allow(source: DaemonProcess, former: str, name: str) -> None:
    before = source.log.count("configuration changed")
    path = source.directory / "kvdepot.toml"
    path.write_text(path.read_text().replace(f'"{former}"', f'"{name}"'))
    os.kill(source.pid, signal.SIGHUP)
    wait_until(lambda: source.log.count("configuration changed") > before, lambda: source.log[-500:])


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("bound_to", ["a", "b"])
def test_a_peer_sees_its_tenant_s_objects_alone(fleet: Fleet, bound_to: str) -> None:
    keys = keys_of("tenant", 3)
    names = {"a": "[]", "b": "[]", bound_to: f'["{PEER}"]'}
    tenants = "".join(
        f'[[tenant]]\nname = "{tenant}"\nusers = ["{user}"]\npeers = {names[tenant]}\n'
        for tenant, user in (("a", os.getuid()), ("b", 54321))
    )
    source = fleet.source(more=tenants)
    spec = replace(dense_spec(), tenant="a")
    with RawEngine(source.socket, spec=spec) as owner:
        owner.store(keys)
        wait_until(lambda: status_of(source.socket).tiers[0].pending_checksums == 0, "all have checksums")
        reader = fleet.reader(port_of(source))
        with RawEngine(reader.socket, spec=spec) as engine:
            if bound_to == "a":
                located(engine, keys)
                assert engine.load(keys) == payloads(keys)
            else:
                wait_until(lambda: not engine.locate(keys) and counter(source, "peer_located_objects.absent"), "absent")
                assert engine.load(keys) is None
