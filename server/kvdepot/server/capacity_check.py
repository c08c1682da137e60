"""Capacities against the file systems that are to have them: advice of `check-config`, never a reason to refuse.

What is mounted now need not be what is mounted when the daemon starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.core.units import format_size_rounded

if TYPE_CHECKING:
    from kvdepot.server.config import Config

_SECONDS_MAX: Final = 2.0
"""What a file system may take to answer. One that hangs is not waited for."""


def capacity_warnings(config: Config) -> Iterator[str]:
    """One sentence for each tier that its file system cannot hold."""
    for tier in config.tables.tier:
        total_bytes = _file_system_bytes(Path(tier.path))
        if 0 < total_bytes < tier.capacity:
            yield (
                f"tier.{tier.name}.capacity: {format_size_rounded(tier.capacity)} are more than the"
                f" {format_size_rounded(total_bytes)} of the file system of {tier.path}; the tier takes what is free"
                " there, less a reserve"
            )


def _file_system_bytes(path: Path) -> int:
    """0 where it does not say, or not in time."""
    found: list[int] = []

    def ask() -> None:
        for folder in (path, *path.parents):  # a directory that is not there yet lies on the file system above it
            try:
                room = os.statvfs(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return
            found.append(room.f_blocks * room.f_frsize)
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_MAX)
    return found[0] if found else 0
