"""A user who can write to a shared directory, and has no key: a forged object is a miss, counted, and no byte (S5, P6).

Two real daemons have the directory, and each has its own copy of the key file, as nodes do.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from kvdepot.core.object_keys import key_id
from kvdepot.core.objectfile import HEADER_BYTES, ObjectHeader, payload_sum
from kvdepot.server.storage import shared_layout as layout

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HOSTILE, OtherUser, needs_root
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of
from tests.rigs.shared_node import CONFIG as UNKEYED
from tests.rigs.shared_node import WAIT_SECONDS

OLD, NEW = bytes(range(32)).hex(), bytes(range(32, 64)).hex()
CONFIG: Final = f'{UNKEYED}key_file = "{{key_file}}"\n'


# --- what the processes of the other user do


def forge(file: str) -> bytes:
    """Write other bytes under right checksums, and keep id and MAC of the key. Return them."""
    path = Path(file)
    data = path.read_bytes()
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    payload = (b"POISON" * header.stored_bytes)[: header.stored_bytes]
    total = payload_sum([payload])
    page = replace(header, raw_sum=total, stored_sum=total).pack()
    path.write_bytes(page + payload + data[HEADER_BYTES + len(payload) :])
    return payload


def strip(file: str) -> None:
    """Forge, without a MAC: an object as it was before there were keys."""
    forge(file)
    path = Path(file)
    data = path.read_bytes()
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    path.write_bytes(replace(header, key_id=bytes(8), mac=bytes(32)).pack() + data[HEADER_BYTES:])


def move(source: str, target: str, corrected: bool) -> None:
    """Copy an object to another one's name. `corrected`: its header says the name."""
    data, there = Path(source).read_bytes(), Path(target).read_bytes()
    if corrected:
        name = ObjectHeader.unpack(there[:HEADER_BYTES]).name
        header = ObjectHeader.unpack(data[:HEADER_BYTES])
        data = replace(header, name=name).pack() + data[HEADER_BYTES:]
    Path(target).write_bytes(data)


# --- the daemons


class Nodes:
    """Daemons on one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "shared"
        self.root.mkdir()
        self.daemons: list[DaemonProcess] = []

    def start(self, *keys: str) -> DaemonProcess:
        """Without keys, the daemon has no key file."""
        path = self.folder / f"{len(self.daemons)}.key"
        self.write_keys(path, keys)
        config = CONFIG.format(path=self.root, key_file=path if keys else "")
        daemon = DaemonProcess(ram="456MiB", config=config)
        self.daemons.append(daemon)
        daemon.start()
        wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the tier is ready", WAIT_SECONDS)
        return daemon

    @staticmethod
    def write_keys(path: Path, keys: tuple[str, ...]) -> None:
        path.touch(0o600)
        path.write_text("".join(f"{key}\n" for key in keys))

    def reload(self, daemon: DaemonProcess, *keys: str) -> None:
        before = len(daemon.log)
        self.write_keys(self.folder / f"{self.daemons.index(daemon)}.key", keys)
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.wait_for_log("configuration changed: tier.pool.key_file", before)

    def path(self, key: bytes) -> Path:
        (path,) = self.root.rglob(f"{key.hex()}.*.kvd")
        return path

    def store(self, daemon: DaemonProcess, keys: list[bytes], engine: RawEngine | None = None) -> None:
        """Store, and wait until each object is a file that this daemon has written."""
        written = self.written(daemon)
        wait_until(lambda: not status_of(daemon.socket).tiers[1].reason, "room is granted", WAIT_SECONDS)
        if engine is not None:
            engine.store(keys)
        else:
            with RawEngine(daemon.socket) as engine:
                engine.store(keys)
        wait_until(lambda: self.written(daemon) == written + len(keys), "all are published", WAIT_SECONDS)

    def written(self, daemon: DaemonProcess) -> float:
        return status_of(daemon.socket).counters.get("shared_publications.pool/written", 0)

    def quarantined(self) -> list[str]:
        return sorted(path.name.split(".")[-2] for path in (self.root / layout.QUARANTINE).iterdir())


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Not in pytest's own folder: each start of pytest closes that to other users."""
    with tempfile.TemporaryDirectory(prefix="kvdfiles") as folder:
        nodes = Nodes(Path(folder))
        yield nodes
        for daemon in nodes.daemons:
            daemon.close()


def located(engine: RawEngine, keys: list[bytes]) -> None:
    """A look-up that takes longer than a Locate waits is for the next one."""
    wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all of them are found", WAIT_SECONDS)


def load(engine: RawEngine, prompt: str) -> list[bytes] | None:
    keys = keys_of(prompt, 1)
    located(engine, keys)
    return engine.load(keys)


def right(prompt: str) -> list[bytes]:
    return [payload_of(key) for key in keys_of(prompt, 1)]


# --- the tests


@needs_root
@pytest.mark.requirement("S5", "P6", "I1")
def test_who_writes_to_the_directory_without_the_key_has_nothing_served(nodes: Nodes) -> None:
    first, second = nodes.start(NEW), nodes.start(NEW)
    prompts = ("good", "forged", "stripped", "moved", "corrected")
    for prompt in prompts:
        nodes.store(first, keys_of(prompt, 1))
    with RawEngine(second.socket) as engine:
        assert load(engine, "good") == right("good"), "one node serves what the other one wrote"
    files = {prompt: str(nodes.path(keys_of(prompt, 1)[0])) for prompt in prompts}
    _open_to_everybody(nodes.root)
    with OtherUser(HOSTILE, __name__) as hostile:
        hostile.run("forge", files["forged"])
        hostile.run("strip", files["stripped"])
        for prompt in ("moved", "corrected"):
            hostile.run("move", files["good"], files[prompt], prompt == "corrected")
    wanted = {"forged": "forged", "stripped": "unkeyed", "moved": "identity", "corrected": "forged"}
    with RawEngine(second.socket) as engine:
        for prompt in wanted:
            assert load(engine, prompt) is None, f"{prompt} is served"
        for reason in sorted({*wanted.values()}):
            count = list(wanted.values()).count(reason)
            assert engine.counter(f"tier_damaged_objects.pool/{reason}") == count
        assert load(engine, "good") == right("good")
    quarantined = ["forged", "forged", "identity"]
    wait_until(lambda: nodes.quarantined() == quarantined, nodes.quarantined, WAIT_SECONDS)
    assert Path(files["stripped"]).exists(), "it may be an object from before there were keys"
    assert not any(key in daemon.log for key in (OLD, NEW) for daemon in nodes.daemons)


@needs_root
@pytest.mark.requirement("S5", "T3", "I1")
def test_a_planted_object_does_not_keep_a_store_out(nodes: Nodes) -> None:
    first, second = nodes.start(NEW), nodes.start(NEW)
    nodes.store(first, keys_of("planted", 1))
    file = str(nodes.path(keys_of("planted", 1)[0]))
    _open_to_everybody(nodes.root)
    with OtherUser(HOSTILE, __name__) as hostile:
        hostile.run("forge", file)
    nodes.store(second, keys_of("planted", 1))
    assert status_of(second.socket).counters["tier_damaged_objects.pool/forged"] == 1
    wait_until(lambda: nodes.quarantined() == ["forged"], nodes.quarantined, WAIT_SECONDS)
    for path in (nodes.root, *nodes.root.rglob("*")):  # else the next start refuses the directory
        path.chmod(path.stat().st_mode & ~0o022)
    _without_ram(second)
    with RawEngine(second.socket) as engine:
        assert load(engine, "planted") == right("planted")


@pytest.mark.requirement("S5", "T3")
@pytest.mark.long(seconds=20)
def test_an_upgrade_heals_and_a_node_that_was_left_out_deletes_nothing(nodes: Nodes) -> None:
    plain = nodes.start()
    nodes.store(plain, keys_of("old", 1))
    keyed = nodes.start(NEW)
    with RawEngine(keyed.socket) as engine:
        assert load(engine, "old") is None
        assert engine.counter("tier_damaged_objects.pool/unkeyed") == 1
        before = nodes.path(keys_of("old", 1)[0]).stat().st_ino
        nodes.store(keyed, keys_of("old", 1), engine)
        assert nodes.path(keys_of("old", 1)[0]).stat().st_ino != before, "stored again, with a MAC"
    _without_ram(keyed)
    with RawEngine(keyed.socket) as engine:
        assert load(engine, "old") == right("old")
    _without_ram(plain)
    kept = nodes.path(keys_of("old", 1)[0]).stat().st_ino
    with RawEngine(plain.socket) as engine:
        assert load(engine, "old") is None
        assert engine.counter("tier_damaged_objects.pool/unknown_key") == 1
        engine.store(keys_of("old", 1))
        outcome = "tier_writes.pool/unknown_key"
        wait_until(lambda: engine.counter(outcome) == 1, "it wanted to publish too", WAIT_SECONDS)
    assert nodes.path(keys_of("old", 1)[0]).stat().st_ino == kept
    assert nodes.quarantined() == []


@pytest.mark.requirement("S5", "T9")
@pytest.mark.long(seconds=16)
def test_a_key_is_changed_while_both_daemons_run(nodes: Nodes) -> None:
    first, second = nodes.start(OLD), nodes.start(OLD)
    nodes.store(first, keys_of("before", 1))
    for daemon in (first, second):
        nodes.reload(daemon, OLD, NEW)
    for daemon in (first, second):
        nodes.reload(daemon, NEW, OLD)
    nodes.store(first, keys_of("after", 1))
    header = ObjectHeader.unpack(nodes.path(keys_of("after", 1)[0]).read_bytes()[:HEADER_BYTES])
    assert header.key_id == key_id(bytes.fromhex(NEW))
    with RawEngine(second.socket) as engine:
        assert load(engine, "before") == right("before")
        assert load(engine, "after") == right("after")
    for daemon in (first, second):
        nodes.reload(daemon, NEW, f"retired {key_id(bytes.fromhex(OLD)).hex()}")
    _without_ram(second)
    with RawEngine(second.socket) as engine:
        assert load(engine, "before") is None
        assert load(engine, "after") == right("after")
        nodes.store(second, keys_of("before", 1), engine)
    _without_ram(first)
    with RawEngine(first.socket) as engine:
        assert load(engine, "before") == right("before"), "stored again, with the new key"
    bad = len(second.log)
    nodes.write_keys(nodes.folder / "1.key", ("no key",))
    os.kill(second.pid, signal.SIGHUP)
    second.wait_for_log("configuration not reloaded", bad)
    _unreadable(nodes.folder / "1.key", second)
    assert not any(key in daemon.log for key in (OLD, NEW) for daemon in nodes.daemons)


def _unreadable(path: Path, daemon: DaemonProcess) -> None:
    """A start is refused with a key file that others can read, and the reason says what to do."""
    path.write_text(NEW)
    path.chmod(0o644)
    daemon.stop()
    before = len(daemon.log)
    daemon.start(ready=False)
    assert daemon.process is not None
    wait_until(lambda: "chmod 0600" in daemon.log[before:], "the reason", WAIT_SECONDS)
    assert daemon.process.wait(patient(WAIT_SECONDS)) == 1
    daemon.process = None


def _without_ram(daemon: DaemonProcess) -> None:
    """Start the daemon anew with an empty RAM tier."""
    daemon.kill()
    for path in daemon.arena_directory.iterdir():
        path.unlink()
    daemon.start()
    wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the tier is ready", WAIT_SECONDS)


def _open_to_everybody(root: Path) -> None:
    """As an export is that other users or machines can write to."""
    for path in (*root.parents, root, *root.rglob("*")):
        if path.is_relative_to(root):
            path.chmod(0o777 if path.is_dir() else 0o666)
        elif path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o001)
