"""Files that are whole and on their medium as soon as their names are there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

TEMPORARY: Final = ".tmp"
"""At the end of the name of what is not published yet."""
_WRITE_BYTES: Final = 1 << 20


def publish(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace or make the file, for this user alone. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)  # of a run that died; or what somebody else has put there
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=_WRITE_BYTES) as file:  # noqa: PTH123 - a descriptor
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(fd)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: str | Path) -> None:
    """Make the names in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
