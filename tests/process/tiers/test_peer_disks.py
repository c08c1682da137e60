"""Real daemons that load from each other what only a disk of the source has (ADR 95)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_node import config, reboot, tier, wait_ready, wait_written
from tests.rigs.patience import patient, wait_until
from tests.rigs.peer_fleet import (
    BORROWING,
    LENT,
    Fleet,
    counter,
    located,
    payloads,
    port_of,
    served_again,
    stopped,
    stored,
)
from tests.rigs.raw_client import OBJECT_BYTES, RawEngine, keys_of, status_of

KEYS = keys_of("disk", 12)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def rebooted(fleet: Fleet, directory: Path, *, lends: bool = False) -> DaemonProcess:
    """Return a source whose disk has these objects, and whose RAM is empty. No engine has asked it for anything."""
    source = fleet.source(port=fleet.port(), more=config(directory), lends=lends, ram="640MiB")
    with RawEngine(source.socket) as engine:
        wait_ready(engine)
        engine.store(KEYS)
        wait_written(engine, len(KEYS))
    before = len(source.log)
    reboot(source)
    if lends:
        source.wait_for_log(LENT, before)
    wait_until(lambda: status_of(source.socket).tiers[1].objects == len(KEYS), "the disk has opened")
    assert status_of(source.socket).tiers[0].objects == 0
    return source


@pytest.mark.requirement("T3", "B3")
@pytest.mark.parametrize("lane", ["stream", "nixl"])
def test_what_only_a_disk_of_the_source_has_is_loaded(
    fleet: Fleet, directory: Path, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = rebooted(fleet, directory, lends=lane == "nixl")
    reader = fleet.reader(port_of(source), of_tier=BORROWING if lane == "nixl" else "")
    with RawEngine(reader.socket) as engine:
        located(engine, KEYS)
        assert engine.load(KEYS) == payloads(KEYS)
    assert counter(source, "peer_disk_reads.read") == counter(source, "tier_reads.nvme/ok") == len(KEYS)
    assert counter(reader, f"peer_loaded_bytes.peer-0/{lane}") == len(KEYS) * OBJECT_BYTES
    wait_until(lambda: status_of(source.socket).tiers[0].lent_bytes == 0, "all leases have ended")
    assert status_of(source.socket).tiers[0].objects == len(KEYS)


@pytest.mark.requirement("T3")
def test_a_source_that_is_told_to_keeps_its_disks_to_its_engines(fleet: Fleet, directory: Path) -> None:
    source = rebooted(fleet, directory)
    source.config = (source.config or "").replace("listen_peers", "lend_disks = false\nlisten_peers")
    source.stop()
    source.start()
    wait_until(lambda: status_of(source.socket).tiers[1].objects == len(KEYS), "the disk has opened")
    reader = fleet.reader(port_of(source))
    new = keys_of("ram", 3)
    stored(source, new)
    with RawEngine(reader.socket) as engine:
        located(engine, new)
        assert engine.load(new) == payloads(new)
        assert engine.locate(KEYS) == 0
    assert counter(source, "tier_reads.nvme/ok") == 0


@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse())
@pytest.mark.requirement("N3", "N1")
def test_a_disk_of_the_source_that_hangs_costs_a_request_and_neither_daemon_its_breaker(
    fleet: Fleet,
) -> None:
    with FuseDirectory() as mount:
        source = rebooted(fleet, mount.path)
        in_ram = keys_of("ram", 3)
        stored(source, in_ram)
        reader = fleet.reader(port_of(source), deadline=f"{patient(10.0):.0f}s")
        with RawEngine(reader.socket) as engine:
            located(engine, KEYS)
            mount.hang()
            try:
                assert engine.load(KEYS) is None, "the request is computed"
                assert counter(source, "peer_disk_reads.busy") >= 1
                located(engine, in_ram)
                assert engine.load(in_ram) == payloads(in_ram)
                assert tier(engine).breaker == "closed"
            finally:
                mount.go_on()
            assert served_again(engine, KEYS) == payloads(KEYS)
        source.close()  # before its mount


def flip_a_bit(segments: Path, payload: bytes) -> None:
    """Damage an object in its place: the scrubber may look at the others meanwhile."""
    for segment in segments.iterdir():
        at = segment.read_bytes().find(payload[:64])
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(bytes([payload[0] ^ 1]))


@pytest.mark.requirement("N2")
def test_a_damaged_object_of_the_source_s_disk_is_a_miss(fleet: Fleet, directory: Path) -> None:
    source = rebooted(fleet, directory)
    reader = fleet.reader(port_of(source))
    with RawEngine(reader.socket) as engine:
        located(engine, KEYS)
        flip_a_bit(directory / "segments", payloads(KEYS)[5])
        assert engine.load(KEYS) is None
        assert counter(source, "tier_damaged_objects.nvme/corrupt") == 1
        assert served_again(engine, KEYS[:5]) == payloads(KEYS[:5])


@pytest.mark.requirement("T3")
def test_a_conversation_on_the_disk_of_a_daemon_that_is_no_peer_is_found(
    fleet: Fleet, directory: Path, tmp_path: Path
) -> None:
    source, other = rebooted(fleet, directory), fleet.source()
    file = tmp_path / "peers"
    file.write_text("".join(f"127.0.0.1:{port_of(one)}\n" for one in (source, other)))
    reader = fleet.reader(
        url=f"file://{file}", ram="1GiB", of_tier="io_workers = 1\npeers_max = 1\n", deadline="20s",
        under=("tests.fakes.peer_waits",),
    )  # fmt: skip
    wait_until(lambda: counter(reader, "peer_summaries.peer-0/new") >= 2, "both have given a summary")
    with RawEngine(reader.socket) as engine:
        located(engine, KEYS)
        assert engine.load(KEYS) == payloads(KEYS)


@pytest.mark.requirement("N3")
def test_a_source_that_stops_while_it_reads_its_disk_costs_a_request(fleet: Fleet, directory: Path) -> None:
    source = rebooted(fleet, directory)
    reader = fleet.reader(port_of(source), deadline=f"{patient(3.0):.0f}s")
    with RawEngine(reader.socket) as engine:
        located(engine, KEYS)
        with stopped(source):
            assert engine.load(KEYS) is None
        assert served_again(engine, KEYS) == payloads(KEYS)
