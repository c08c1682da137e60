"""Files in directories where other users may place files: opened only if they are this user's own."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file of this user that no other user may write to, created if requested.

    Raise OSError, or PermissionError, whose `strerror` says why, for another user's file. Links are not followed,
    and a FIFO does not block.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return fd
    os.close(fd)
    reason = f"it is no regular file of uid {os.geteuid()} to which nobody else may write"
    raise PermissionError(errno.EPERM, reason, str(path))


def refuse_world_writable(folder: Path, status: os.stat_result) -> None:
    """Raise PermissionError if every user may create files in a folder.

    The sticky bit is not enough: with it, another user can still create a name before the daemon does.
    """
    if status.st_mode & stat.S_IWOTH:
        reason = "every user may write to it: run `chmod o-w`, or name a folder in it that belongs to the daemon's user"
        raise PermissionError(errno.EACCES, reason, str(folder))
