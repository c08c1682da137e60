"""Files in directories where others may put something in their place: opened only where they are this user's own."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a regular file of this user that nobody else may write to; one that is made is so.

    Raises OSError; PermissionError, whose `strerror` says why, for what is another's. Neither a link is followed nor
    is a FIFO waited for.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return fd
    os.close(fd)
    reason = f"it is no regular file of uid {os.geteuid()} to which nobody else may write"
    raise PermissionError(errno.EPERM, reason, str(path))
