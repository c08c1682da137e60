"""The opening process of a disk tier: holds its directory's lock, recovers its index, compacts its journals.

Started by the daemon as `python -m kvdepot.server.tiers.disk.opener SOCKET_FD PARENT_PID DIRECTORY CAPACITY
QUARANTINE NICENESS`. It does what may block on the device and touches no payload. It ends with its parent, and then
the kernel drops the lock (docs/formats/disk.md, Opening).
"""

from __future__ import annotations

import gc
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvdepot.server.io.directory_guard import (
    WORKERS_LOCK,
    DirectoryHeldError,
    hold_for_daemon,
    read_token,
    renew_token,
)
from kvdepot.server.io.lifeline import die_with, exit_code
from kvdepot.server.io.waiting import readable
from kvdepot.server.platform.durable_files import naming
from kvdepot.server.platform.own_files import refuse_world_writable
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk.layout import DAEMON_LOCK
from kvdepot.server.tiers.disk.messages import (
    MESSAGES,
    REQUESTS,
    Begin,
    Failed,
    Held,
    Locked,
    Message,
    Request,
    Waiting,
)
from kvdepot.server.tiers.disk.opening import Opener, failed
from kvdepot.server.tiers.disk.records import BadFile
from kvdepot.server.tiers.disk.recovery import read_store

_RETRY_SECONDS = 0.1
_HELD_SECONDS = 1.0
"""A daemon that was killed just now is dead within it, and so is its opening process."""
_WATCH_SECONDS: Final = 1.0
_RECEIVE_BYTES = 1 << 16


def main(arguments: list[str]) -> int:
    socket_fd, parent = int(arguments[0]), int(arguments[1])
    root = Path(arguments[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the daemon, which drains first
    gc.disable()  # an index is millions of small objects, none of them in cycles
    link = _Link(socket.socket(fileno=socket_fd))
    begin = link.next(None)
    if not isinstance(begin, Begin):
        return 0
    guard = Guard(root, parent)
    for message in guard.lock(begin):
        link.send(message)
    if not guard.locked:
        return 1
    os.nice(int(arguments[5]))  # not before: a start waits for the verdict
    opener = Opener(root, int(arguments[3]), int(arguments[4]))
    while True:
        request = link.next(_WATCH_SECONDS)
        if request is None:
            if link.ended:
                return 0
        elif not isinstance(request, Begin):
            for answer in opener.answer(request):
                link.send(answer)
        if not guard.in_place():
            link.send(Failed(f"{root} is gone, or another directory is in its place", IoOutcome.GONE))
            return 1


class Guard:
    """The locks of a directory, on behalf of the daemon."""

    def __init__(self, root: Path, daemon_pid: int) -> None:
        self._root = root
        self._daemon_pid = daemon_pid
        self._fd = -1
        self.locked = False

    def lock(self, begin: Begin) -> Iterator[Message]:
        """Take the locks. The last message is Locked, Held or Failed.

        Waiting comes before that, once for each thing to wait for.
        """
        try:
            self._enter(begin)
            yield from self._hold()
            if self._fd >= 0:
                yield from self._admit(begin)
        except OSError as error:
            yield failed(error, self._root)

    def in_place(self) -> bool:
        """Return whether the locked file is still the one that others would open; False if that cannot be found out."""
        with suppress(OSError):
            held, found = os.fstat(self._fd), (self._root / DAEMON_LOCK).stat()
            return (held.st_ino, held.st_dev) == (found.st_ino, found.st_dev)
        return False

    def _enter(self, begin: Begin) -> None:
        """Check the directory, and make it if it may be made.

        A directory that was there before and is gone is not made again. It may be a mount, and the folder below it may
        belong to another disk. A disk that is mounted again may have another device number: its store says which it is.
        """
        if not begin.device:
            with naming("mkdir", self._root):
                self._root.mkdir(mode=0o700, exist_ok=True)
        with naming("stat", self._root):
            status = self._root.stat()
        refuse_world_writable(self._root, status)
        store_id = self._store_id()
        if begin.store_id and store_id not in ("", begin.store_id):
            raise OSError(0, "holds another store than before", os.fspath(self._root))
        if begin.device and status.st_dev != begin.device and not (store_id and begin.store_id):
            raise OSError(0, "is on another file system than before: not mounted?", os.fspath(self._root))

    def _store_id(self) -> str:
        """Return the id of the store that is there; empty if there is none, or none that is understood."""
        with suppress(OSError, BadFile):
            store = read_store(self._root)
            return store.store_id.hex() if store is not None else ""
        return ""

    def _hold(self) -> Iterator[Message]:
        refuse_at = time.monotonic() + _HELD_SECONDS
        told = False
        while True:
            try:
                self._fd = hold_for_daemon(self._root / DAEMON_LOCK, self._daemon_pid)
            except DirectoryHeldError as error:
                holder = error.holder
            else:
                return
            if holder.living and time.monotonic() > refuse_at:
                yield Held(holder.pid)
                return
            if not holder.living and not told:
                told = True
                yield Waiting(
                    f"a process of the daemon with pid {holder.pid}, which is dead, still holds {DAEMON_LOCK}"
                )
            _pause(_RETRY_SECONDS)

    def _admit(self, begin: Begin) -> Iterator[Message]:
        path = self._root / WORKERS_LOCK
        if begin.token and path.exists():
            token = read_token(path)
            if token != begin.token:
                why = "was opened by another daemon meanwhile, or restored: only a restart of this daemon takes it"
                yield Failed(f"{self._root} {why}", IoOutcome.GONE)
                return
        else:
            yield from self._renew(path)
            token = read_token(path)
        self.locked = True
        yield Locked(token, self._root.stat().st_dev)

    def _renew(self, path: Path) -> Iterator[Message]:
        told = False
        while renew_token(path, secrets.token_hex(16)) is None:
            if not told:
                told = True
                yield Waiting("I/O workers of an earlier daemon are still ending")
            _pause(_RETRY_SECONDS)


class _Link:
    """Blocking messages with the daemon."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self.ended = False

    def send(self, message: Message) -> None:
        """Send a message. Wait until the daemon takes it in: the stream of objects goes at the daemon's pace."""
        self._connection.sendall(MESSAGES.pack(message))

    def next(self, seconds: float | None) -> Request | None:
        """Return the next request. Return None after so many seconds without one, or at the end."""
        while True:
            for _, request in REQUESTS.take(self._received):
                return request
            if not readable(self._connection, seconds):
                return None
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                self.ended = True
                return None
            self._received += data


def _pause(seconds: float) -> None:
    """Sleep. This blocks the process, which has nothing else to do."""
    select.select([], [], [], seconds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
