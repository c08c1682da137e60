"""What a coordinator is told on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from kvdepot.server.tiers.shared.coordinator.opening import Known

HEARTBEAT_SECONDS: Final = 2.0
LEASE_HEARTBEATS: Final = 5
"""A janitor that has not renewed its lease for so long is taken to be gone."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The settings of a coordinator. Sizes in bytes, times in seconds. Watermarks are shares of the capacity."""

    root: Path
    capacity_bytes: int
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    quarantine_keep_seconds: float = 7 * 86_400.0
    quarantine_bytes: int = 10 << 30
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    created_by: str = "kvdepotd"  # in the marker, for people
    on_root_filesystem: bool = False  # whether a directory may be begun there
    owner: str = ""  # who runs here, one run after another; empty: nobody says
    allowed_seconds: float = 300.0  # how long a node acts under its limit without having renewed its file

    @property
    def lease_seconds(self) -> float:
        return LEASE_HEARTBEATS * self.heartbeat_seconds

    @property
    def unheard_seconds(self) -> float:
        """Return how long a daemon uses its coordinator's last report. What it begins ends before others take more."""
        return self.allowed_seconds / 2

    @property
    def silent_seconds(self) -> float:
        """Return the time after which others take a silent node for gone."""
        return 2 * self.allowed_seconds

    def pack(self) -> str:
        return json.dumps({**asdict(self), "root": str(self.root)})

    @classmethod
    def unpack(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "root": Path(values["root"])})


@dataclass(frozen=True, slots=True)
class Before:
    """What an earlier coordinator of the same daemon run has left."""

    published_bytes: int = 0
    directory_id: str = ""

    @property
    def known(self) -> Known:
        return Known(self.directory_id)
