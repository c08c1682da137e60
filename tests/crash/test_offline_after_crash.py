"""`kvdepotd fsck` on the directory of a real daemon: refused beside it, right after it was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.objectfile import MAGIC

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine, keys_of, status_of

OBJECTS = 60


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    tier = (
        f'[[tier]]\nname = "disk"\nkind = "disk"\npath = "{tmp_path / "disk"}"\ncapacity = "64MiB"\nwrite = "commit"\n'
    )
    with DaemonProcess(ram="600MiB", config=tier) as running:
        yield running


def fsck(root: Path) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "kvdepot.server.daemon.app", "fsck", str(root), "--json"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=patient(60))
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.requirement("T2")
def test_what_a_killed_daemon_leaves_is_whole_and_damage_is_found(daemon: DaemonProcess, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with RawEngine(daemon.socket) as engine:
        engine.store(keys_of("offline", OBJECTS))
        wait_until(lambda: status_of(daemon.socket).tiers[1].objects == OBJECTS, "all objects on disk")
        code, _, error = fsck(root)
        assert (code, f"held by the process with pid {daemon.pid}; stop the daemon first" in error) == (2, True)
        daemon.kill()
    wait_until(lambda: fsck(root)[0] != 2, "the last process of the daemon")
    code, found, _ = fsck(root)
    assert (code, found["outcomes"]) == (0, {"ok": OBJECTS})
    segment = root / "segments" / "00000.seg"
    data = bytearray(segment.read_bytes())
    data[data.index(MAGIC) + 5000] ^= 1
    segment.write_bytes(data)
    code, found, _ = fsck(root)
    assert (code, found["outcomes"]) == (1, {"ok": OBJECTS - 1, "torn": 1})
    daemon.start()
    wait_until(lambda: status_of(daemon.socket).tiers[1].objects == OBJECTS, "opened after fsck")
