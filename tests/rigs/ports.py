"""TCP ports of loopback that the kernel gives to nobody else."""

from __future__ import annotations

import socket


def held() -> socket.socket:
    """Return a socket that is bound to a port, and does not listen: who connects is refused, until it is closed.

    Whoever asks for this very port gets it nevertheless, as servers do that may start again (SO_REUSEADDR).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port
