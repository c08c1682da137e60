"""A peer as one thread of a reader's worker has it: one connection, and every failure an OSError (ADR 78).

Only workers and the scout import this module. A connection that hangs is ended with its worker.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from math import inf
from typing import Final

from kvdepot.server.io.framing import FrameError
from kvdepot.server.io.peer_wire import (
    ALPN,
    ALPN_NIXL,
    FROM_READER,
    TO_READER,
    Exact,
    Lane,
    PeerSettings,
    Question,
    Reply,
    Return,
    Returned,
    receive_into,
)
from kvdepot.server.platform.certificates import names_of
from kvdepot.server.platform.tls_files import CONNECTION_SECONDS_MAX

ADDRESSES_MAX: Final = 4
"""Of one name, that are tried one after the other."""
_CONNECT_PART: Final = 4
"""Connecting takes at most this part of the time of one step, half of the daemon's deadline: all addresses together."""
_AGAIN: Final = 2
"""Times that a question is asked: a source may close an idle connection at the moment of a question."""


class Peer:
    """A connection to the source, made when it is needed. Raises OSError with EIO, or EACCES where it is refused."""

    def __init__(self, settings: PeerSettings, no_nixl: str = "", *, answer_seconds: float = inf) -> None:
        """Build it without a connection. `no_nixl`: why this process cannot read over NIXL, if it is to.

        `answer_seconds`: how long all of an answer may take, if nobody ends this process when it takes too long.
        """
        self._answer_seconds = answer_seconds
        self._until = inf
        self._settings = settings
        self._no_nixl = no_nixl
        wants = settings.lane is Lane.NIXL and not no_nixl
        self._protocols = [ALPN_NIXL, ALPN] if wants else [ALPN]
        self._connection: ssl.SSLSocket | None = None
        self._ends_at = 0.0
        self._last_context: ssl.SSLContext | None = None

    def use(self, settings: PeerSettings) -> None:
        """Ask this peer from now on, over the same lane. Nothing has been asked yet."""
        self._settings = settings

    def connect(self) -> None:
        """Connect, unless there is a connection that is not too old, and check who answers.

        The source ends an old one too, but it may be one that the CA does not trust any more.
        """
        if self._connection is not None and time.monotonic() >= self._ends_at:
            self.close()
        if self._connection is None:
            self._connection = self._connected()
            self._ends_at = time.monotonic() + CONNECTION_SECONDS_MAX

    def lends(self) -> bool:
        """Connect, and return whether the source lends over NIXL, and this process may borrow."""
        self.connect()
        return self._connection is not None and self._connection.selected_alpn_protocol() == ALPN_NIXL

    @property
    def lane(self) -> str:
        """Return what objects come over by this connection. If it is not what is configured, say why after a colon."""
        if self._settings.lane is Lane.STREAM or self._connection is None:
            return Lane.STREAM
        if self._connection.selected_alpn_protocol() == ALPN_NIXL:
            return Lane.NIXL
        return f"{Lane.STREAM}: {self._no_nixl or 'the peer lends nothing over NIXL'}"

    def ask(self, question: Question) -> Reply:
        """Return the answer. If it is `Leased`, `receive` has to take all of the object next; `Lent`: `give_back`."""
        frame = FROM_READER.pack(question)
        for left in reversed(range(_AGAIN)):
            before = self._connection
            self.connect()
            assert self._connection is not None
            used = self._connection is before
            self._until = time.monotonic() + self._answer_seconds
            try:
                self._connection.sendall(frame)
                found = TO_READER.read(Exact(self._receive))
            except (OSError, FrameError) as error:
                self.close()
                if not (left and used and isinstance(error, ConnectionError | ssl.SSLEOFError)):
                    raise self._failed(error) from error
                continue
            if found is not None:
                return found[1]
            self.close()
            if not (left and used):
                break
        raise self._failed("it has closed the connection")

    def _receive(self, buffer: memoryview) -> int:
        """Take what comes of an answer. Raise OSError when it is late."""
        assert self._connection is not None
        if self._until < inf:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("its answer takes too long")
            self._connection.settimeout(left)
        return self._connection.recv_into(buffer)

    def receive(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes of the object. Raise OSError if the source does not send all of them."""
        assert self._connection is not None
        try:
            filled = receive_into(self._connection.recv_into, buffer)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        if filled < len(buffer):
            self.close()
            raise self._failed("it has closed the connection within an object")

    def give_back(self) -> bool:
        """Say that all that was lent is here. Return whether it was lent until now: nothing was reused before."""
        assert self._connection is not None
        try:
            self._connection.sendall(FROM_READER.pack(Return()))
            found = TO_READER.read(Exact(self._connection.recv_into))
        except (OSError, FrameError):
            found = None
        if found is not None and isinstance(found[1], Returned):
            return True
        self.close()
        return False

    def close(self) -> None:
        """Close the connection. The next question opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> ssl.SSLSocket:
        settings = self._settings
        raw: socket.socket | None = None
        try:
            raw = _dialled(settings)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._context().wrap_socket(raw, server_hostname=settings.host)
        except (OSError, ValueError) as error:
            if raw is not None:
                raw.close()
            raise self._failed(error) from error
        names = names_of(ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode())
        if connection.selected_alpn_protocol() in self._protocols and set(names) & set(settings.names):
            return connection
        connection.close()
        if set(names) & set(settings.names):
            raise self._failed(f"it does not speak {ALPN}")
        raise OSError(errno.EACCES, f"{self._place}: no name of its certificate is that of a peer: {', '.join(names)}")

    def _context(self) -> ssl.SSLContext:
        """Read the files: they may have been renewed. While they do not fit together, use what they had before."""
        try:
            self._last_context = self._made_context()
        except (OSError, ValueError):
            if self._last_context is None:
                raise
        return self._last_context

    def _made_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # who it is decide the names of peers: an address is none of them
        context.load_verify_locations(self._settings.ca)
        context.load_cert_chain(self._settings.cert, self._settings.key, password=str)
        context.set_alpn_protocols(self._protocols)
        return context

    @property
    def _place(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"

    def _failed(self, why: object) -> OSError:
        """Return an error that says nothing of an object, whatever the number of its cause is."""
        return OSError(errno.EIO, f"{self._place}: {why or type(why).__name__}")


def _dialled(settings: PeerSettings) -> socket.socket:
    """Connect to the first address that answers. A name is resolved each time: it may have moved. Raise OSError."""
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(one[4][:2] for one in found))[:ADDRESSES_MAX]
    seconds = settings.timeout_seconds / _CONNECT_PART / len(addresses)
    failure = OSError()
    for host, port in addresses:
        try:
            connection = socket.create_connection((str(host), int(port)), seconds)
        except OSError as error:
            failure = error
        else:
            connection.settimeout(settings.timeout_seconds)
            return connection
    raise failure
