"""What a shared tier is configured with, in addition to what every tier is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.server.tiers.config import LowerTierConfig

_QUARANTINE_SHARE: Final = 16
_HANDLE_BYTES: Final = 256 << 10  # of capacity
_HANDLES_MIN, _HANDLES_MAX = 4_096, 1 << 20


@dataclass(frozen=True, slots=True)
class SharedConfig(LowerTierConfig):
    """`capacity_bytes`, watermarks and quarantine are the whole directory's.

    The janitor acts by its own daemon's configuration: it should be the same on all nodes.
    """

    negative_ttl_seconds: float = 2.0
    on_root_filesystem: bool = False  # whether a directory may be begun on the file system of /
    keys: KeyRing = NO_KEYS  # at the start; a reload may bring others
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    touches: bool = True  # whether the files have a time that a use sets
    gives_up: bool = True  # whether a file that fails again and again, while others are read, counts as damaged
    kind: str = "shared"

    @property
    def quarantine_bytes_max(self) -> int:
        """Return the limit of quarantine. It counts in the capacity, and leaves most of it to objects."""
        return min(self.quarantine_bytes, self.capacity_bytes // _QUARANTINE_SHARE)

    @property
    def handles_max(self) -> int:
        """Return how many objects this node knows of at once. There may be more in the directory."""
        return min(max(self.capacity_bytes // _HANDLE_BYTES, _HANDLES_MIN), _HANDLES_MAX)
