"""What a disk tier is configured with, in addition to what every tier is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvdepot.server.tiers.config import LowerTierConfig

_WRITES_PER_WORKER: Final = 20
_SMALL_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class DiskConfig(LowerTierConfig):
    """The configuration of a disk tier. Below CAPACITY_BYTES_MIN no tier fits; the configuration refuses it."""

    scrub_bytes_per_second: int = 50 << 20  # 0: no scrubbing

    def slots_left(self, in_flight: int, in_flight_bytes: int) -> int:
        """Return how many more writes may begin: `write_slots` in all, and of small objects more.

        So the answers to small writes are taken together.
        """
        small = self.write_slots - in_flight_bytes // _SMALL_BYTES
        return max(self.write_slots - in_flight, min(small, _WRITES_PER_WORKER * self.io_workers - in_flight), 0)
