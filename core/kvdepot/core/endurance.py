"""What the hits of a tier cost its drive: bytes written for each byte that the tier supplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WRITTEN_BYTES: Final = "tier_written_bytes"
"""Counter by tier: what was written to the device, after the codec."""
HIT_BYTES: Final = "tier_hit_bytes"
"""Counter by tier: what was read into RAM for loads and prefetch, before the codec."""


def per_hit_byte(written_bytes: float, hit_bytes: float) -> float | None:
    """Return the bytes written for each byte that was supplied. None: nothing was supplied yet."""
    return written_bytes / hit_bytes if hit_bytes else None


def written_per_hit_byte(counters: Mapping[str, float], tier: str) -> float | None:
    """Return `per_hit_byte` of a tier, by the daemon's counters."""
    return per_hit_byte(counters.get(f"{WRITTEN_BYTES}.{tier}/", 0.0), counters.get(f"{HIT_BYTES}.{tier}/", 0.0))
