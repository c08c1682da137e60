"""The engines of the soak, all on one daemon with a disk and quotas that a run outgrows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from demo.engine import ROOT
from demo.toys import DENSE, GEMMA3, HYBRID, Toy
from tests.e2e.fleet import Fleet

MIB = 1 << 20
LOOKUP_TIMEOUT_SECONDS = 5.0
"""Four engines share the cores, and 50 loads at once the one thread that copies."""
TIERS = """
[[quota]]
tier = "ram"
capacity = "150MiB"
[[quota]]
namespace = "*"
tier = "ram"
capacity = "130MiB"
[[tier]]
name = "disk"
kind = "disk"
path = "{disk}"
capacity = "256MiB"
write = "second_use"
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine. Engines of one toy and tenant share a namespace."""

    toy: Toy
    tenant: str
    pool_bytes: int
    seats: int

    @property
    def exact(self) -> bool:
        """Whether its tokens are those of a cold run, however a batch was cut.

        No model here has experts: rounding can choose another one, and logits then differ by more than rounding.
        """
        return self.toy.dtype == "float32"


SOAKED = {
    "small": Kind(DENSE, "a", 24 * MIB, 16),  # two of its longest requests fill it, so it preempts
    "dense": Kind(DENSE, "a", 128 * MIB, 64),
    "hybrid": Kind(HYBRID, "b", 64 * MIB, 16),
    "window": Kind(GEMMA3, "b", 96 * MIB, 16),
}


def soak_fleet(directory: Path) -> Fleet:
    """All are defined, nothing is started."""
    disk = directory / "disk"
    disk.mkdir(mode=0o700)
    fleet = Fleet(directory, ROOT / "build" / "toys", TIERS.format(disk=disk))
    for name, kind in SOAKED.items():
        arguments = {"kv_cache_memory_bytes": kind.pool_bytes, "max_num_seqs": kind.seats, "max_model_len": 4096}
        if kind.toy is not HYBRID:
            arguments["block_size"] = 32  # so that answers need more blocks while they grow
        fleet.define(
            name, kind.toy, arguments, tenant=kind.tenant, load_timeout_seconds=10.0,
            lookup_timeout_seconds=LOOKUP_TIMEOUT_SECONDS, lookup_min_seconds=LOOKUP_TIMEOUT_SECONDS,
        )  # fmt: skip
    return fleet
