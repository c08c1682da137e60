"""TCP sockets that listen."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any, Final

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Return sockets on every address of the host, which the caller closes. Raise OSError.

    A host may have names for addresses that it does not have, such as ::1 without IPv6. These are skipped.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is no name of a host") from error
    with contextlib.ExitStack() as undo:
        bound: list[socket.socket] = []
        absent: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                bound.append(undo.enter_context(_bind(family, address)))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if absent is not None and not bound:
            raise absent
        undo.pop_all()
    return bound


def _bind(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
