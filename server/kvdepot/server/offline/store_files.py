"""A disk tier's directory while no daemon runs: its store, its index and its quarantine, by the tier's own code.

The capacity is in the configuration, not in the directory. So offline verbs count everything in the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from kvdepot.server.io.directory_guard import WORKERS_LOCK, DirectoryHeldError, hold_for_daemon, renew_token
from kvdepot.server.tiers.disk import layout as names
from kvdepot.server.tiers.disk.layout import DiskLayout, Store
from kvdepot.server.tiers.disk.records import BadFile
from kvdepot.server.tiers.disk.recovery import read_store

_UNBOUNDED: Final = 1 << 56
"""More than any address (docs/formats/disk.md)."""
_QUARANTINED = re.compile(r"([0-9]{10,})-([0-9a-f]{16})-([a-z_]+)\.kvd")


class OfflineRefusalError(Exception):
    """The verb cannot do its work here. The message says why and what to do."""


def store_of(root: Path) -> Store:
    """Return the store of a directory. Raise OfflineRefusalError without a store of this version, and OSError."""
    try:
        store = read_store(root)
    except (BadFile, NotADirectoryError) as error:
        raise OfflineRefusalError(f"{root}: {error}") from error
    if store is None:
        raise OfflineRefusalError(f"{root} has no {names.STORE}: it is not the directory of a disk tier")
    return store


def layout_as_found(store: Store) -> DiskLayout:
    return DiskLayout(
        capacity_bytes=_UNBOUNDED, segment_bytes=store.segment_bytes, data_bytes=_UNBOUNDED, handles=_UNBOUNDED,
        journal_bytes=_UNBOUNDED, snapshot_bytes=_UNBOUNDED, quarantine_bytes=_UNBOUNDED,
    )  # fmt: skip


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock a store against daemons and their workers. Raise OfflineRefusalError while a daemon uses it, and OSError."""
    try:
        fd = hold_for_daemon(root / names.DAEMON_LOCK, os.getpid())
    except DirectoryHeldError as error:
        raise OfflineRefusalError(
            f"{root} is held by the process with pid {error.holder.pid}; stop the daemon first"
        ) from error
    try:
        if renew_token(root / WORKERS_LOCK, uuid4().hex) is None:
            raise OfflineRefusalError(
                f"{root}: I/O workers of an earlier daemon still live; wait until they have ended"
            )
        yield
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One file of the quarantine, by its name."""

    file: str
    size_bytes: int
    at: int  # unix seconds
    sequence: int
    reason: str  # an outcome


def quarantined(path: Path) -> Quarantined | None:
    """Return a quarantined file; None if its name does not name an object. Raise OSError."""
    match = _QUARANTINED.fullmatch(path.name)
    if match is None:
        return None
    return Quarantined(path.name, path.stat().st_size, int(match[1]), int(match[2], 16), match[3])


def quarantine_of(root: Path) -> list[Quarantined]:
    """Return the quarantined files, oldest first."""
    folder = root / names.QUARANTINE
    found = [quarantined(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return [file for file in found if file is not None]
