"""The what-if sketches of the depot: one for RAM and one for each disk. Shared tiers have no capacity of this node.

`asked` is on the way of a lookup and only queues. `work` is a slice of a tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.core.records import Lookup
from kvdepot.core.report import WhatIfStatus
from kvdepot.core.what_if import Geometry, WhatIf
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import DepotConfig

_WORK_SECONDS: Final = 0.002
"""Of a tick, for all sketches together."""


class WhatIfs:
    """The sketches by the name of their tier. A disk's takes RAM above it as it is."""

    def __init__(
        self, ram: RamTier, ram_bytes: int, disks: Sequence[LowerTier], config: DepotConfig, rows: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Create sketches without requests. `rows`: the objects that RAM may hold at most."""
        self._ram = ram
        full = (config.high_watermark + config.low_watermark) / 2
        self._sketches = {"ram": WhatIf(ram_bytes, config.eviction, clock, full=full, ghosts=rows)}
        for disk in disks:
            self._sketches[disk.tier.name] = WhatIf(
                disk.tier.capacity_bytes, config.eviction, clock, full=full, ghosts=disk.tier.handles_max,
                least_bytes=full * ram_bytes,
            )  # fmt: skip

    def asked(self, namespace: Namespace, keys: bytes, lookup: Lookup) -> None:
        """Queue the first lookup of a request."""
        geometry = self._geometry(namespace)
        if geometry is None:
            return
        salt = int.from_bytes(namespace.id[:8], "little")
        prompt_tokens = min(lookup.high_tokens, len(keys) // KEY_BYTES * geometry.chunk_tokens)
        for sketch in self._sketches.values():
            sketch.asked(salt, geometry, keys, prompt_tokens, lookup.offered_tokens)

    def work(self) -> None:
        """Serve what is queued, for about 2 ms."""
        busy = [sketch for sketch in self._sketches.values() if not sketch.idle]
        for sketch in busy:
            sketch.work(_WORK_SECONDS / len(busy))

    def status(self, tier: str) -> WhatIfStatus | None:
        """Return the curve of a tier. None: it has none."""
        sketch = self._sketches.get(tier)
        return None if sketch is None else sketch.status()

    def _geometry(self, namespace: Namespace) -> Geometry | None:
        if namespace.spec is None:
            return None
        sizes = {kind: self._ram.rounded(size_bytes) for kind, size_bytes in namespace.object_bytes.items()}
        ends_bytes = sum(
            size_bytes * (namespace.window_chunks if kind == Kind.WINDOW else 1)
            for kind, size_bytes in sizes.items()
            if kind != namespace.path_kind
        )
        return Geometry(namespace.spec.chunk_tokens, sizes[namespace.path_kind], ends_bytes)
