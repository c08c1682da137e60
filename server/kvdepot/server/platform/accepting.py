"""Accepts connections on a host that may have no descriptors left: no busy loop, and one log line per error.

A listening socket stays readable while its connections cannot be accepted. asyncio's own server then polls it in a
loop, and logs a traceback each time. An acceptor pauses instead. Before a pause it closes spare descriptors, which are
reserved for listeners that must answer when descriptors are scarce.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.server.platform.logs import LogThrottle

BACKLOG: Final = 256
PAUSE_SECONDS: Final = 0.5
SPARE_DESCRIPTORS: Final = 16
"""For an attachment five at once, three of them for as long as it lasts; for a look at /healthz one."""
_SHARE_OF_DESCRIPTORS: Final = 16
_SILENT_MIN: Final = 4
_GIVEN_UP_SECONDS: Final = 2.0
"""An attachment needs the others some moments after its connection was accepted."""
_ACCEPTS_PER_EVENT: Final = 64
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
_OF_THE_PEER: Final = frozenset(
    {errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET,
     errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH}
)  # fmt: skip
"""What accept(2) says of a connection that is gone already: the next one may be good."""


def silent_max(most: int) -> int:
    """Return how many silent connections a listener may have at a time: few if descriptors are few."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return most
    return max(min(most, descriptors // _SHARE_OF_DESCRIPTORS), _SILENT_MIN)


class SpareDescriptors:
    """Descriptors that are open for nothing, and closed when a listener that has to answer finds none.

    They go with this object, also where what it was made for could not start.
    """

    def __init__(self, count: int, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._count = count
        self._log = log
        self._clock = clock
        self._throttle = LogThrottle(clock)
        self._held: list[int] = []
        weakref.finalize(self, _close, self._held)
        self._refill_at = clock()
        self.refill()

    def give_up(self) -> bool:
        """Close them. False: there was none."""
        any_held = bool(self._held)
        _close(self._held)
        self._refill_at = self._clock() + _GIVEN_UP_SECONDS
        return any_held

    def refill(self) -> None:
        """Open those that are missing, as far as there is one. Cheap where none is missing."""
        if self._clock() < self._refill_at:
            return
        try:
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if self._throttle.due("spare descriptors"):
                self._log.warning(
                    "descriptors are scarce: %s; new connections and files may wait; raise LimitNOFILE (or --ulimit"
                    " nofile), or find the process that keeps connections open", error.strerror,
                )  # fmt: skip


def bound_socket(path: Path, kind: socket.SocketKind, mode: int, group_id: int) -> socket.socket:
    """Return a unix socket bound to `path`, with this mode and group (-1: as it is). Raise OSError.

    The caller holds the lock of the path, so an old file there is nobody's. The process's umask keeps other users out
    until the mode is set.
    """
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        bound.bind(os.fspath(path))
        os.chown(path, -1, group_id)
        path.chmod(mode)
    except OSError:
        bound.close()
        raise
    return bound


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


class Acceptor:
    """Owns one listening socket. `accepted` takes each connection over, which does not block.

    Everything runs on the loop's thread. `name` is for the log.
    """

    def __init__(
        self, listener: socket.socket, accepted: Callable[[socket.socket], None], *,
        name: str, loop: asyncio.AbstractEventLoop, log: logging.Logger, throttle: LogThrottle,
        spare: SpareDescriptors | None = None, pause_seconds: float = PAUSE_SECONDS,
    ) -> None:  # fmt: skip
        self._listener = listener
        self._accepted = accepted
        self._name = name
        self._loop = loop
        self._log = log
        self._throttle = throttle
        self._spare = spare
        self._pause_seconds = pause_seconds
        self._resuming: asyncio.TimerHandle | None = None
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more. What was accepted stays."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _resume(self) -> None:
        self._resuming = None
        try:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        except OSError as error:  # the kernel has no room to watch it (epoll_ctl(2)): nobody else would try again
            self._resume_later(error)

    def _accept(self) -> None:
        gone: OSError | None = None
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                gone = error
                if error.errno in _OF_THE_PEER:
                    continue
                if error.errno in _NO_DESCRIPTOR and self._spare is not None and self._spare.give_up():
                    continue
                break  # the peer stays in the backlog and is met again
            gone = None
            peer.setblocking(False)
            self._accepted(peer)
        if gone is not None:
            self._pause(gone)

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._resume_later(error)

    def _resume_later(self, error: OSError) -> None:
        if self._throttle.due(f"{self._name}: {error.errno}"):
            self._log.warning("%s: cannot accept: %s", self._name, error)
        self._resuming = self._loop.call_later(self._pause_seconds, self._resume)
