"""Files in memory of which an arena is made: made, sealed, freed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from kvdepot.core.arena import PAGE_BYTES, FileId
from kvdepot.core.proc_text import HUGETLBFS
from kvdepot.server.config.memory_room import file_system

_FALLOC_FL_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_MFD_NOEXEC_SEAL = 0x08
"""Linux 6.3; demanded where vm.memfd_noexec is 2."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def new_file(path: Path, size_bytes: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.ftruncate(fd, size_bytes)
    return fd


def new_memory(path: Path, size_bytes: int) -> int:
    """Return a memfd of this size for good: every process can be given it, and none can cut it short.

    Of huge pages, if the file system of `path` has only such.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if file_system(path.parent) == HUGETLBFS:
        page_bytes = os.statvfs(path.parent).f_bsize
        flags |= os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(path.name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(path.name, flags)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # a file system without seals
        return False


def is_open_elsewhere(fd: int) -> bool:
    """Return whether another process may have opened the file, or may map what it opened; True if nobody can tell.

    The kernel grants a write lease to the only one who has opened a file to write. Who made a memfd, or was given its
    descriptor, has not opened it: here it is opened once more.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR) if is_sealed(fd) else fd
    try:
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGURG)  # not SIGIO, which would end this process
        fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        if own != fd:
            os.close(own)
    return False


def write_page(fd: int, page: bytes) -> None:
    """Write the first page with one system call, so that a SIGKILL leaves the old or the new one."""
    try:
        os.pwrite(fd, page, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with mmap.mmap(fd, PAGE_BYTES) as mapped:  # hugetlbfs has no write(2)
            mapped[: len(page)] = page


def close_all(files: Iterable[int]) -> None:
    for fd in files:
        os.close(fd)


def file_of(fd: int) -> FileId:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def free_pages(files: Iterable[int]) -> None:
    """Free all pages. Truncation was rejected: an engine that maps a file would get SIGBUS, not zeros."""
    for fd in files:
        size_bytes = os.fstat(fd).st_size
        if size_bytes:
            free_range(fd, 0, size_bytes)


def free_range(fd: int, start: int, length: int) -> None:
    """Free the pages of a part of a file, which then reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(length))
