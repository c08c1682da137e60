"""What the janitor removes in addition to objects: old quarantine, left temporary files, nodes that are gone."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from kvdepot.server.io.jobs import prober
from kvdepot.server.storage.shared_layout import PROBE, QUARANTINE, TEMPORARIES, temporary_node, trash_of
from kvdepot.server.tiers.shared.coordinator.deletion import settle
from kvdepot.server.tiers.shared.coordinator.files import status_within, taken_bytes, unlink_within
from kvdepot.server.tiers.shared.coordinator.scan import Quarantined

TEMPORARY_SECONDS_MAX: Final = 3_600.0
_LOOSE_SECONDS: Final = 60.0
"""A node's file is there before its first temporary: without it, a temporary this old is nobody's."""
_SETTLED_SECONDS: Final = 60.0
"""A file that was quarantined by mistake is put back within it."""


def purge_quarantine(
    root: Path, files: list[Quarantined], age_seconds: Callable[[int], float], keep_seconds: float, capacity_bytes: int,
    may: Callable[[], bool] = lambda: True,
) -> Iterator[int]:  # fmt: skip
    """Remove what is too old or too much, oldest first, if `may` allows it. Yield bytes freed. Raise OSError."""
    total = sum(file.size_bytes for file in files)
    for file in sorted(files, key=lambda file: file.ctime_ns):
        age = age_seconds(file.ctime_ns)
        if age < _SETTLED_SECONDS or (age <= keep_seconds and total <= capacity_bytes) or not may():
            return
        total -= file.size_bytes
        yield remove(root, f"{QUARANTINE}/{file.file_name}")


def purge_temporaries(
    root: Path, nodes: Iterable[str], age_seconds: Callable[[int], float], gone: Iterable[str] = (),
    may: Callable[[], bool] = lambda: True,
) -> Iterator[int]:  # fmt: skip
    """Remove temporaries of nodes that are not among `nodes`, as long as `may` allows it.

    Those of nodes that are `gone` are removed at once. What probes have left is removed, too. Their names have pids,
    which mean nothing on another host, so age alone decides. Deletions that another janitor began are ended.
    Yield bytes freed, of each. Raise OSError.
    """
    living, gone = frozenset(nodes), frozenset(gone)
    with os.scandir(root / TEMPORARIES) as entries:
        for entry in entries:
            if trash_of(entry.name) is not None:
                if not may():
                    return
                yield settle(root, f"{TEMPORARIES}/{entry.name}")
                continue
            node = temporary_node(entry.name)
            if node is None and prober(f"{TEMPORARIES}/{entry.name}", PROBE) is None:
                continue
            try:
                age = age_seconds(status_within(root, f"{TEMPORARIES}/{entry.name}").st_mtime_ns)
            except FileNotFoundError:
                continue
            known = node is None or node in living
            limit = 0.0 if node in gone else TEMPORARY_SECONDS_MAX if known else _LOOSE_SECONDS
            if age < limit:
                yield 0
            elif not may():
                return
            else:
                yield remove(root, f"{TEMPORARIES}/{entry.name}")


def remove(root: Path, file: str) -> int:
    """Remove a file. Return the bytes freed: 0 if it is already gone, or is no file. Raise OSError."""
    try:
        status = status_within(root, file)
        if not stat.S_ISREG(status.st_mode):
            return 0
        unlink_within(root, file)
    except FileNotFoundError:
        return 0
    return taken_bytes(status) if status.st_nlink == 1 else 0
