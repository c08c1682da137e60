"""Deleting one object of a shared directory, and never another that has its name by now (requirement T3)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvdepot.server.platform.beneath import within
from kvdepot.server.platform.durable_files import naming
from kvdepot.server.storage.shared_layout import object_of, trash_file, trash_of
from kvdepot.server.tiers.shared.coordinator.files import rename_within, status_within, taken_bytes, unlink_within

_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def delete_object(root: Path, file: str, mtime_ns: int, may: Callable[[], bool] = lambda: True) -> int:
    """Delete an object. Return the bytes freed. Raise OSError.

    Return 0 if the object is gone, or is not the file that was last used at `mtime_ns`.
    `may`: asked again before anything is changed, because a request may take long. The file is renamed first, then
    looked at again. What a name means may change between any two calls; what a renamed file is does not.
    """
    named = object_of(file)
    assert named is not None
    with suppress(FileNotFoundError, NotADirectoryError):
        status = status_within(root, file)
        if status.st_mtime_ns == mtime_ns and may():
            trash = trash_file(*named, mtime_ns, status.st_ino)
            rename_within(root, file, trash)
            return settle(root, trash)
    return 0


def settle(root: Path, trash: str) -> int:
    """End a deletion that this janitor or one that died has begun. Return the bytes freed. Raise OSError."""
    begun = trash_of(Path(trash).name)
    assert begun is not None
    file, mtime_ns, inode = begun
    try:
        status = status_within(root, trash)
    except FileNotFoundError:
        return 0
    if (status.st_mtime_ns, status.st_ino) != (mtime_ns, inode):
        _put_back(root, trash, file)
        return 0
    with suppress(FileNotFoundError):  # a janitor that was stopped in the middle of it may be about it, too
        unlink_within(root, trash)
    return taken_bytes(status) if status.st_nlink == 1 else 0


def _put_back(root: Path, trash: str, file: str) -> None:
    """Put a file back under its name. If there is a file again, that one stays: it is younger."""
    try:
        with naming("link", root / file), within(root, trash) as (aside, beside), within(root, file) as (name, folder):
            os.link(aside, name, src_dir_fd=beside, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not (root / file).exists():
            rename_within(root, trash, file)
            return
    with suppress(FileNotFoundError):
        unlink_within(root, trash)
