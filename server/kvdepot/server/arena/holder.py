"""Holds the files of an arena while no daemon has them: a memfd ends with its last descriptor (docs/adr/0069).

A process of its own, which `kvdepotd hold` or a daemon starts as a script: it imports nothing of the package, and takes
10 MiB. It listens on ARENA.hold. Every connection gets the descriptors that are held, of the tables and of what belongs
to them. A daemon stays connected and sends those of its arena, which replace the held ones.

While no daemon is connected, the files go when the name of the tables is gone: deleting that file frees the memory. A
holder that a daemon has started then ends. One whose socket has lost its name ends too, because no daemon finds it.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import struct
import sys

GREETING = b"kvdepot holder 2"
FORMER_GREETING = b"kvdepot holder 1"
"""Of a holder that can hold two files only."""
HOLD = b"hold"
CHECK_SECONDS = 2.0
"""How soon the memory of an arena is free after its name has gone."""
FILES_MAX = 128
"""The tables are first. The kernel passes up to 253."""
_UCRED = struct.Struct("iII")


class Holder:
    """Owns `listener`, whose name is `path`. With `stay` it also waits for a daemon while it holds nothing."""

    def __init__(self, listener: socket.socket, path: str, *, stay: bool) -> None:
        self._listener = listener
        self._path = path
        self._stay = stay
        self._held: list[int] = []
        self._daemons: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        listener.listen()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Return when there is nothing to hold, or when no daemon could find this holder."""
        while True:
            events = self._selector.select(None if self._daemons else CHECK_SECONDS)
            ready = [key.fileobj for key, _ in events]
            for one in ready:
                if one is not self._listener:
                    self._read(one)  # type: ignore[arg-type]
            if self._listener in ready:  # last: who connects gets what was sent before
                self._accept()
            if events or self._daemons:
                continue
            if self._held and not os.fstat(self._held[0]).st_nlink:
                self._drop()
            if (not self._held and not self._stay) or not os.path.exists(self._path):  # noqa: PTH110
                self._drop()
                return

    def _accept(self) -> None:
        try:
            daemon, _ = self._listener.accept()
        except OSError:  # gone already
            return
        daemon.setblocking(False)
        _, uid, _ = _UCRED.unpack(daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.geteuid():
            daemon.close()
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._held))] if self._held else []
        with contextlib.suppress(OSError):  # it may have gone, and left its files to be read
            daemon.sendmsg([GREETING], rights)
        self._daemons.add(daemon)
        self._selector.register(daemon, selectors.EVENT_READ)

    def _read(self, daemon: socket.socket) -> None:
        message, files = b"", list[int]()
        with contextlib.suppress(OSError):
            message, files, _, _ = socket.recv_fds(daemon, len(HOLD), FILES_MAX)
        if message == HOLD and files:
            self._drop()
            self._held = files
            with contextlib.suppress(OSError):
                daemon.send(HOLD)
            return
        for file in files:
            os.close(file)
        self._selector.unregister(daemon)
        self._daemons.remove(daemon)
        daemon.close()

    def _drop(self) -> None:
        for file in self._held:
            os.close(file)
        self._held = []


STAY = "stay"
"""Argument of a holder that a service manager starts, and not a daemon."""


def main(arguments: list[str]) -> int:
    """Serve the listening socket of this number and path. Without STAY, leave who started this process."""
    number, path, *rest = arguments
    stay = STAY in rest
    listens, tell = os.pipe()
    if not stay and os.fork():
        os.close(tell)
        os.read(listens, 1)  # until it is closed: who started this process connects now
        return 0
    os.chdir("/")
    holder = Holder(socket.socket(fileno=int(number)), path, stay=stay)
    os.close(listens)
    os.close(tell)
    holder.run()
    return int(stay)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
