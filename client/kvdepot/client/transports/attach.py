"""The attachment socket: one datagram each way, and descriptors with the answer."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.errors import KvDepotError
from kvdepot.core.limits import ATTACH_DATAGRAM_BYTES_MAX
from kvdepot.proto import codec

if TYPE_CHECKING:
    from collections.abc import Iterable

_DESCRIPTORS_MAX = 8
"""Room for more than the three that may be due, so that an unexpected one is closed and not lost."""


class AttachError(Exception):
    """Not attached. `by_daemon`: the daemon said no. `in_time` is False if it did not answer. Else it is not there."""

    def __init__(self, message: str, *, by_daemon: bool, in_time: bool = True) -> None:
        super().__init__(message)
        self.by_daemon = by_daemon
        self.in_time = in_time


@dataclass(frozen=True, slots=True)
class Attached:
    """An accepted attachment. The connection is the liveness; descriptors and call socket are the caller's to close.

    The descriptors are those of the arena's data and generations, or, where the reply names a stream, that of the
    proxy's lifeline. There are none where fewer of them than due have `arrived`: something between the two processes
    took them away, or the daemon is of a version that sends fewer.
    """

    connection: socket.socket
    reply: AttachReply
    descriptors: tuple[int, ...]
    calls: socket.socket | None = None
    arrived: int = 0

    def close(self) -> None:
        """Close the connection and what came with it."""
        if self.calls is not None:
            self.calls.close()
        _close(self.connection, self.descriptors)


def attach(path: str, call: AttachCall, timeout_seconds: float) -> Attached:
    """Connect, ask, and take the answer. Raises AttachError; blocks for at most about `timeout_seconds` a step."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:  # no descriptor left
        raise AttachError(_reason(error), by_daemon=False) from error
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(path)
        connection.send(codec.encode_attach_call(call))
        datagram, descriptors = _receive(connection)
        if not datagram:
            raise AttachError("the daemon closed the connection", by_daemon=False)
        reply = codec.decode_attach_reply(datagram)
        if not reply.protocol:
            raise AttachError(reply.error or "refused without a reason", by_daemon=True)
        due = (1 if reply.stream else 2) + reply.calls
        if len(descriptors) > due:
            raise AttachError(f"the answer carries {len(descriptors)} descriptors", by_daemon=True)
        arrived = len(descriptors)
        if arrived < due:  # something has taken some away: nobody knows which ones are left
            _close_all(descriptors)
            descriptors = []
        calls = socket.socket(fileno=descriptors.pop()) if reply.calls and descriptors else None
    except AttachError:
        _close(connection, descriptors)
        raise
    except (OSError, KvDepotError) as error:
        _close(connection, descriptors)
        by_daemon, in_time = isinstance(error, KvDepotError), not isinstance(error, TimeoutError)
        raise AttachError(_reason(error), by_daemon=by_daemon, in_time=in_time) from error
    connection.settimeout(None)
    return Attached(connection, reply, tuple(descriptors), calls, arrived)


def _reason(error: Exception) -> str:
    """Return the system's words without the number, because operators read them."""
    if isinstance(error, TimeoutError):
        return "the daemon did not answer in time"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Like `socket.recv_fds`, but the descriptors are closed on exec from the beginning."""
    room = socket.CMSG_LEN(_DESCRIPTORS_MAX * 4)
    data, ancillary, _, _ = connection.recvmsg(ATTACH_DATAGRAM_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, list(descriptors)


def _close(connection: socket.socket, descriptors: Iterable[int]) -> None:
    connection.close()
    _close_all(descriptors)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
