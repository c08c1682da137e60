"""Who connected to a unix socket, as the kernel says it (unix(7)): never what the peer says of itself."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.server.platform.processes import has_ended, open_pidfd, peer_credentials

_SO_PEERGROUPS: Final = 59
"""Linux 4.13; Python's socket module has no name for it."""
_GROUPS_BYTES_MAX: Final = 1024
"""The most that Python reads of an option: 256 groups. A process with more has its first group alone."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. `pid` 0: in a PID namespace that is not visible from here.

    `executable` and `command` are empty if the kernel does not show them: only root, or the same user, may read the
    first. A process chooses both, so no right depends on them.
    """

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]
    executable: str = ""
    command: str = ""


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer of a connection. Raise OSError if the kernel does not name it."""
    pid, uid, gid = peer_credentials(connection)
    executable, command = _names(pid)
    return Peer(pid, uid, gid, frozenset((gid, *groups_of(connection))), executable, command)


def groups_of(connection: socket.socket) -> array.array[int]:
    """Return the supplementary groups that the peer had when it connected."""
    found = array.array("I")
    with contextlib.suppress(OSError):  # more groups than fit: fewer rights, never more
        found.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX))
    return found


def _names(pid: int) -> tuple[str, str]:
    """Return (executable, command) of a living process, else empty texts: its pid may be another's by now."""
    try:
        pidfd = open_pidfd(pid)
    except OSError:
        pidfd = None
    if pidfd is None:
        return "", ""
    try:
        executable = command = ""
        with contextlib.suppress(OSError):
            executable = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 - a text
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/comm").read_bytes().decode("utf-8", "replace").removesuffix("\n")
        return ("", "") if has_ended(pidfd) else (executable, command)
    finally:
        os.close(pidfd)
