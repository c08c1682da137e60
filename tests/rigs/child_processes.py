"""The processes that another one has started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from kvdepot.proto.loaded_code import LoadedCode
from kvdepot.server.io.lifeline import CODE, PACKAGES

from tests.rigs import forked_children


def as_the_daemon_starts_it() -> dict[str, str]:
    """Return the environment of a child whose daemon has the code that is on the disk."""
    return {**os.environ, CODE: LoadedCode(*PACKAGES).digest}


def children(pid: int, module: bytes = b"") -> list[int]:
    """Return the children of a process whose command names `module`, those that wait for their parent included.

    What forks the children of a daemon that is a copy is none of them.

    /proc/PID/task/TID/children leaves out some if another one ends while it is read (proc(5)).
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            parent = stat.read_bytes().rpartition(b")")[2].split()[1]
            command = stat.with_name("cmdline").read_bytes() if int(parent) == pid else b""
            if int(parent) == pid and module in command and forked_children.NAME.encode() not in command:
                found.append(int(stat.parent.name))
    return sorted(found)


def kill(pids: Iterable[int]) -> None:
    """Kill children of a living process, which may end some of them itself meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
