"""What the daemon's child processes do when it is killed over answers that it had not read: they end, in silence."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.core.data_mapping import pack_parts
from kvdepot.server.io import checksum_wire, jobs
from kvdepot.server.tiers.disk.messages import REQUESTS, Begin

from tests.rigs.child_processes import as_the_daemon_starts_it
from tests.rigs.patience import patient

ARENA_BYTES = 1 << 20
CHILDREN = {
    "io.worker": jobs.JOBS.pack(jobs.Probe(".probe"), 1),
    "io.checksum_worker": checksum_wire.JOBS.pack(checksum_wire.Sum(2, ((0, 4096),)), 1),
    "tiers.disk.opener": REQUESTS.pack(Begin()),
}


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("module", CHILDREN)
def test_a_child_of_a_killed_daemon_ends_without_a_traceback(module: str, tmp_path: Path) -> None:
    arena_fd = os.memfd_create("arena")
    os.truncate(arena_fd, ARENA_BYTES)
    ours, theirs = socket.socketpair()
    arguments = {
        "io.worker": (pack_parts([(arena_fd, ARENA_BYTES)]), theirs.fileno(), os.getpid(), tmp_path, ""),
        "io.checksum_worker": (pack_parts([(arena_fd, ARENA_BYTES)]), theirs.fileno(), os.getpid()),
        "tiers.disk.opener": (theirs.fileno(), os.getpid(), tmp_path / "tier", 16 << 20, 1 << 20, 10),
    }[module]
    command = [sys.executable, "-m", f"kvdepot.server.{module}", *map(str, arguments)]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=(arena_fd, theirs.fileno()), stderr=subprocess.PIPE, env=as_the_daemon_starts_it()
        )
    try:
        ours.sendall(CHILDREN[module])
        assert select.select([ours], [], [], patient(30))[0], "no answer"
        ours.close()  # with the answer in it: the child's next word is answered by a reset
        _, log = process.communicate(timeout=patient(30))
        assert (process.returncode, log) == (0, b"")
    finally:
        process.kill()
        process.communicate()
        os.close(arena_fd)
