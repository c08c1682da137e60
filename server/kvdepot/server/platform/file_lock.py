"""A lock file of one daemon: it keeps a second daemon off the arena or the socket."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Self

from kvdepot.core.errors import ArenaInUse
from kvdepot.server.platform.own_files import open_own

LOCK_SUFFIX = ".lock"
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lock_holder(path: Path) -> int | None:
    """Return the pid of the process that has the lock; 0: not known, None: nobody has it. Takes no lock."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE))
        text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return None
    return int(text) if text.isdecimal() else 0


def _lock(fd: int) -> bool:
    """Return whether the lock was taken: an OFD lock, which ends with the open file. Raise OSError."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody holds it
        return False
    return True


class FileLock:
    """An OFD lock (fcntl(2)): it belongs to the open file, so the kernel drops it with the process, however it ends.

    The file itself stays: unlinking it would let two daemons lock two files of one name.
    """

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock. Raise ArenaInUse, which names the holder, and OSError for a file that cannot be opened."""
        self.path = path
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        if not _lock(self._fd):
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            who = f"the daemon with pid {holder}" if holder else "another daemon"
            raise ArenaInUse(f"{what} is held by {who} (lock {path})")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    @property
    def descriptor(self) -> int:
        """The lock lasts as long as this descriptor is open in any process."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InodeLock:
    """An OFD lock of the file itself, whatever becomes of its name. Nothing is written into the file."""

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock if there is such a file. Raise ArenaInUse, and OSError."""
        self._what = what
        self._fd = -1
        try:
            fd = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            return
        self._take(fd)

    def follow(self, fd: int) -> None:
        """Lock the file of this descriptor instead, which may be another one by now. Raise as before.

        The descriptor itself may be passed on, and would keep the lock: the file is opened once more.
        """
        found = os.fstat(fd)
        if self._fd >= 0 and os.path.samestat(found, os.fstat(self._fd)):
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._take(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))

    def _take(self, fd: int) -> None:
        if not _lock(fd):
            os.close(fd)
            raise ArenaInUse(f"{self._what} is held by another daemon, whose lock file was deleted")
        self._fd = fd
