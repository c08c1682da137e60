"""Two real daemons with a shared tier on one directory (T3, P6)."""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.objectfile import HEADER_BYTES, ObjectHeader, payload_sum
from kvdepot.core.report import TierStatus
from kvdepot.server.storage import shared_layout as layout

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of
from tests.rigs.shared_node import CONFIG, WAIT_SECONDS


class Nodes:
    """Daemons on one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: list[DaemonProcess] = []

    def start(self) -> DaemonProcess:
        daemon = DaemonProcess(ram="456MiB", config=CONFIG.format(path=self.root))
        self.daemons.append(daemon)
        daemon.start()
        wait_until(lambda: _tier(daemon).state == "ready", "the tier is ready", WAIT_SECONDS)
        return daemon

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*.kvd") if layout.object_of(str(path.relative_to(self.root))))

    def published(self) -> set[bytes]:
        return {bytes.fromhex(path.name.partition(".")[0]) for path in self.files()}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "shared").mkdir()
    nodes = Nodes(tmp_path / "shared")
    yield nodes
    for daemon in nodes.daemons:
        daemon.close()


def _tier(daemon: DaemonProcess) -> TierStatus:
    return status_of(daemon.socket).tiers[1]


def _wait_for_offline(daemon: DaemonProcess, reason: str) -> None:
    """A busy machine may say first that the coordinator is late."""
    wait_until(
        lambda: _tier(daemon).state == "offline" and reason in _tier(daemon).reason,
        lambda: f"{reason!r} is the reason, and not {_tier(daemon).reason!r}",
        WAIT_SECONDS,
    )


def _store(nodes: Nodes, daemon: DaemonProcess, keys: list[bytes]) -> None:
    before = len(nodes.files())
    wait_until(lambda: not _tier(daemon).reason, "the janitor has granted room", WAIT_SECONDS)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        wait_until(lambda: len(nodes.files()) == before + len(keys), "all are published", WAIT_SECONDS)


def _located(engine: RawEngine, keys: list[bytes]) -> None:
    """A look-up that takes longer than a Locate waits is for the next one."""
    wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all of them are found", WAIT_SECONDS)


@pytest.mark.requirement("T3")
def test_what_one_daemon_stored_another_one_serves(nodes: Nodes) -> None:
    first, second = nodes.start(), nodes.start()
    keys = keys_of("shared", 20)
    _store(nodes, first, keys)
    with RawEngine(second.socket) as engine:
        _located(engine, keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
    more = keys_of("back", 5)
    _store(nodes, second, more)
    with RawEngine(first.socket) as engine:
        _located(engine, more)
        assert engine.load(more) == [payload_of(key) for key in more]
    folder = nodes.root / layout.TEMPORARIES  # the nodes' own files come by way of it, again and again
    wait_until(lambda: not list(folder.iterdir()), "no temporary stays", WAIT_SECONDS)
    assert _tier(first).node != _tier(second).node
    assert {_tier(first).janitor, _tier(second).janitor} == {_tier(first).node}


@pytest.mark.requirement("P6", "I1")
def test_nothing_is_written_through_a_symbolic_link_in_a_folder_s_place(nodes: Nodes, tmp_path: Path) -> None:
    """Another writer of the directory put it there. What lies where it leads stays as it is, and RAM serves on."""
    daemon = nodes.start()
    keys = keys_of("through", 12)
    _store(nodes, daemon, keys_of("before", 4))
    folder, outside = nodes.files()[0].parent, tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    there = {path.name: path.stat().st_mtime_ns for path in outside.iterdir()}
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        said = "a symbolic link or a file is in the place of its folder"
        wait_until(lambda: said in daemon.log, "the log names the folder", WAIT_SECONDS)
        assert engine.load(keys) == [payload_of(key) for key in keys]
    assert {path.name: path.stat().st_mtime_ns for path in outside.iterdir()} == there


@pytest.mark.requirement("P6", "I1")
def test_a_damaged_file_is_a_miss_and_quarantined(nodes: Nodes) -> None:
    first, second = nodes.start(), nodes.start()
    keys = keys_of("damaged", 6)
    _store(nodes, first, keys)
    (bad,) = [path for path in nodes.files() if path.name.startswith(keys[3].hex())]
    data = bytearray(bad.read_bytes())
    data[HEADER_BYTES + 77] ^= 1
    bad.write_bytes(data)
    with RawEngine(second.socket) as engine:
        _located(engine, keys)
        assert engine.load(keys) is None
        wait_until(lambda: not bad.exists(), "it is quarantined", WAIT_SECONDS)
        (kept,) = (nodes.root / layout.QUARANTINE).iterdir()
        assert kept.name.endswith(".corrupt.kvd") and kept.read_bytes() == data
        _located(engine, keys[:3])
        assert engine.load(keys[:3]) == [payload_of(key) for key in keys[:3]]
        assert engine.counter("tier_damaged_objects.pool/corrupt") == 1


@pytest.mark.requirement("P6")
def test_a_file_deleted_between_lookup_and_load_is_a_miss(nodes: Nodes) -> None:
    first, second = nodes.start(), nodes.start()
    keys = keys_of("deleted", 4)
    _store(nodes, first, keys)
    with RawEngine(second.socket) as engine:
        _located(engine, keys)
        for path in nodes.files():
            os.unlink(path)  # noqa: PTH108
        assert engine.load(keys) is None
        assert _tier(second).state == "ready"


@pytest.mark.requirement("I8")
@pytest.mark.long(seconds=10)
def test_files_outlive_a_daemon_and_its_arena(nodes: Nodes) -> None:
    daemon = nodes.start()
    keys = keys_of("restart", 8)
    _store(nodes, daemon, keys)
    daemon.kill()
    daemon.arena.unlink()
    daemon.start()
    wait_until(lambda: _tier(daemon).state == "ready", "the tier is ready", WAIT_SECONDS)
    with RawEngine(daemon.socket) as engine:
        _located(engine, keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]


@pytest.mark.requirement("T3", "I8")
def test_a_daemon_killed_while_it_publishes_leaves_whole_files_and_temporaries(nodes: Nodes) -> None:
    daemon = nodes.start()
    keys = keys_of("killed", 40)
    wait_until(lambda: not _tier(daemon).reason, "the janitor has granted room", WAIT_SECONDS)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        # Several workers publish: the first file need not be the first key's.
        wait_until(lambda: keys[0] in nodes.published(), "it publishes", WAIT_SECONDS)
        workers = [os.pidfd_open(pid) for pid in children(daemon.pid, b"kvdepot.server.io.worker")]
        daemon.kill()
    assert workers
    for worker in workers:  # killed with it, and done with the system call in which that met them
        assert select.select([worker], [], [], patient(WAIT_SECONDS))[0]
        os.close(worker)
    whole = nodes.files()
    path_length = len(list(itertools.takewhile(lambda key: key in nodes.published(), keys)))
    for path in whole:
        header = ObjectHeader.unpack(path.read_bytes()[:HEADER_BYTES])
        payload = path.read_bytes()[HEADER_BYTES:]
        assert header.name.key.hex() == path.name.partition(".")[0]
        assert payload_sum([payload[: header.stored_bytes]]) == header.stored_sum
    other = nodes.start()
    with RawEngine(other.socket) as engine:
        wait_until(lambda: engine.locate(keys) == path_length * CHUNK_TOKENS, "what is whole is found", WAIT_SECONDS)
        assert engine.load(keys[:path_length]) == [payload_of(key) for key in keys[:path_length]]


@pytest.mark.requirement("T3", "I4")
@pytest.mark.long(seconds=20)
def test_a_daemon_that_is_killed_again_and_again_holds_nothing_of_what_its_earlier_runs_were_allowed(
    nodes: Nodes,
) -> None:
    """Not for the ten minutes after which a janitor takes a silent node for gone."""
    steady, daemon = nodes.start(), nodes.start()
    for run in range(4):
        _store(nodes, daemon, keys_of(f"run{run}", 3))
        earlier = _tier(daemon).node
        daemon.kill()
        daemon.start()
        wait_until(lambda: _tier(daemon).node not in ("", earlier), "it is a node again", WAIT_SECONDS)  # noqa: B023
    folder = nodes.root / layout.NODES
    wait_until(lambda: len(list(folder.iterdir())) == 2, "its earlier runs are forgotten", WAIT_SECONDS)
    assert {file.stem for file in folder.iterdir()} == {_tier(steady).node, _tier(daemon).node}


@pytest.mark.requirement("T3", "I4")
@pytest.mark.long(seconds=20)
def test_a_coordinator_that_is_killed_again_and_again_holds_nothing_once_what_was_begun_under_it_is_over(
    nodes: Nodes,
) -> None:
    steady, daemon = nodes.start(), nodes.start()
    for number in range(2):
        _store(nodes, daemon, keys_of(f"coordinator{number}", 3))
        earlier = _tier(daemon).node
        (coordinator,) = children(daemon.pid, b"shared.coordinator.main")
        os.kill(coordinator, signal.SIGKILL)
        wait_until(lambda: _tier(daemon).node not in ("", earlier), "it is a node again", WAIT_SECONDS)  # noqa: B023
    folder = nodes.root / layout.NODES
    wait_until(lambda: len(list(folder.iterdir())) == 2, "its earlier nodes are forgotten", WAIT_SECONDS)
    assert {file.stem for file in folder.iterdir()} == {_tier(steady).node, _tier(daemon).node}


@pytest.mark.requirement("T5", "I8")
def test_a_daemon_that_starts_while_the_directory_is_away_makes_none_and_takes_it_when_it_is_back(
    nodes: Nodes, tmp_path: Path
) -> None:
    daemon = nodes.start()
    keys, after = keys_of("before", 4), keys_of("after", 4)
    _store(nodes, daemon, keys)
    daemon.kill()
    daemon.arena.unlink()
    nodes.root.rename(tmp_path / "away")
    daemon.start()
    _wait_for_offline(daemon, f"{nodes.root} is not there: not mounted?")
    with RawEngine(daemon.socket) as engine:
        assert engine.locate(keys) == 0
        engine.store(after)
        assert engine.load(after) == [payload_of(key) for key in after]
        assert not nodes.root.exists()
        (tmp_path / "away").rename(nodes.root)
        wait_until(lambda: _tier(daemon).state == "ready", "the tier is back", WAIT_SECONDS)
        _located(engine, keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]


@pytest.mark.requirement("T5")
@pytest.mark.skipif(Path("/tmp").stat().st_dev != Path("/").stat().st_dev, reason="no folder on the root file system")
def test_an_empty_folder_of_the_root_file_system_is_not_taken_for_a_mount(directory: Path) -> None:
    config = CONFIG.format(path=directory).replace("on_root_filesystem = true\n", "")
    with DaemonProcess(ram="456MiB", config=config) as daemon:
        _wait_for_offline(daemon, "not mounted?")
        assert not list(directory.iterdir())


def test_a_directory_of_others_is_refused_and_left_alone(nodes: Nodes) -> None:
    (nodes.root / "thesis.tex").write_text("mine")
    daemon = DaemonProcess(ram="456MiB", config=CONFIG.format(path=nodes.root))
    nodes.daemons.append(daemon)
    daemon.start()
    _wait_for_offline(daemon, "not empty")
    assert [path.name for path in nodes.root.iterdir()] == ["thesis.tex"]
    keys = keys_of("ram", 3)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        assert engine.load(keys) == [payload_of(key) for key in keys]
