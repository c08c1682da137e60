"""The daemon's end of a child process: what was meant for one is not sent to the next."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.io import child, child_stream
from kvdepot.server.io.child_stream import ChildStream


@pytest.mark.requirement("T5")
def test_what_came_while_no_process_ran_is_not_the_first_thing_that_the_next_one_hears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An opening process that hears anything before how to begin ends."""
    far: list[socket.socket] = []

    def spawned(module: str, arguments: Callable[[int], Sequence[object]], *, niceness: int) -> Any:
        near, child = socket.socketpair()
        near.setblocking(False)
        far.append(child)
        return None, near, os.dup(near.fileno())

    monkeypatch.setattr(child_stream, "spawn", spawned)

    async def run() -> None:
        stream = ChildStream(asyncio.get_running_loop(), lambda data: None)
        stream.send(b"compact")
        stream.start("module", lambda fd: ())
        stream.send(b"begin")
        assert far[0].recv(100) == b"begin"
        assert not stream.unsent
        asyncio.get_running_loop().remove_reader(stream.fileno())

    asyncio.run(run())
    far[0].close()


def test_a_child_imports_nothing_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is started in /tmp would run what another user has placed there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "platform.py").write_text("raise SystemExit(9)\n")
    process, ours, pidfd = child.spawn("platform", lambda fd: ())
    ours.close()
    os.close(pidfd)
    assert process.wait() == 0
