"""What a disk tier and its opening process say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from kvdepot.core.allocator import Extent
from kvdepot.server.io.framing import As, Framing, Signed
from kvdepot.server.io.jobs import FileName
from kvdepot.server.tiers.disk.columns import PutColumns, Words

CLAIMS_PER_MESSAGE: Final = 2_000
OBJECTS_PER_MESSAGE: Final = 250
"""What the loop takes in at once: some 8 ms, nearly all of it the engine's."""

Place = tuple[int, int, int]
"""(sequence of the write, address, bytes) of a fragment."""


# To the opening process.


@dataclass(frozen=True, slots=True)
class Begin:
    """Take the locks. `token`: of the workers this daemon has already, empty at its start.

    `device`: of the file system that the directory was on before; 0: not known, and the directory may be made.
    `store_id`: of the store that was there before. It proves the directory, whatever its device is now.
    """

    token: str = ""
    device: int = 0
    store_id: str = ""


@dataclass(frozen=True, slots=True)
class Open:
    """Recover, write the next generation, tell what there is.

    What is not free although no object has it: `dead` objects, and what is being written.
    `making`: the segment that a worker may be making, and may remove again; -1: none.
    `store_id`: of the store that was there before. Sequences of another one mean other writes. Empty: any will do.
    """

    dead: tuple[Place, ...] = ()
    writing: tuple[Extent, ...] = ()
    making: Signed = -1
    store_id: str = ""


@dataclass(frozen=True, slots=True)
class Compact:
    """Make snapshot `generation` + 1 out of the snapshot and the journal of `generation`."""

    generation: int
    synced_sequence: int  # every write up to it is done


@dataclass(frozen=True, slots=True)
class Sync:
    """Make everything durable that was written to segments."""


# From it.


@dataclass(frozen=True, slots=True)
class Locked:
    """The directory is this daemon's, and no worker of another lives."""

    token: str
    device: int


@dataclass(frozen=True, slots=True)
class Held:
    """The directory is held by a living daemon. The process ends."""

    pid: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The process waits for processes of a daemon that is dead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The directory cannot be had now. The process ends. `outcome` is an `IoOutcome`."""

    reason: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Opened:
    """Claims, then objects, then Done follow. `refused`: why nothing can be written, and there is no new generation.

    `overtaken`: writes of `Open.dead` in whose places the index has later ones.
    """

    store_id: str
    segment_bytes: int
    segments: int  # there, from the first one on
    generation: int
    objects: int
    synced_sequence: int
    scrub_position: int
    day: int
    day_bytes: int
    snapshot_bytes: int
    quarantined: tuple[tuple[FileName, int], ...]  # file below the directory, bytes; oldest first
    notes: tuple[str, ...]
    refused: str = ""
    outcome: str = ""
    overtaken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Claims:
    """Used places, in ascending order."""

    fragments: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Objects:
    """A slice of the objects in the index."""

    puts: Annotated[PutColumns, As(bytes, PutColumns.message, PutColumns.from_message)]


@dataclass(frozen=True, slots=True)
class Done:
    """All claims and objects of the index were sent."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The answer to `Compact`: the `generation` of the snapshot made, or why there is none."""

    generation: int
    synced_sequence: int
    snapshot_bytes: int
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    """The answer to `Sync`. `failed`: why it failed; empty: it worked."""

    failed: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The opening process is gone, and with it the lock. Not sent: its socket says so."""


Request = Begin | Open | Compact | Sync
Message = Locked | Held | Waiting | Failed | Opened | Claims | Objects | Done | Compacted | Synced | Ended
BODY_BYTES_MAX: Final = 64 << 20
REQUESTS: Final[Framing[Request]] = Framing(Begin, Open, Compact, Sync, bytes_max=BODY_BYTES_MAX)
MESSAGES: Final[Framing[Message]] = Framing(
    Locked, Held, Waiting, Failed, Opened, Claims, Objects, Done, Compacted, Synced, bytes_max=BODY_BYTES_MAX
)


def claims_of(places: Words) -> Iterator[Claims]:
    """Yield messages with all of these. `places` (n, 2): first byte and bytes of each."""
    for start in range(0, len(places), CLAIMS_PER_MESSAGE):
        yield Claims(tuple(map(tuple, places[start : start + CLAIMS_PER_MESSAGE].tolist())))


def objects_of(puts: PutColumns) -> Iterator[Objects]:
    yield from map(Objects, puts.slices(OBJECTS_PER_MESSAGE))
