"""Taking a shared directory into use: its marker, and that it is the one it was before (docs/formats/shared.md)."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.server.platform.beneath import open_folder
from kvdepot.server.platform.durable_files import LACKED, naming, opened, sync_file
from kvdepot.server.platform.own_files import refuse_world_writable
from kvdepot.server.storage.shared_layout import (
    FOLDERS,
    LEFT_BY_PROBES,
    MARKER,
    MARKER_BYTES_MAX,
    Marker,
    NotSharedError,
)
from kvdepot.server.tiers.shared.coordinator.files import read_small

_LOOSE = "lost+found"
"""A file system's own, in its root."""
ROOT_FILESYSTEM: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Known:
    """What this daemon knows of the directory; empty before its first opening."""

    directory_id: str = ""
    device: int = 0


class NotThereError(Exception):
    """The directory cannot be used, or is not the one it was; the message says why."""


def open_directory(root: Path, known: Known, created_by: str, *, on_root_filesystem: bool) -> Known:
    """Check the marker, or make it in an empty folder that is new to this daemon. Raise NotThereError or OSError.

    The folder itself is never made. Without `on_root_filesystem`, no marker is made on the file system of `/`. Either
    would take the place of a mount that is late.
    """
    device = _device(root)
    if not known.directory_id and _marker(root) is None:
        if not on_root_filesystem and device == ROOT_FILESYSTEM.stat().st_dev:
            raise NotThereError(
                f"{root} has no {MARKER}, and lies on the file system of {ROOT_FILESYSTEM}: not mounted? "
                "To begin a shared directory just there, set on_root_filesystem = true"
            )
        _make_marker(root, created_by)
    found = check_directory(root, known)
    make_folders(root)
    return found


def make_folders(root: Path) -> None:
    """Make the folders that are missing. Raise NotThereError or OSError. The caller has just checked the marker."""
    for folder in FOLDERS:
        with naming("mkdir", root / folder):
            (root / folder).mkdir(mode=0o700, exist_ok=True)
        _check_folder(root, folder)


def check_directory(root: Path, known: Known) -> Known:
    """Check that the directory is the one that was opened, wherever it is mounted now.

    Raise NotThereError or OSError if it is not. The marker proves the identity. The device does not: a mount that comes
    back may have another one.
    """
    found = _marker(root)
    if found is None:
        _device(root)  # it may be the folder that is missing
        raise NotThereError(f"{root} has no {MARKER}: not mounted?")
    marker, device = found
    if known.directory_id and marker.directory_id != known.directory_id:
        raise NotThereError(f"{root} is another directory than before, by its {MARKER}")
    return Known(marker.directory_id, device)


def _check_folder(root: Path, folder: str) -> None:
    """Raise NotThereError if somebody has put a symbolic link in the folder's place."""
    try:
        os.close(open_folder(root, folder))
    except NotADirectoryError as error:
        raise NotThereError(f"{root / folder} is a symbolic link, and kvdepot follows none: remove it") from error


def _device(root: Path) -> int:
    """Return the device of the directory. Raise NotThereError or OSError. A directory of every user is refused."""
    try:
        with naming("stat", root):
            status = root.stat()
        refuse_world_writable(root, status)
        return status.st_dev
    except FileNotFoundError as error:
        raise NotThereError(f"{root} is not there: not mounted? It is not made by a daemon") from error


def _marker(root: Path) -> tuple[Marker, int] | None:
    """Return the marker and the device that it is on; None if there is none. Raise NotThereError for a bad one."""
    found = read_small(root, MARKER, MARKER_BYTES_MAX)
    try:
        return (Marker.unpack(found.data), found.device) if found else None
    except NotSharedError as error:
        raise NotThereError(f"{root}: {error}") from error


def _make_marker(root: Path, created_by: str) -> None:
    """Make the marker. One of several daemons makes it, and all use that one."""
    ours = (MARKER, LEFT_BY_PROBES)
    with naming("readdir", root):
        names = os.listdir(root)  # noqa: PTH208
    others = [name for name in names if name != _LOOSE and not name.startswith(ours)]
    if others:
        raise NotThereError(f"{root} has no {MARKER} and is not empty ({min(others)}): not a shared tier's directory")
    temporary = root / f"{MARKER}.{secrets.token_hex(8)}.tmp"
    try:
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
            with naming("write", temporary):
                os.write(fd, Marker(secrets.token_hex(16), created_by).pack())
            sync_file(fd, temporary)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    try:
        with suppress(FileExistsError), naming("link", root / MARKER):
            (root / MARKER).hardlink_to(temporary)
    except OSError as error:
        if error.errno not in LACKED | {errno.EPERM}:
            raise
        if not (root / MARKER).exists():  # without links, the last of several at once wins
            with naming("rename", root / MARKER):
                temporary.rename(root / MARKER)
    temporary.unlink(missing_ok=True)
