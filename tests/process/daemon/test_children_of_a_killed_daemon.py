"""What the daemon's child processes do when it is killed over answers that it had not read: they end, in silence."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.server.io import checksum_wire
from kvdepot.server.io.jobs import Probe
from kvdepot.server.io.wire import pack_job
from kvdepot.server.tiers.disk.messages import Begin, pack

ARENA_BYTES = 1 << 20
CHILDREN = {
    "worker": pack_job(1, Probe(".probe", write=True)),
    "checksum_worker": checksum_wire.pack_job(1, 2, [(0, 4096)]),
    "disk_opener": pack(Begin()),
}


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("module", CHILDREN)
def test_a_child_of_a_killed_daemon_ends_without_a_traceback(module: str, tmp_path: Path) -> None:
    arena_fd = os.memfd_create("arena")
    os.truncate(arena_fd, ARENA_BYTES)
    ours, theirs = socket.socketpair()
    arguments = {
        "worker": (arena_fd, ARENA_BYTES, theirs.fileno(), os.getpid(), tmp_path, ""),
        "checksum_worker": (arena_fd, theirs.fileno(), ARENA_BYTES, os.getpid()),
        "disk_opener": (theirs.fileno(), os.getpid(), tmp_path / "tier", 16 << 20, 1 << 20),
    }[module]
    command = [sys.executable, "-m", f"kvdepot.server.io.{module}", *map(str, arguments)]
    with theirs:
        process = subprocess.Popen(command, pass_fds=(arena_fd, theirs.fileno()), stderr=subprocess.PIPE)
    try:
        ours.sendall(CHILDREN[module])
        assert select.select([ours], [], [], 30)[0], "no answer"
        ours.close()  # with the answer in it: the child's next word is answered by a reset
        _, log = process.communicate(timeout=30)
        assert (process.returncode, log) == (0, b"")
    finally:
        process.kill()
        process.communicate()
        os.close(arena_fd)
