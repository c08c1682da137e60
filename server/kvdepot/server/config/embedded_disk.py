"""The disk tier of a daemon without a `[[tier]]`: a directory of the user, sized by the free space there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from kvdepot.server.tiers.disk.layout import FOLDERS

NAME: Final = "disk"
CAPACITY_BYTES_MIN: Final = 256 << 20
CAPACITY_BYTES_MAX: Final = 8 << 30
_SHARE_OF_FREE: Final = 4
_STEP_BYTES: Final = 256 << 20


class NoDiskError(Exception):
    """Why there is none, for the log."""


def default_directory(socket: Path) -> Path:
    """Return the directory of this daemon's default disk tier, named by its socket as arenas are. Raise NoDiskError."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:  # neither HOME nor an entry in passwd
        raise NoDiskError("no home directory") from error
    digest = hashlib.blake2b(os.fsencode(socket), digest_size=6).hexdigest()
    return cache / "kvdepot" / digest


def tier_table(directory: Path, capacity: str | None) -> dict[str, Any]:
    """Create the directory and return a `[[tier]]` for it. `capacity` None: a free share. Raise NoDiskError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        capacity = capacity or f"{_free_share_bytes(directory)}B"
    except OSError as error:
        raise NoDiskError(f"{error.filename or directory}: {error.strerror}") from error
    return {"name": NAME, "kind": "disk", "path": str(directory), "capacity": capacity}


def _free_share_bytes(directory: Path) -> int:
    """Return a share of the free space, in steps, with the directory's own files counted as free.

    So the next start computes the same capacity.
    """
    room = os.statvfs(directory)
    share_bytes = (room.f_bavail * room.f_frsize + _held_bytes(directory)) // _SHARE_OF_FREE
    capacity_bytes = min(share_bytes // _STEP_BYTES * _STEP_BYTES, CAPACITY_BYTES_MAX)
    if capacity_bytes < CAPACITY_BYTES_MIN:
        raise NoDiskError(
            f"a quarter of what is free in {directory} is {share_bytes >> 20} MiB,"
            f" less than {CAPACITY_BYTES_MIN >> 20} MiB"
        )
    return capacity_bytes


def _held_bytes(directory: Path) -> int:
    """Return what the files of the tier take. Raise OSError where a folder of it cannot be read.

    Without these files the tier would be smaller than before, and would evict. `Path.rglob` skips such a folder.
    """
    found, folders = 0, [str(directory / name) for name in FOLDERS]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        found += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:  # there is no tier yet, or another daemon's deletes something
            continue
    return found
