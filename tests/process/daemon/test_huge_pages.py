"""An arena of huge pages: what it serves, adopts and reads from a disk (I1, T2, T6)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_node import daemon, ram, reboot, wait_ready, wait_written
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of

OBJECTS = 12
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture(params=["sealed", pytest.param("file", marks=pytest.mark.long(seconds=10))])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DaemonProcess]:
    if os.geteuid():
        pytest.skip("asking the kernel for huge pages needs root")
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    node = daemon(disk)
    node.touched = True
    usual = node.arena_directory
    try:
        with _advised() if request.param == "sealed" else _mounted(node, memory):
            node.start()
            if not _huge_share(node):
                pytest.skip("no huge page is free on this host, or it may not make any (shmem_enabled=deny)")
            yield node
            node.close()
    finally:
        node.close()
        shutil.rmtree(usual, ignore_errors=True)


@contextmanager
def _advised() -> Iterator[None]:
    """Let the kernel give huge pages to the shared memory of programs that ask for them."""
    before = SHMEM_ENABLED.read_text().partition("[")[2].partition("]")[0]
    SHMEM_ENABLED.write_text("advise")
    try:
        yield
    finally:
        SHMEM_ENABLED.write_text(before)


@contextmanager
def _mounted(node: DaemonProcess, memory: Path) -> Iterator[None]:
    """Have the arena's files on a tmpfs with huge pages."""
    options = "huge=within_size,size=2g"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", memory], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this kernel's tmpfs has no huge pages: {mounted.stderr.strip()}")
    node.arena_directory = memory
    node.config = f"{node.config}\n[ram]\nsealed = false\n"
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", memory], check=True)  # a worker may be ending


def _huge_share(node: DaemonProcess) -> float:
    """Of the arena, as the daemon maps it."""
    mappings = Path(f"/proc/{node.pid}/smaps").read_text().partition(".arena.data")[2]
    (line,) = [line for line in mappings.splitlines()[:30] if line.startswith("ShmemPmdMapped")]
    return (int(line.split()[1]) << 10) / node.data.stat().st_size


def _loaded(node: DaemonProcess, keys: list[bytes]) -> None:
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        assert engine.load(keys) == [payload_of(key) for key in keys]


@pytest.mark.requirement("T2", "T6", "I1")
def test_objects_are_served_adopted_and_read_from_a_disk(node: DaemonProcess) -> None:
    keys = keys_of("huge", OBJECTS)
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        engine.store(keys)
        wait_written(engine, OBJECTS)
    _loaded(node, keys)

    node.kill()
    node.start()
    with RawEngine(node.socket) as engine:
        assert ram(engine).objects == OBJECTS
    _loaded(node, keys)

    reboot(node)
    _loaded(node, keys)


@pytest.mark.requirement("T2", "T6", "I1")
def test_a_tier_that_takes_memory_of_huge_pages_leaves_what_lies_before(node: DaemonProcess) -> None:
    keys, later = keys_of("before", OBJECTS), keys_of("after", OBJECTS)
    with RawEngine(node.socket) as engine:
        wait_ready(engine)
        engine.store(keys)
        wait_written(engine, OBJECTS)
        before = ram(engine).ready_bytes
    assert node.config is not None
    node.stop()
    node.config = node.config.replace('write = "commit"', 'write = "commit"\nio_workers = 4')
    node.start()
    assert "RAM shrinks" in node.log and "recreated" not in node.log
    with RawEngine(node.socket) as engine:
        assert ram(engine).objects == OBJECTS
        wait_until(lambda: ram(engine).state == "ready", "it is whole again")
        assert ram(engine).ready_bytes < before
    _loaded(node, keys)
    with RawEngine(node.socket) as engine:
        engine.store(later)
    _loaded(node, later)
