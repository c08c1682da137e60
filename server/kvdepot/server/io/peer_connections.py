"""The connections of readers that a source has at once: new ones, and those of readers that it has answered.

A reader keeps its connections while it asks nothing, a minute long. So a source that many readers ask now and then
would have no room for most of them. Where room is short, the connection closes that has asked nothing for longest: its
reader connects again with its next question. Nobody makes room for a connection that is new, because anyone can open
one: it needs a certificate, and a first question that the daemon answers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CONNECTIONS_MAX: Final = 64
CONNECTIONS_PER_HOST_MAX: Final = 32
"""What the workers of one reader have at most. So one host leaves others some."""
NEW_MAX: Final = 48
"""New ones in addition, of all hosts. One host has at most as many as of the others."""
IDLE_SECONDS_MIN: Final = 1.0
"""Only a connection that has asked nothing for so long makes room for others."""


@dataclass(eq=False, slots=True)
class Connection:
    """A connection that is served. `waits_since`: for its next question; None while it asks, or is answered."""

    host: str
    stream: socket.socket | None = None
    waits_since: float | None = None


class Connections:
    """Every thread of the server calls this."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changing = threading.Lock()
        self._new: set[Connection] = set()
        self._known: set[Connection] = set()

    def enter(self, host: str) -> Connection | None:
        """Return a new connection of this host; None if there are too many new ones."""
        with self._changing:
            if len(self._new) >= NEW_MAX or _of(host, self._new) >= CONNECTIONS_PER_HOST_MAX:
                return None
            one = Connection(host)
            self._new.add(one)
            return one

    def waits(self, one: Connection, stream: socket.socket) -> bool:
        """Note that a connection was answered, and waits for its next question. Return whether there is room for it.

        Until `works`, another thread may shut the stream down. So the caller calls that before it closes the stream.
        """
        with self._changing:
            if one in self._new:
                if not self._has_room(one.host):
                    return False
                self._new.remove(one)
                self._known.add(one)
            one.stream, one.waits_since = stream, self._clock()
            return True

    def works(self, one: Connection) -> None:
        """Note that a connection is not to make room for others."""
        with self._changing:
            one.stream = one.waits_since = None

    def leave(self, one: Connection) -> None:
        with self._changing:
            self._new.discard(one)
            self._known.discard(one)

    def _has_room(self, host: str) -> bool:
        """Return whether another reader's connection may stay. Close the one that has waited longest, if it is full."""
        if _of(host, self._known) >= CONNECTIONS_PER_HOST_MAX:
            return self._close({one for one in self._known if one.host == host})
        return len(self._known) < CONNECTIONS_MAX or self._close(self._known)

    def _close(self, some: set[Connection]) -> bool:
        """Close one of these that waits. Return whether there was one."""
        before = self._clock() - IDLE_SECONDS_MIN
        waiting = [(one.waits_since, one) for one in some if one.waits_since is not None and one.waits_since <= before]
        if not waiting:
            return False
        _, one = min(waiting, key=lambda found: found[0])
        self._known.remove(one)
        assert one.stream is not None
        # Not the method of TLS: it changes the object, which the thread of this connection has in use.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(one.stream, socket.SHUT_RDWR)
        return True


def _of(host: str, some: set[Connection]) -> int:
    return sum(one.host == host for one in some)
