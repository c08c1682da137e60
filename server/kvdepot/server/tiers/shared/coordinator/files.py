"""Files of a shared directory as its coordinator handles them: small ones replaced whole, and the server's clock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.platform.durable_files import naming, opened
from kvdepot.server.storage.shared_layout import TEMPORARIES

NANOSECONDS: Final = 1_000_000_000
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's are (stat(2))


def taken_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file occupies: its blocks, or its length in pages if the blocks are not known yet."""
    return max(status.st_blocks * _BLOCK_BYTES, -(-status.st_size // PAGE_BYTES) * PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Found:
    """A small file: what is in it, and when it was written, by the server's clock."""

    data: bytes
    mtime_ns: int
    device: int


def read_small(path: Path, bytes_max: int) -> Found | None:
    """Read a file, at most one byte more than `bytes_max`. Return None if it is not there. Raise OSError otherwise."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd, naming("read", path):
            status = os.fstat(fd)
            size_bytes = min(status.st_size, bytes_max + 1)  # no request for the end: a file is never written in place
            data = b""
            while len(data) < size_bytes and (more := os.read(fd, size_bytes - len(data))):
                data += more
            return Found(data, status.st_mtime_ns, status.st_dev)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise


def replace_small(root: Path, file: str, data: bytes, temporary: str) -> None:
    """Write a file whole or not at all. No folder is made. Raise OSError."""
    path = root / TEMPORARIES / temporary
    with naming("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with naming("write", path):
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)  # on NFS only this says whether it got there
    with naming("rename", root / file):
        path.replace(root / file)


class ServerClock:
    """The server's time, by what it stamped on a file written just now: no node's own clock is compared with it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._mtime_ns = 0

    def stamped(self, mtime_ns: int) -> None:
        self._at, self._mtime_ns = self._clock(), mtime_ns

    def age_seconds(self, mtime_ns: int) -> float:
        """Return the age of a file; never negative."""
        now_ns = self._mtime_ns + (self._clock() - self._at) * NANOSECONDS
        return max(now_ns - mtime_ns, 0) / NANOSECONDS
