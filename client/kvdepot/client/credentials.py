"""Who is at the other end of a unix socket."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("iII")


class Credentials(NamedTuple):
    """Of the process that listened, connected or made the pair. `pid` is 0 in a namespace that does not see it."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return the kernel's word (SO_PEERCRED, unix(7)). Raise OSError."""
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
