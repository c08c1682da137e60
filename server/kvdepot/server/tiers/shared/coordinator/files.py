"""Files of a shared directory as its coordinator handles them: small ones replaced whole, and the server's clock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    PAGE_BYTES,
    ObjectDamageError,
    ObjectHeader,
    ObjectName,
    object_bytes,
)
from kvdepot.server.platform.beneath import within
from kvdepot.server.platform.durable_files import naming
from kvdepot.server.storage.shared_layout import TEMPORARIES

NANOSECONDS: Final = 1_000_000_000
_OBJECT_FILE_BYTES_MAX: Final = object_bytes(OBJECT_BYTES_MAX)
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's are (stat(2))


def taken_bytes(status: os.stat_result, *, by_blocks: bool = False) -> int:
    """Return the bytes that a file occupies: its blocks, or its length in pages if the blocks are not known yet.

    With `by_blocks`, and of a file that is longer than any object, the blocks alone count: a sparse file that nobody
    deletes would fill the tier.
    """
    by_blocks = by_blocks or is_oversized(status)
    length = 0 if by_blocks else -(-status.st_size // PAGE_BYTES) * PAGE_BYTES
    return max(status.st_blocks * _BLOCK_BYTES, length)


def is_oversized(status: os.stat_result) -> bool:
    """Return whether the file is longer than the largest object."""
    return status.st_size > _OBJECT_FILE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Found:
    """A small file: what is in it, and when it was written, by the server's clock."""

    data: bytes
    mtime_ns: int
    device: int


def read_small(root: Path, file: str, bytes_max: int) -> Found | None:
    """Read a file, at most one byte more than `bytes_max`. Return None if it is not there. Raise OSError otherwise."""
    path = root / file
    try:
        with opened_within(root, file, os.O_RDONLY | os.O_NONBLOCK) as fd, naming("read", path):
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


def read_name(root: Path, file: str) -> ObjectName | None:
    """Return the name in an object's header; None if there is none that can be read."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    with suppress(OSError, ObjectDamageError), opened_within(root, file, flags) as fd:
        return ObjectHeader.unpack(os.pread(fd, HEADER_BYTES, 0)).name
    return None


def replace_small(root: Path, file: str, data: bytes, temporary: str) -> None:
    """Write a file whole or not at all. No folder is made. Raise OSError."""
    new = f"{TEMPORARIES}/{temporary}"
    with (  # on NFS only closing says whether it got there
        opened_within(root, new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd,
        naming("write", root / new),
    ):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    rename_within(root, new, file)


@contextmanager
def opened_within(root: Path, file: str, flags: int) -> Iterator[int]:
    """Open a file for the block, without following a symbolic link. Errors name opening and closing."""
    with naming("open", root / file), within(root, file) as (name, folder):
        fd = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        with naming("close", root / file):
            os.close(fd)


def status_within(root: Path, file: str) -> os.stat_result:
    """Return the status of a file, or of the symbolic link that it is."""
    with naming("stat", root / file), within(root, file) as (name, folder):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def rename_within(root: Path, file: str, new: str) -> None:
    with (
        naming("rename", root / file, root / new),
        within(root, file) as (name, folder),
        within(root, new) as (name_then, there),
    ):
        os.rename(name, name_then, src_dir_fd=folder, dst_dir_fd=there)


def unlink_within(root: Path, file: str) -> None:
    with naming("unlink", root / file), within(root, file) as (name, folder):
        os.unlink(name, dir_fd=folder)


class ServerClock:
    """The server's time, by what it stamped on a file written just now: no node's own clock is compared with it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._mtime_ns = 0

    def stamped(self, mtime_ns: int) -> None:
        self._at, self._mtime_ns = self._clock(), mtime_ns

    def age_seconds(self, mtime_ns: int, same_since: float | None = None) -> float:
        """Return the age of a file; never negative.

        `same_since`: when this node's own clock has first met the file so. It counts for a file of a time to come: the
        server's clock was set back since, and says nothing of what was written before.
        """
        now_ns = self._mtime_ns + (self._clock() - self._at) * NANOSECONDS
        if now_ns < mtime_ns and same_since is not None:
            return self._clock() - same_since
        return max(now_ns - mtime_ns, 0) / NANOSECONDS
