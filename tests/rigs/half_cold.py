"""A prompt that a tier has, and RAM the beginning of."""

from __future__ import annotations

from tests.rigs.engine_rig import Client, Rig, path
from tests.rigs.tier_rig import ATTENTION, COMMIT, reboot, store


def half_cold(in_ram: int, chunks: int, **options: object) -> tuple[Rig, Client, list[bytes]]:
    """A prompt that the tier has, and RAM the beginning of. No prefetch."""
    keys = path("p", chunks)
    rig = Rig(**({"data_pages": 128, "tier": COMMIT, "prefetch_share": 0.0} | options))  # type: ignore[arg-type]
    store(rig.attach(), keys)
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    if in_ram:
        client.acquire_later(keys[:in_ram], ATTENTION * in_ram, 1)
        rig.tier.run()
        client.release(1)
    return rig, client, keys
