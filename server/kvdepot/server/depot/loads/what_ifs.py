"""The what-if sketches of the depot: one for RAM and one for each disk. Shared tiers have no capacity of this node.

`asked`, `reserved` and `ended` are on the way of calls and only remember. `work` is a slice of a tick. A failure here
is counted and costs no call its answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvdepot.core.calls import KEY_BYTES, Kind, ReserveCall
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.records import Lookup
from kvdepot.core.report import WhatIfStatus
from kvdepot.core.what_if import Geometry, WhatIf
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import DepotConfig, WritePolicy
from kvdepot.server.platform.guard import Guard

_WORK_SECONDS: Final = 0.002
"""Of a tick, for all sketches together."""
_PATHS_BYTES_MAX: Final = 8 << 20
"""Of the paths of requests in progress. Beyond it the eldest are forgotten: what they generate counts as computed."""
_PATH_BYTES: Final = 512
"""What a path counts, in addition to its keys."""
_PLACE: Final = "what_if"
_SELECTIVE: Final = (WritePolicy.SECOND_USE, WritePolicy.AUTO)
"""What these do not write, the curve takes as written."""


@dataclass(slots=True)
class _Path:
    """What a request in progress has looked up, and the keys of whole chunks after it, which it has computed."""

    namespace: Namespace
    looked_up: bytes
    computed: bytearray = field(default_factory=bytearray)

    def follow(self, keys: bytes, parents: bytes) -> int:
        """Add those of the keys that continue the path. Return their bytes."""
        before = len(self.computed)
        end = bytes(self.computed[-KEY_BYTES:]) or self.looked_up[-KEY_BYTES:]
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if parents[at : at + KEY_BYTES] == end:
                self.computed += key
                end = key
        return len(self.computed) - before


class WhatIfs:
    """The sketches by the name of their tier. A disk's takes RAM above it as it is."""

    def __init__(
        self, ram: RamTier, ram_bytes: int, disks: Sequence[LowerTier], config: DepotConfig, rows: int,
        clock: Callable[[], float], guard: Guard,
    ) -> None:  # fmt: skip
        """Create sketches without requests. `rows`: the objects that RAM may hold at most."""
        self._ram = ram
        self._ram_bytes = ram_bytes
        self._disks = disks
        self._policy = config.eviction
        self._rows = rows
        self._clock = clock
        self._guard = guard
        self._sketches: dict[str, WhatIf] = {}
        self._rooms: dict[str, tuple[float, float]] = {}  # what a sketch was made with: the full share, and bytes above
        self._paths: OrderedDict[tuple[str, str], _Path] = OrderedDict()  # by engine and request
        self._paths_bytes = 0
        self.configure(config)

    def configure(self, config: DepotConfig) -> None:
        """Use these watermarks, and those of the disks. A sketch for which they are others starts again."""
        ram_full = (config.high_watermark + config.low_watermark) / 2
        self._sketch("ram", self._ram_bytes, self._rows, ram_full, 0.0)
        for disk in self._disks:
            full = (disk.config.high_watermark + disk.config.low_watermark) / 2
            above_bytes = ram_full * self._ram_bytes
            self._sketch(disk.tier.name, disk.tier.capacity_bytes, disk.tier.handles_max, full, above_bytes)

    def _sketch(self, tier: str, capacity_bytes: int, objects_max: int, full: float, above_bytes: float) -> None:
        if self._rooms.get(tier) != (full, above_bytes):
            self._rooms[tier] = full, above_bytes
            self._sketches[tier] = WhatIf(
                capacity_bytes, self._policy, self._clock, full=full, least_bytes=above_bytes, ghosts=objects_max
            )

    # What requests do

    def asked(self, engine_id: str, request_id: str, namespace: Namespace, keys: bytes, lookup: Lookup) -> None:
        """Queue the first lookup of a request."""
        self._guard.call(_PLACE, self._asked, (engine_id, request_id), namespace, keys, lookup)

    def _asked(self, name: tuple[str, str], namespace: Namespace, keys: bytes, lookup: Lookup) -> None:
        geometry = self._geometry(namespace)
        self._forget(name)
        if geometry is None:
            return
        keys = keys[: lookup.high_tokens // geometry.chunk_tokens * KEY_BYTES]  # nobody resumes after them
        prompt_tokens = len(keys) // KEY_BYTES * geometry.chunk_tokens
        for sketch in self._sketches.values():
            sketch.asked(_salt(namespace), geometry, keys, prompt_tokens, lookup.offered_tokens)
        if keys and not geometry.ends_bytes:  # what is generated has no state to resume at
            self._paths[name] = _Path(namespace, keys)
            self._count(_PATH_BYTES + len(keys))

    def reserved(self, engine_id: str, namespace: Namespace, call: ReserveCall) -> None:
        """Note what a request stores after its prompt: what it generates."""
        path = self._paths.get((engine_id, call.request_id))
        if path is not None and path.namespace is namespace:
            self._guard.call(_PLACE, self._follow, path, call)

    def _follow(self, path: _Path, call: ReserveCall) -> None:
        looked_at = RESERVED_PER_CALL_MAX * KEY_BYTES  # the others are answered LATER, and come again
        self._count(path.follow(call.keys[:looked_at], call.parents[:looked_at]))

    def ended(self, engine_id: str, request_id: str) -> None:
        """Queue the path of a request that has stored something after its prompt."""
        path = self._forget((engine_id, request_id))
        if path is not None and path.computed:
            self._guard.call(_PLACE, self._computed, path)

    def _computed(self, path: _Path) -> None:
        geometry = self._geometry(path.namespace)
        if geometry is not None and not path.namespace.invalid:
            keys = path.looked_up + path.computed
            for sketch in self._sketches.values():
                sketch.computed(_salt(path.namespace), geometry, keys)

    def _forget(self, name: tuple[str, str]) -> _Path | None:
        path = self._paths.pop(name, None)
        if path is not None:
            self._paths_bytes -= _PATH_BYTES + len(path.looked_up) + len(path.computed)
        return path

    def _count(self, size_bytes: int) -> None:
        self._paths_bytes += size_bytes
        while self._paths_bytes > _PATHS_BYTES_MAX:
            self._forget(next(iter(self._paths)))

    # What follows

    def work(self) -> None:
        """Serve what is queued, for about 2 ms."""
        busy = [sketch for sketch in self._sketches.values() if not sketch.idle]
        for sketch in busy:
            self._guard.call(_PLACE, sketch.work, _WORK_SECONDS / len(busy))

    def status(self, tier: str) -> WhatIfStatus | None:
        """Return the curve of a tier. None: it has none."""
        return self._guard.value(_PLACE, None, self._status, tier)

    def _status(self, tier: str) -> WhatIfStatus | None:
        sketch = self._sketches.get(tier)
        if sketch is None:
            return None
        selective = any(one.tier.name == tier and one.config.write in _SELECTIVE for one in self._disks)
        return replace(sketch.status(), upper_bound=selective)

    def _geometry(self, namespace: Namespace) -> Geometry | None:
        if namespace.spec is None:
            return None
        sizes = {kind: self._ram.rounded(size_bytes) for kind, size_bytes in namespace.object_bytes.items()}
        ends_bytes = sum(
            size_bytes * (namespace.window_chunks if kind == Kind.WINDOW else 1)
            for kind, size_bytes in sizes.items()
            if kind != namespace.path_kind
        )
        return Geometry(
            namespace.spec.chunk_tokens, sizes[namespace.path_kind], ends_bytes, at_branches=Kind.STATE not in sizes
        )


def _salt(namespace: Namespace) -> int:
    return int.from_bytes(namespace.id[:8], "little")
