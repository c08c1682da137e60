"""Who may touch a tier's directory: one daemon, and no worker of another (docs/formats/disk.md, Opening).

Locks are OFD locks (fcntl(2)): they belong to the open file, so the kernel drops them with the
process. None of them is ever held by the daemon itself: closing a descriptor on a mount that
hangs would keep it from ending. On a file system that cannot be written to, a read lock must do:
nobody else can write to it either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.server.platform.durable_files import naming, opened
from kvdepot.server.platform.processes import read_boot_id, start_ticks

WORKERS_LOCK: Final = "workers.lock"
"""Name of the file in a guarded directory that every worker locks."""
_FLOCK = struct.Struct("hhqqi4x")
_CONTENT_BYTES_MAX = 128
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a FIFO for reading would wait for a writer."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The daemon for which a directory is locked, as far as the lock file says."""

    pid: int
    living: bool


class DirectoryHeldError(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"held for the daemon with pid {holder.pid}")
        self.holder = holder


def hold_for_daemon(path: Path, daemon_pid: int) -> int:
    """Lock `path` for a daemon; the descriptor holds the lock.

    Raise DirectoryHeldError, and OSError as open(2) does.
    """
    fd = _open(path)
    try:
        if not _lock(fd, path, exclusive=True):
            raise DirectoryHeldError(_holder(_content(fd, path)))
    except (OSError, DirectoryHeldError):
        os.close(fd)
        raise
    if _writable(fd):
        with contextlib.suppress(OSError):  # no room even for this: the lock alone must do
            _write(fd, f"{daemon_pid} {start_ticks(daemon_pid)} {read_boot_id().hex()}\n")
    return fd


def renew_token(path: Path, token: str) -> str | None:
    """Write a new token. Return the token that is in force. Raise OSError.

    Return None while a worker with the old token lives. If the file system cannot be written to at all, the old token
    stays in force.
    """
    fd = _open(path)
    try:
        if not _lock(fd, path, exclusive=True):
            return None
        if not _writable(fd):
            return _content(fd, path)
        with naming("write", path):
            _write(fd, f"{token}\n")
        return token
    finally:
        with naming("close", path):
            os.close(fd)


def read_token(path: Path) -> str:
    """Return the token, or an empty text if there is none. Raise OSError."""
    with opened(path, _READ) as fd:
        return _content(fd, path)


def enter(path: Path, token: str) -> int | None:
    """Take a worker's lock. Return its descriptor; the lock lasts as long as the descriptor is open.

    Return None if the token has changed or is being changed. Raise OSError. The lock is taken first, and the token is
    read after that: no process changes the token while another one holds the lock.
    """
    with naming("open", path):
        fd = os.open(path, _READ)
    try:
        if _lock(fd, path, exclusive=False) and _content(fd, path) == token:
            return fd
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _open(path: Path) -> int:
    with naming("open", path):
        return _open_writable(path)


def _open_writable(path: Path) -> int:
    """Open the file for writing, or for reading only on a read-only file system."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, _READ)


def _lock(fd: int, path: Path, *, exclusive: bool) -> bool:
    """Return whether the lock was taken. Raise OSError if the file system has no locks.

    Without locks, nobody could tell which other processes write.
    """
    kind = fcntl.F_WRLCK if exclusive and _writable(fd) else fcntl.F_RDLCK
    try:
        with naming("fcntl (lock)", path):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # somebody holds it
            return False
        raise
    return True


def _writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def _write(fd: int, text: str) -> None:
    os.pwrite(fd, text.encode(), 0)
    os.ftruncate(fd, len(text))


def _content(fd: int, path: Path) -> str:
    with naming("read", path):
        return os.pread(fd, _CONTENT_BYTES_MAX, 0).decode("ascii", "replace").strip()


def _holder(content: str) -> Holder:
    """Return the holder that the lock file names.

    A lock without a readable holder was just taken: its holder lives.
    """
    words = content.split()
    if len(words) != 3 or not words[0].isdigit():
        return Holder(0, living=True)
    pid = int(words[0])
    return Holder(pid, living=words[2] == read_boot_id().hex() and str(start_ticks(pid)) == words[1])
