"""What the hits of a tier cost its drive: bytes written for each byte that the tier supplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WRITTEN_BYTES: Final = "tier_written_bytes"
"""Counter by tier: what was written to the device, after the codec."""
HIT_BYTES: Final = "tier_hit_bytes"
"""Counter by tier: what was read into RAM for loads and prefetch, before the codec."""


def written_per_hit_byte(counters: Mapping[str, float], tier: str) -> float | None:
    """Return the bytes written to the tier for each byte that it supplied. None: it has supplied nothing yet."""
    hit_bytes = counters.get(f"{HIT_BYTES}.{tier}/", 0.0)
    return counters.get(f"{WRITTEN_BYTES}.{tier}/", 0.0) / hit_bytes if hit_bytes else None
