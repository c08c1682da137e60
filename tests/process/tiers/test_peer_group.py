"""A peer tier with several peers: real workers, real daemons, a list that changes (ADR 84)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from kvdepot.server.io.peer_wire import TO_READER, Refusal, Refused
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.conformance_harness import payload_of
from kvdepot.server.tiers.peer.group import PeerGroup
from kvdepot.server.tiers.peer.places import Place, PlacesFile

from tests.fakes.lying_source import OF_PULLS, LyingSource
from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import PEER, Fleet, located, payloads, port_of, stored, tier_of
from tests.rigs.peer_live import PeerLive
from tests.rigs.peer_sources import NAMES, Sources, found, readable, with_sources
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, status_of


@pytest.mark.requirement("T3")
def test_objects_of_both_peers_are_found_and_read(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        first, second = sources.each
        first.keys.update(name.key for name in NAMES[:2])
        second.keys.update(name.key for name in NAMES[1:3])
        await readable(live)
        handles = await found(live, *NAMES[:3])
        assert not await live.look_up(NAMES[3])
        for name in NAMES[:3]:
            assert await live.read(handles[name], name) == (IoOutcome.OK, payload_of(name))

    with_sources(tmp_path, test)


def gone(_: LyingSource, __: bytes) -> Iterator[bytes]:
    yield TO_READER.pack(Refused(Refusal.GONE))


def ended(_: LyingSource, __: bytes) -> Iterator[bytes]:
    yield b""
    raise ConnectionAbortedError


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("lie", [gone, ended])
def test_an_object_that_one_peer_does_not_serve_is_read_from_the_other_one(
    tmp_path: Path, lie: Callable[[LyingSource, bytes], Iterator[bytes]]
) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        for source in sources.each:
            source.keys.update(name.key for name in NAMES)
        await readable(live)
        handles = await found(live, *NAMES)
        liar = sources.each[0]
        liar.pulls = lie
        group = live.peer_tier._workers
        assert isinstance(group, PeerGroup)
        name, file = NAMES[0], object_file(NAMES[0])
        await live.until(lambda: len(group.owners_of(file)) == 2, "both have said that they have it")
        first = sorted(group.owners_of(file), key=lambda one: one.place[1] != liar.port)
        group._owners._numbers[file] = tuple(one.number for one in first)
        assert await live.read(handles[name], name) == (IoOutcome.OK, payload_of(name))
        assert liar.lied, "it was asked first"

    with_sources(tmp_path, test)


@pytest.mark.requirement("N1")
def test_flipped_bits_of_one_peer_are_a_miss(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        for source in sources.each:
            source.keys.update(name.key for name in NAMES)
            source.pulls = OF_PULLS["bit in the middle"]
        await readable(live)
        handles = await found(live, NAMES[0])
        assert (await live.read(handles[NAMES[0]], NAMES[0]))[0] is IoOutcome.CORRUPT
        assert sum(source.lied for source in sources.each) == 1, "nobody else is asked for it now"

    with_sources(tmp_path, test)


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        first, second = sources.each
        first.keys.add(NAMES[0].key)
        second.keys.add(NAMES[1].key)
        sources.list()
        await live.until(lambda: "no peer was found" in live.tier.status().reason, "nobody is listed")
        assert not live.tier.readable
        sources.list(first)
        await readable(live)
        handles = await found(live, NAMES[0])
        assert await live.read(handles[NAMES[0]], NAMES[0]) == (IoOutcome.OK, payload_of(NAMES[0]))
        sources.write("nonsense\n")
        await live.until(lambda: "line 1" in live.tier.status().reason, "it is said")
        assert await live.read(handles[NAMES[0]], NAMES[0]) == (IoOutcome.OK, payload_of(NAMES[0]))
        sources.list(second)
        await readable(live)
        await found(live, NAMES[1])
        outcome, _ = await live.read(handles[NAMES[0]], NAMES[0])
        assert outcome is not IoOutcome.OK, "who had it is no peer any more"

    with_sources(tmp_path, test)


@pytest.mark.requirement("T3")
def test_a_list_that_hangs_at_the_start_is_said_and_taken_once_it_can_be_read(tmp_path: Path) -> None:
    may_read = threading.Event()

    class HungFile(PlacesFile):
        def find(self) -> tuple[Place, ...]:
            may_read.wait()
            return super().find()

    async def hung(sources: Sources, live: PeerLive) -> None:
        await live.until(lambda: "no answer within" in live.tier.status().reason, "it is said")
        assert not live.tier.readable
        may_read.set()
        sources.each[0].keys.add(NAMES[0].key)
        await readable(live)
        await found(live, NAMES[0])

    with_sources(tmp_path, hung, places=HungFile)


@pytest.mark.requirement("T3")
def test_a_peer_that_failed_is_probed_also_while_the_list_cannot_be_read(tmp_path: Path) -> None:
    async def test(sources: Sources, live: PeerLive) -> None:
        await readable(live)
        (first, second), group = sources.each, live.peer_tier._workers
        assert isinstance(group, PeerGroup)
        sources.write("nonsense\n")
        await live.until(lambda: "line 1" in live.tier.status().reason, "it cannot be read")
        first.lookups = second.lookups = ended
        assert not await live.look_up(NAMES[0])
        assert first.lied and second.lied, "both have failed"
        await live.until(lambda: all(one.state != "failing" for one in group.statuses()), "nobody else asks them")

    with_sources(tmp_path, test)


@pytest.mark.requirement("T3")
def test_a_daemon_loads_from_all_daemons_of_a_list_that_names_itself_too(fleet: Fleet, tmp_path: Path) -> None:
    own_port = fleet.port()
    one, two = fleet.source(), fleet.source()
    stored(one, keys_of("one", 3))
    stored(two, keys_of("two", 3))
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port}\n" for port in (port_of(one), port_of(two), own_port)))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier="io_workers = 1\n", deadline="3s",
        tls=f'[daemon]\nlisten_peers = "tcp://127.0.0.1:{own_port}"\n{fleet.tls()}',
    )  # fmt: skip
    with RawEngine(reader.socket) as engine:
        for prompt in ("one", "two"):
            located(engine, keys_of(prompt, 3))
        assert engine.load(keys_of("one", 3)) == payloads(keys_of("one", 3))
        reader.wait_for_log("is this daemon")
        one.kill()
        wait_until(lambda: engine.locate(keys_of("other", 1)) == 0 and tier_of(reader).reason, "one is said to be gone")
        assert str(port_of(one)) in tier_of(reader).reason and tier_of(reader).breaker == "closed"
        assert engine.load(keys_of("two", 3)) == payloads(keys_of("two", 3))
        stored(two, keys_of("three", 3))
        wait_until(lambda: engine.locate(keys_of("three", 3), "r3") == 3 * CHUNK_TOKENS, "the other one is still asked")
        explained = kvdepotctl(reader, "explain", "r3").stdout
        assert f"slowest tier peer-0 (127.0.0.1:{port_of(two)}), in RAM after" in " ".join(explained.split())
        described = kvdepotctl(reader, "describe", f"{engine.namespace.hex()}/{keys_of('three', 3)[0].hex()}", "--json")
        places = {one["tier"]: one["place"] for one in json.loads(described.stdout)["objects"]}
        assert places["peer-0"] == f"127.0.0.1:{port_of(two)}" and not places.get("ram")
        assert engine.load(keys_of("three", 3)) == payloads(keys_of("three", 3))
    assert status_of(reader.socket).counters["peer_loaded_bytes.peer-0/stream"] == 9 * OBJECT_BYTES
    _is_shown(reader, two, own_port=own_port, lost_port=port_of(one))


def _is_shown(reader: DaemonProcess, source: DaemonProcess, *, own_port: int, lost_port: int) -> None:
    """Operators see each peer at the reader, and the reader at the source."""
    shown = kvdepotctl(reader, "peers", "--json")
    assert shown.returncode == 1, "one cannot be asked"
    peers = {one["address"]: one for one in json.loads(shown.stdout)["tiers"]["peer-0"]}
    serving = peers[f"127.0.0.1:{port_of(source)}"]
    assert (serving["state"], serving["lane"], serving["loaded_objects"]) == ("ready", "stream", 6)
    assert serving["loaded_bytes"] == 6 * OBJECT_BYTES and serving["load_seconds"] > 0
    assert serving["lookups"] > 0 and serving["lookup_seconds"] > 0
    assert peers[f"127.0.0.1:{own_port}"]["state"] == "itself"
    lost = peers[f"127.0.0.1:{lost_port}"]
    assert (lost["state"], lost["loaded_objects"]) == ("disabled", 3) and str(lost_port) in lost["reason"]
    health = kvdepotctl(reader, "health").stdout
    assert "PEER_UNREACHABLE" in health and f"of 2 peers, 127.0.0.1:{lost_port} cannot be asked" in " ".join(
        health.split()
    )
    with urlopen(f"{reader.metrics}/metrics") as answer:
        metrics = answer.read().decode()
    assert f'kvdepot_peer_usable{{peer="127.0.0.1:{lost_port}",tier="peer-0"}} 0.0' in metrics
    assert f'kvdepot_peer_loads_total{{peer="{serving["address"]}",tier="peer-0"}} 6.0' in metrics
    (sent,) = json.loads(kvdepotctl(source, "peers", "--json").stdout)["readers"]
    assert (sent["name"], sent["leases"], sent["sent_objects"]) == (PEER, 0, 6)
    assert sent["sent_bytes"] == 6 * OBJECT_BYTES
    text = kvdepotctl(source, "peers").stdout
    assert "this daemon has no peer tier" in text and PEER in text
