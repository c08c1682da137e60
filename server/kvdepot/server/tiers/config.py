"""What every tier below RAM is configured with. `kvdepot.server.config.config` reads it from TOML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

CAPACITY_BYTES_MIN: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class LowerTierConfig:
    """The configuration of a tier below RAM. Sizes in bytes, times in seconds."""

    name: str
    path: Path
    capacity_bytes: int
    codec: int = 0  # a `kvdepot.core.objectfile.Codec`
    io_workers: int = 2
    deadline_seconds: float = 10.0  # of one operation
    fsync: bool = False
    write_budget_bytes: int | None = None  # a day (UTC), of this daemon; None: none
    quarantine_keep_seconds: float = 7 * 86_400.0
    quarantine_bytes: int = 10 << 30
    failures: int = 5  # in a row, then the breaker opens
    probe_seconds: float = 5.0

    @property
    def write_slots(self) -> int:
        """Return the number of writes at once: what keeps every worker busy, and one that waits for it."""
        return 4 * self.io_workers
