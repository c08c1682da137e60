"""What a disk tier is configured with, in addition to what every tier is."""

from __future__ import annotations

from dataclasses import dataclass

from kvdepot.server.tiers.config import LowerTierConfig


@dataclass(frozen=True, slots=True)
class DiskConfig(LowerTierConfig):
    """The configuration of a disk tier. Below CAPACITY_BYTES_MIN no tier fits; the configuration refuses it."""

    scrub_bytes_per_second: int = 50 << 20  # 0: no scrubbing
