"""Messages between the daemon and its checksum worker. The number of a frame is the row of its object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from kvdepot.core.allocator import Extent
from kvdepot.core.bounds import Count
from kvdepot.core.elements import ElementRun
from kvdepot.core.limits import ELEMENT_RUNS_MAX
from kvdepot.server.io.framing import Framing

Extents = Annotated[tuple[Extent, ...], Count(1 << 20)]


@dataclass(frozen=True, slots=True)
class Sum:
    """Take the checksum of an object. `extents` are in its order."""

    generation: int
    extents: Extents


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare a stored object with one that an engine computed again."""

    stored: Extents
    recomputed: Extents
    runs: Annotated[tuple[ElementRun, ...], Count(ELEMENT_RUNS_MAX)]


@dataclass(frozen=True, slots=True)
class Summed:
    """A checksum: `low` and `high` are the halves of the XXH3-128."""

    generation: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Compared:
    """How many slices were measured, how many of them were over tolerance, and the distance of the furthest."""

    drifted: bool
    slices: int
    beyond: int
    worst: float


JOBS: Final[Framing[Sum | Compare]] = Framing(Sum, Compare, bytes_max=32 << 20)
ANSWERS: Final[Framing[Summed | Compared]] = Framing(Summed, Compared, bytes_max=64)
