"""Files that are whole and durable as soon as their names exist, also if a file system lacks a call."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

TEMPORARY: Final = ".tmp"
"""At the end of the name of what is not published yet."""
LACKED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
"""What a call answers that the file system does not have. SMB, sshfs, 9p and many FUSE servers lack some."""
_NO_DIRECTORY_SYNC: Final = LACKED | {errno.EBADF}
_NAMED: Final = ": "
"""Follows the name of a call; no text of an errno has it."""
_WRITE_BYTES: Final = 1 << 20


@contextlib.contextmanager
def naming(call: str, path: str | Path, to: str | Path | None = None) -> Iterator[None]:
    """Have an OSError of a system call say which call it was, and of which file. The innermost name counts.

    `to`: the second file of a call that is given names relative to folders. Its error has these names alone.
    """
    try:
        yield
    except OSError as error:
        if _NAMED not in (error.strerror or ""):
            error.strerror = f"{call}{_NAMED}{error.strerror or error}"
            if to is not None:
                error.filename, error.filename2 = os.fspath(path), os.fspath(to)
            elif error.filename2 is None:  # a rename names both
                error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def opened(path: str | Path, flags: int) -> Iterator[int]:
    """Open a file for the block. Errors name opening and closing. A created file belongs to this user alone."""
    with naming("open", path):
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        with naming("close", path):
            os.close(fd)


def publish(path: Path, pieces: Iterable[bytes], mode: int = 0o600) -> None:
    """Replace or make the file, by default for this user alone; the umask counts. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY)
    with naming("unlink", temporary):
        temporary.unlink(missing_ok=True)  # of a run that died; or what somebody else has put there
    with naming("open", temporary):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with naming("write", temporary), open(fd, "wb", buffering=_WRITE_BYTES) as file:  # noqa: PTH123 - a descriptor
            for piece in pieces:
                file.write(piece)
            file.flush()
            sync_file(fd, temporary)
        with naming("rename", path):
            temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_file(fd: int, path: str | Path, *, data_only: bool = False) -> None:
    """Put what was written on the device. Where the file system cannot, that is as much as can be had."""
    with naming("fdatasync" if data_only else "fsync", path):
        _if_there_is(lambda: (os.fdatasync if data_only else os.fsync)(fd), LACKED)


def sync_folder(folder: str | Path) -> None:
    """Make the names in it durable, where directories can be synced."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd, naming("fsync", folder):
        _if_there_is(lambda: os.fsync(fd), _NO_DIRECTORY_SYNC)


def _if_there_is(call: Callable[[], None], lacked: frozenset[int]) -> None:
    try:
        call()
    except OSError as error:
        if error.errno not in lacked:
            raise
