"""Files below a directory that others write to as well: a folder that was replaced by a symbolic link is not followed.

The directory itself is looked up by its path each time, because a mount may come and go. The folders below it are
resolved by openat2(2), in one call. Where the kernel or a filter of system calls lacks that, each folder is opened from
the one above it. What is done to a file is then done relative to its folder, so a change of a name has no effect.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from kvdepot.server.platform.durable_files import naming

_OPENAT2: Final = 437
"""Number of the system call, the same on all architectures. libc has no function for it."""
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_SYMLINKS_BENEATH: Final = 0x04 | 0x08  # RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
_LACKED: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EAGAIN})
"""No such call; a filter that does not know it (old seccomp profiles); something was renamed meanwhile."""
_LED_AWAY: Final = frozenset({errno.ELOOP, errno.EXDEV})


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW: Final = _OpenHow(_FOLDER, 0, _NO_SYMLINKS_BENEATH)


@contextmanager
def within(directory: str | Path, file: str) -> Iterator[tuple[str, int]]:
    """Yield a file's name and a descriptor of the folder that it is in, to be used together (`dir_fd`).

    Raise NotADirectoryError if a symbolic link is in the way, and OSError otherwise. The last part of the name is not
    looked at: the caller has to use O_NOFOLLOW or its like.
    """
    folder, _, name = file.rpartition("/")
    fd = open_folder(directory, folder)
    try:
        yield name, fd
    finally:
        os.close(fd)


def open_folder(directory: str | Path, folder: str) -> int:
    """Return a descriptor (O_PATH) of a folder below the directory; empty: of the directory. Raise as `within` does."""
    with naming("open", os.path.join(directory, folder)):  # noqa: PTH118 - in the way of every job
        root = os.open(directory, _FOLDER)
        if not folder:
            return root
        try:
            return _resolved(root, folder)
        finally:
            os.close(root)


def _resolved(root: int, folder: str) -> int:
    fd: int = _libc().syscall(_OPENAT2, root, os.fsencode(folder), ctypes.byref(_HOW), ctypes.sizeof(_HOW))
    if fd >= 0:
        return fd
    number = ctypes.get_errno()
    if number in _LACKED:
        return _walked(root, folder)
    if number in _LED_AWAY:
        number = errno.ENOTDIR  # as the walk finds it
    raise OSError(number, os.strerror(number))


def _walked(root: int, folder: str) -> int:
    above = root
    for name in folder.split("/"):
        if name in ("", ".", ".."):
            raise OSError(errno.ENOTDIR, f"{name!r} is no name of a folder")
        try:
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        finally:
            if above != root:
                os.close(above)
        above = fd
    return above


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    libc.syscall.restype = ctypes.c_long
    return libc
