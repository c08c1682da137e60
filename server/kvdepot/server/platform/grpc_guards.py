"""Limits of gRPC servers on sockets, and their addresses.

Peers that connect and send nothing must not take all descriptors.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final
from urllib.parse import quote

HANDSHAKE_SECONDS: Final = 3.0
"""For the first bytes of a connection, which a client sends at once."""
IDLE_SECONDS: Final = 300.0
"""Without a call, and an engine always has one: it watches the server's health. A client then connects again."""
_CONNECTIONS_MAX: Final = 4096
_CONNECTIONS_MIN: Final = 16
_SHARE_OF_DESCRIPTORS: Final = 4


def connections_max(listeners: int) -> int:
    """Return the connections that each listener may have: a quarter of the descriptors for all listeners together."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return max(min(descriptors // _SHARE_OF_DESCRIPTORS // listeners, _CONNECTIONS_MAX), _CONNECTIONS_MIN)


def address(path: Path) -> str:
    """Return a socket's address for gRPC, which reads a URI."""
    return f"unix:{quote(os.fsencode(path))}"


def guards(connections: int, idle_seconds: float = IDLE_SECONDS) -> tuple[tuple[str, int], ...]:
    """Return the options of a server with at most so many connections per listener."""
    return (
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", int(idle_seconds * 1000)),
    )
