"""Daemons in network namespaces of their own that load from each other, and a network that fails."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_128_digest

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.network import MTU, Network, why_no_network
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.peer_fleet import LENT, located, payloads, served_again, stored
from tests.rigs.peer_network import PeerNetwork
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, keys_of, status_of
from tests.rigs.wire import flipped

FIRST, SECOND, READER = range(3)
DEADLINE_SECONDS = 2.0
SLOW = 1.5e6
"""Bytes a second: an object takes 175 ms, and all of them less than the deadline."""


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else UCX would find out that all nodes are on one host, and use no network."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_no_network():
        pytest.skip(reason)
    with Network(3) as network:
        yield network


@pytest.fixture
def fleet(tmp_path: Path, network: Network) -> Iterator[PeerNetwork]:
    fleet = PeerNetwork(tmp_path, network)
    try:
        yield fleet
    finally:
        fleet.close()


def lent_bytes(daemon: DaemonProcess) -> int:
    return status_of(daemon.socket).tiers[0].lent_bytes


LANES = pytest.mark.parametrize("nixl", [False, True], ids=["stream", "nixl"])


def _source(fleet: PeerNetwork, node: int, *, nixl: bool) -> DaemonProcess:
    source = fleet.source_at(node, lends=nixl)
    if nixl:
        source.wait_for_log(LENT)
    return source


@LANES
@pytest.mark.requirement("T3", "N1")
def test_a_reader_in_another_namespace_loads_from_two_sources(fleet: PeerNetwork, nixl: bool) -> None:
    prompts = {node: keys_of(f"of {node}", 6) for node in (FIRST, SECOND)}
    for node, keys in prompts.items():
        stored(_source(fleet, node, nixl=nixl), keys)
    reader = fleet.reader_at(READER, FIRST, SECOND, deadline="20s", borrows=nixl)
    before = fleet.network.counts()["carried"]
    with RawEngine(reader.socket) as engine:
        for node, keys in prompts.items():
            located(engine, keys)
            assert engine.tier_of(keys) == f"peer-{node}"
            assert engine.load(keys) == payloads(keys)
    assert (fleet.network.counts()["carried"] - before) * MTU >= 12 * OBJECT_BYTES, "over the wire"


@pytest.mark.requirement("T3")
def test_objects_of_a_source_that_nixl_does_not_reach_come_over_the_stream(
    fleet: PeerNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    keys = keys_of("stream", 6)
    stored(_source(fleet, FIRST, nixl=True), keys)
    reader = fleet.reader_at(READER, FIRST, deadline="20s", borrows=True)
    with RawEngine(reader.socket) as engine:
        located(engine, keys)
        assert engine.load(keys) == payloads(keys)
    assert "objects come over stream: NIXL does not reach the peer" in reader.log
    assert status_of(reader.socket).counters.get("io_workers.peer-0/crashed", 0.0) == 0


@LANES
@pytest.mark.requirement("N1", "N3")
def test_a_partition_within_a_transfer_ends_at_the_deadline_and_returns_all_extents(
    fleet: PeerNetwork, nixl: bool
) -> None:
    cut, after, own = keys_of("cut", 8), keys_of("after", 4), keys_of("own", 4)
    source = _source(fleet, FIRST, nixl=nixl)
    stored(source, cut)
    stored(source, after)
    reader = fleet.reader_at(READER, FIRST, deadline=f"{DEADLINE_SECONDS}s", borrows=nixl)
    with RawEngine(reader.socket) as engine, ThreadPoolExecutor(1) as pool:
        engine.store(own)
        located(engine, cut)
        fleet.network.fault(FIRST, bytes_per_second=SLOW)
        began = Deadline(DEADLINE_SECONDS + 10)  # TCP alone gives up after minutes
        load = pool.submit(engine.load, cut)
        wait_until(lambda: lent_bytes(reader), "a transfer is under way", pause_seconds=0.001)
        fleet.network.cut(FIRST)
        assert engine.load(own) == payloads(own), "RAM serves meanwhile"
        assert load.result() is None
        assert not began.is_over()
        wait_until(lambda: not lent_bytes(reader), "the extents were given back")
        before = xxh3_128_digest(engine.arena)
        fleet.network.heal(FIRST)
        wait_until(lambda: fleet.ready(reader, 1), "the peer is back")
        assert xxh3_128_digest(engine.arena) == before, "nothing arrives late"
        assert served_again(engine, after) == payloads(after)
        assert served_again(engine, cut) == payloads(cut)
    wait_until(lambda: not lent_bytes(source), "all leases have ended")


@pytest.mark.requirement("N1", "N2")
def test_bits_that_are_flipped_on_the_wire_and_lost_packets_reach_no_engine(fleet: PeerNetwork) -> None:
    keys = [keys_of(f"noise{number}", 8) for number in range(3)]
    source = fleet.source_at(FIRST)
    for prompt in keys:
        stored(source, prompt)
    reader = fleet.reader_at(READER, FIRST)
    with RawEngine(reader.socket) as engine:
        located(engine, keys[0])
        fleet.network.fault(FIRST, flips=0.05)
        wait_until(lambda: _never_wrong(engine, keys[0]) and fleet.network.counts().get("flipped"), "bits flipped")
        fleet.network.heal()
        assert served_again(engine, keys[1]) == payloads(keys[1])
        located(engine, keys[2])
        fleet.network.fault(FIRST, loss=0.1)
        wait_until(lambda: _never_wrong(engine, keys[2]) and fleet.network.counts().get("lost"), "packets were lost")
        fleet.network.heal()
        assert served_again(engine, keys[2]) == payloads(keys[2])


def _never_wrong(engine: RawEngine, keys: list[bytes]) -> bool:
    engine.locate(keys)
    loaded = engine.load(keys)
    assert loaded is None or loaded == payloads(keys)
    return True


# The wire itself


@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())
def test_the_wire_delays_limits_the_rate_cuts_and_heals() -> None:
    delay, rate, packet = 0.05, 1e5, bytes(5000)
    with Network(2, delay_seconds=delay, rate=rate) as network:
        one, other = (network.in_node(node, lambda: socket.socket(type=socket.SOCK_DGRAM)) for node in network.nodes)
        with one, other:
            other.bind((network.address(1), 5000))
            other.settimeout(patient(10.0))
            began = time.monotonic()
            for _ in range(4):
                one.sendto(packet, (network.address(1), 5000))
            assert [other.recv(9000) for _ in range(4)] == [packet] * 4
            assert time.monotonic() - began >= delay + 4 * len(packet) / rate
            network.cut(1)
            one.sendto(b"lost", (network.address(1), 5000))
            wait_until(lambda: network.counts().get("cut"), "it is lost")
            network.heal(1)
            one.sendto(b"not lost", (network.address(1), 5000))
            assert other.recv(9000) == b"not lost"


def _segment(data: bytes) -> bytes:
    """An IPv4 packet without options with a TCP segment without options."""
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 40 + len(data), 1, 0, 64, 6, 0, bytes(4), bytes(4))
    return ip + struct.pack(">HHIIBBHHH", 1, 2, 3, 4, 5 << 4, 16, 5, 0, 0) + data


def _sum(segment: bytes) -> int:
    """What TCP compares, but for the parts that do not change."""
    total: int = sum(struct.unpack(f">{len(segment) // 2}H", segment[: len(segment) & ~1]))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_flipped_bits_change_the_data_alone_and_not_its_sum() -> None:
    rng = Random(3)
    for length in (4, 5, 100, 8001):
        packet = _segment(rng.randbytes(length))
        changed = flipped(packet, rng)
        assert changed[:40] == packet[:40] and changed != packet
        assert _sum(changed) == _sum(packet)


@pytest.mark.parametrize("packet", [_segment(b""), _segment(b"abc"), _segment(bytes(50)), bytes(28)])
def test_packets_without_bits_to_flip_pass(packet: bytes) -> None:
    assert flipped(packet, Random(1)) == packet
