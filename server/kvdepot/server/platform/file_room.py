"""Free space of a file system, checked before a file grows, so that a reserve always stays free.

A file system without a free byte fails every writer: the tier's own journal, other programs, other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from kvdepot.core.units import size_text
from kvdepot.server.platform.durable_files import LACKED, naming

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_INODES: Final = "no inodes left"
NOT_TRIED: Final = "stay free"
"""In what `check_room` says: nobody's room was touched."""
_SHARE_FOR_OTHERS: Final = 64
_FOR_OTHERS_BYTES_MAX: Final = 256 << 20
_SHARE_BESIDE: Final = 16
_PIECE_BYTES: Final = 16 << 20
"""Between two looks: others may grow at the same moment, and each of them overshoots by one piece at most."""
_ZEROS_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's are (stat(2))


def check_room(folder: str, wanted_bytes: int, beside_bytes: int = 0) -> int:
    """Raise OSError (ENOSPC) unless so much is free, and a reserve stays free for others and `beside_bytes`.

    Where the file system does not tell, its next answer has to do. Blocks that only root may take are not free.
    Return how much of `beside_bytes` the reserve has.
    """
    found = _statvfs(folder)
    if found is None or not found.f_blocks:
        return beside_bytes
    total_bytes, free_bytes = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    beside_bytes = min(beside_bytes, total_bytes // _SHARE_BESIDE)
    reserve_bytes = beside_bytes + min(total_bytes // _SHARE_FOR_OTHERS, _FOR_OTHERS_BYTES_MAX)
    if free_bytes < wanted_bytes + reserve_bytes:
        free, wanted, reserve = map(size_text, (free_bytes, wanted_bytes, reserve_bytes))
        reason = f"statvfs: {free} are free, {wanted} are wanted and {reserve} {NOT_TRIED}"
        raise OSError(errno.ENOSPC, reason, folder)
    return beside_bytes


def allocate(fd: int, path: str, length_bytes: int, beside_bytes: int) -> None:
    """Give the file all blocks up to this length and cut it there. Raises OSError: the caller cuts it back.

    What somebody has already written to it stays. `beside_bytes`: see `check_room`.
    """
    folder = os.path.dirname(path)  # noqa: PTH120
    found = os.fstat(fd)
    missing_bytes = max(length_bytes - found.st_blocks * _BLOCK_BYTES, 0)
    at = min(found.st_size, length_bytes) if found.st_blocks * _BLOCK_BYTES >= found.st_size else 0
    if missing_bytes:
        beside_bytes = check_room(folder, missing_bytes, beside_bytes)
    while at < length_bytes:
        end = min(at + _PIECE_BYTES, length_bytes)
        if missing_bytes:
            check_room(folder, end - at, beside_bytes)
        _extend(fd, path, at, end)
        at = end
    if missing_bytes:  # a quota that statvfs(2) does not show has its last byte, too
        _extend(fd, path, length_bytes, length_bytes + min(beside_bytes, _PIECE_BYTES))
    with naming("truncate", path):
        os.ftruncate(fd, length_bytes)


def explained(error: OSError) -> OSError:
    """Return the error, with the right name for a file system that has room but no inodes."""
    if error.errno == errno.ENOSPC and error.filename and NOT_TRIED not in (error.strerror or ""):
        found = _statvfs(os.path.dirname(os.fspath(error.filename)))  # noqa: PTH120
        if found is not None and found.f_files and not found.f_favail and found.f_bavail:
            call, named, _ = (error.strerror or "").rpartition(": ")
            error.strerror = f"{call}{named}{NO_INODES}"
    return error


def _extend(fd: int, path: str, start: int, end: int) -> None:
    """Extend a file, with zeros if the file system cannot allocate otherwise."""
    if start >= end:
        return
    with naming("fallocate", path):
        try:
            os.posix_fallocate(fd, start, end - start)
        except OSError as error:
            if error.errno not in LACKED:
                raise
        else:
            return
    at = max(start, os.fstat(fd).st_size)
    with naming("write", path):
        while at < end:
            done = os.pwrite(fd, bytes(min(end - at, _ZEROS_BYTES)), at)
            if not done:
                raise OSError(errno.EIO, "nothing was written")
            at += done


def _statvfs(folder: str) -> os.statvfs_result | None:
    with contextlib.suppress(OSError):
        return os.statvfs(folder)
    return None
