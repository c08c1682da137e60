"""Files with secrets: read only if the right users can read them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path


def read_secret(path: Path, bytes_max: int, *, owners: Collection[int], forbidden: int, advice: str) -> bytes:
    """Return the bytes of a file of one of these users, whose mode has none of the `forbidden` bits.

    Raise OSError, or ValueError for a longer file; neither repeats anything of it. `advice` ends the text about a mode.
    A link is followed: a mounted secret is one. What counts is the file that was opened. A FIFO does not block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"it is of uid {found.st_uid}, and the daemon's uid is {os.geteuid()}")
        if found.st_mode & forbidden:
            raise OSError(errno.EPERM, f"its mode is {stat.S_IMODE(found.st_mode):04o}, and {advice}")
        data = os.read(fd, bytes_max + 1)
    finally:
        os.close(fd)
    if len(data) > bytes_max:
        raise ValueError(f"expected at most {bytes_max} bytes")
    return data
