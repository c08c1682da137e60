"""Warnings of `check-config` about tiers that are larger than their file systems.

They never refuse a start: another file system may be mounted when the daemon starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from kvdepot.server.config.config import Config

_SECONDS_MAX: Final = 2.0
"""Seconds to wait for a file system. One that hangs is skipped."""


def capacity_warnings(config: Config) -> Iterator[str]:
    """Yield a sentence for each tier that is larger than its file system."""
    for tier in (tier for tier in config.tables.tier if tier.path):
        total_bytes = _file_system_bytes(Path(tier.path))
        if 0 < total_bytes < tier.capacity:
            yield (
                f"tier.{tier.name}.capacity: {size_text(tier.capacity)} is more than the {size_text(total_bytes)} of"
                f" the file system of {tier.path}; the tier will use its free space, minus a reserve"
            )


def _file_system_bytes(path: Path) -> int:
    """Return the size of the file system that has `path`; 0 if it does not answer in time."""
    answers: list[int] = []

    def ask() -> None:
        for folder in (path, *path.parents):  # a directory that does not exist yet will be on the file system above it
            try:
                room = os.statvfs(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return
            answers.append(room.f_blocks * room.f_frsize)
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_MAX)
    return answers[0] if answers else 0
