"""When files are read and written past the page cache, and when what is read may go to the arena at once (I6)."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvdepot.server.io import direct_io
from kvdepot.server.io.context import Context
from kvdepot.server.io.perform import perform
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_rig import MIB, PAGE, IoRig, pattern


@pytest.fixture
def context(rig: IoRig) -> Iterator[Context]:
    context = Context(os.fspath(rig.directory), rig.arena)
    yield context
    context.close()


NFS, OVERLAY = 0x6969, 0x794C7630


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("file_system", [NFS, 0, OVERLAY])
def test_a_killed_process_s_request_fills_no_pages_later(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch, file_system: int
) -> None:
    """So O_DIRECT is for file systems alone that are known to wait for it; 0: it could not be asked for."""
    flags: set[int] = set()
    into_the_arena: list[bool] = []
    arena = np.frombuffer(rig.arena, np.uint8)
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def moving(
            fd: int, buffers: list[memoryview], offset: int, real: Any = real, reads: bool = name[1] == "r"
        ) -> int:
            flags.add(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            if reads:
                into_the_arena.append(any(np.shares_memory(np.frombuffer(one, np.uint8), arena) for one in buffers))
            return int(real(fd, buffers, offset))

        monkeypatch.setattr(os, name, moving)
    monkeypatch.setattr(direct_io, "file_system", lambda fd: file_system)
    monkeypatch.setattr(direct_io, "_OWN_BYTES", 16 * PAGE)
    write = rig.write(1, MIB + 5, fragments=2)
    read = rig.read_of(write, fragments=3)
    direct = file_system == OVERLAY
    for job in (write, read):
        answer = perform(job, context)
        assert (answer.outcome, answer.direct) == (IoOutcome.OK, direct)
    assert read.extents is not None
    assert rig.taken(read.extents) == pattern(MIB + 5, 1)
    assert flags == {os.O_DIRECT if direct else 0}
    assert any(into_the_arena) == direct
    assert direct or len(into_the_arena) > MIB // (16 * PAGE), "piece by piece"


@pytest.mark.requirement("I6")
def test_nor_where_o_direct_is_refused_as_well(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: str, flags: int, *rest: int, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    write = rig.write(1, MIB + 5)
    assert perform(write, context).outcome is IoOutcome.OK
    assert context.files._own is None, "a local file system"
    monkeypatch.setattr(direct_io, "file_system", lambda fd: NFS)
    other = Context(os.fspath(rig.directory), rig.arena)
    read = rig.read_of(write)
    assert perform(read, other).outcome is IoOutcome.OK
    assert other.files._own is not None
    assert read.extents is not None
    assert rig.taken(read.extents) == pattern(MIB + 5, 1)
    other.close()


@pytest.mark.requirement("I6")
def test_the_file_system_is_asked_of_the_kernel(tmp_path: Path) -> None:
    for directory in ("/dev/shm", tmp_path):
        said = subprocess.run(["stat", "-f", "-c", "%t", directory], check=True, capture_output=True, text=True)
        fd = os.open(directory, os.O_RDONLY)
        assert direct_io.file_system(fd) == int(said.stdout, 16)
        os.close(fd)
    assert direct_io.file_system(fd) == 0, "closed"
