"""What scheduler, ranks and harness of a chaos run tell each other, over pipes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from tests.rigs.known_objects import Known


@dataclass(frozen=True, slots=True)
class Placed:
    """An object and the engine's blocks that hold it: per group of its kind, in the planner's order."""

    index: int  # within the lease
    known: Known
    blocks: tuple[tuple[int, tuple[int, ...]], ...]  # (group, block ids)


@dataclass(frozen=True, slots=True)
class Fill:
    """Compute these objects: their bytes into their blocks."""

    objects: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Blocks into extents. `torn`: only the first half is written, and what was reserved is to be given back."""

    number: int
    arena_id: int
    extents: bytes
    objects: tuple[Placed, ...]
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Extents into blocks, and a look at every byte. Nothing is written after `deadline` (CLOCK_MONOTONIC)."""

    number: int
    arena_id: int
    extents: bytes
    objects: tuple[Placed, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody uses these blocks any more: (group, block id)."""

    blocks: tuple[tuple[int, int], ...]


RankOp = Fill | Store | Load | Free


@dataclass(frozen=True, slots=True)
class Copied:
    """A rank is done with a store or load."""

    number: int
    ok: bool
    why: str = ""


class Command(Enum):
    """From the harness to a scheduler."""

    PAUSE = "pause"  # finish what runs, and begin nothing
    GO_ON = "go on"
    STOP = "stop"


@dataclass(slots=True)
class Report:
    """From any process of an engine to the harness. `counts` only grow within one process."""

    counts: Counter[str] = field(default_factory=Counter)
    finding: str = ""
    idle: bool = False  # told to pause, and no request, no lease, nothing unconfirmed is left
    state: str = ""
