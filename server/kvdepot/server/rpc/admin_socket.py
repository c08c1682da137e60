"""The operators' sockets: accepts, reads who connected from the kernel, and passes the connection on to gRPC.

gRPC for Python does not show a peer's credentials, and takes no connection that somebody else accepted. So each
connection is joined to another one, on a socket that only the daemon's user may open. That one is bound to a random
name before it connects. gRPC tells handlers this name, and `peer` returns who has connected. A connection that did not
come this way has no name, and `peer` returns None for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kvdepot.server.platform.accepting import Acceptor, SpareDescriptors, bound_socket
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.peers import Peer, peer_of

CONNECTIONS_MAX: Final = 64
_NAME_BYTES: Final = 16
_BUFFER_BYTES_MAX: Final = 256 << 10
"""Of what one side has sent and the other has not taken: with more, the first is not read."""


class AdminSocket:
    """Owns the listening sockets and all connections. Everything runs on the loop's thread."""

    def __init__(
        self,
        inner: Path,
        *,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        spare: SpareDescriptors | None = None,
    ) -> None:
        """`inner`: the socket of the gRPC server that answers operators."""
        self._inner = inner
        self._loop = loop
        self._log = log
        self._spare = spare
        self._throttle = LogThrottle(loop.time)
        self._listeners: dict[Path, Acceptor] = {}
        self._peers: dict[str, Peer] = {}
        self._connections: dict[str, tuple[_Side, _Side]] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}

    def listen(self, path: Path, mode: int, group_id: int) -> None:
        """Bind and accept. Raise OSError. The caller holds the lock of the path, so an old file is nobody's."""
        listener = bound_socket(path, socket.SOCK_STREAM, mode, group_id)
        self._listeners[path] = Acceptor(
            listener, self._accepted, name="admin", loop=self._loop, log=self._log, throttle=self._throttle,
            spare=self._spare,
        )  # fmt: skip

    def peer(self, name: str) -> Peer | None:
        """Return who has a connection, by the name that gRPC has for it; None if it did not come this way."""
        return self._peers.get(name)

    def close(self) -> None:
        for path, listener in self._listeners.items():
            listener.close()
            path.unlink(missing_ok=True)
        self._listeners.clear()
        for task in self._joining.values():
            task.cancel()
        for sides in list(self._connections.values()):
            for side in sides:
                side.close()

    def _accepted(self, theirs: socket.socket) -> None:
        if len(self._peers) >= CONNECTIONS_MAX:
            if self._throttle.due("too many"):
                self._log.warning("admin: connection closed: %d connections are open", CONNECTIONS_MAX)
            theirs.close()
            return
        name = f"kvdepot-{secrets.token_hex(_NAME_BYTES)}"
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            peer = peer_of(theirs)
            ours.bind(f"\0{name}")
            ours.connect(os.fspath(self._inner))
        except OSError as error:
            if self._throttle.due(f"not joined: {error.errno}"):
                self._log.warning("admin: connection closed: %s", error.strerror or error)
            theirs.close()
            ours.close()
            return
        shown = f"unix-abstract:{name}"
        self._peers[shown] = peer
        self._joining[shown] = task = self._loop.create_task(self._join(shown, theirs, ours))
        task.add_done_callback(partial(self._joined, shown, theirs, ours))

    async def _join(self, shown: str, theirs: socket.socket, ours: socket.socket) -> None:
        inner = _Side(partial(self._ended, shown))
        outer = _Side(partial(self._ended, shown))
        inner.other, outer.other = outer, inner
        self._connections[shown] = (inner, outer)
        await self._loop.connect_accepted_socket(lambda: inner, ours)
        await self._loop.connect_accepted_socket(lambda: outer, theirs)
        for side in (inner, outer):
            side.begin()

    def _joined(self, shown: str, theirs: socket.socket, ours: socket.socket, task: asyncio.Task[None]) -> None:
        del self._joining[shown]
        if task.cancelled() or task.exception() is not None:
            theirs.close()
            ours.close()
            self._ended(shown)

    def _ended(self, shown: str) -> None:
        """Forget a connection, of which one side has ended, and close both sides."""
        self._peers.pop(shown, None)
        for side in self._connections.pop(shown, ()):
            side.close()


class _Side(asyncio.Protocol):
    """One of two joined connections: what arrives here is sent there."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.other: _Side | None = None
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()  # what came for this side before it was there
        self._closed = False

    def begin(self) -> None:
        """Read, once both sides are there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def send(self, data: bytes) -> None:
        """Send, or keep it until this side is there: asyncio of Python 3.11.2 reads although it was paused at once."""
        if self._transport is not None:
            self._transport.write(data)
        else:
            self._early += data

    def pause(self, *, paused: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close after what was sent before. A side that is not there yet closes as soon as it is."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_BUFFER_BYTES_MAX)
        transport.pause_reading()
        self._transport = transport
        if self._early:
            transport.write(bytes(self._early))
            self._early.clear()
        if self._closed:
            transport.close()

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.send(data)

    def pause_writing(self) -> None:
        assert self.other is not None
        self.other.pause(paused=True)

    def resume_writing(self) -> None:
        assert self.other is not None
        self.other.pause(paused=False)

    def connection_lost(self, error: Exception | None) -> None:
        del error  # closed or reset: all the same
        self._transport = None
        self._ended()
