"""What a disk tier and its opening process say to each other, over a socketpair of streams.

A frame is the length of its body (u32), a type (u8) and the body: JSON, but for objects (columns of
PUT records) and claims (pairs of u64), of which there are many.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from kvdepot.core.allocator import Extent
from kvdepot.server.tiers.disk.columns import PutColumns, Words

FRAME: Final = struct.Struct("<IB")
BODY_BYTES_MAX: Final = 64 << 20
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
    """

    token: str = ""
    device: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """Recover, write the next generation, tell what there is.

    What is not free although no object has it: `dead` objects, and what is being written.
    `making`: the segment that a worker may be making, and may remove again; -1: none.
    """

    dead: tuple[Place, ...] = ()
    writing: tuple[Extent, ...] = ()
    making: int = -1


@dataclass(frozen=True, slots=True)
class Compact:
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
    """By a living daemon. The process ends."""

    pid: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """For processes of a daemon that is dead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """It cannot be had now. The process ends. `outcome` is an `IoOutcome`."""

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
    quarantined: tuple[tuple[str, int], ...]  # file below the directory, bytes; oldest first
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
    puts: PutColumns


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Compacted:
    """`generation` of the snapshot made, or why there is none."""

    generation: int
    synced_sequence: int
    snapshot_bytes: int
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The opening process is gone, and with it the lock. Not sent: its socket says so."""


Request = Begin | Open | Compact | Sync
Message = Locked | Held | Waiting | Failed | Opened | Claims | Objects | Done | Compacted | Synced | Ended
Sent = Request | Message
_TYPES: tuple[type[Any], ...] = (
    Begin, Open, Compact, Sync, Locked, Held, Waiting, Failed, Opened, Claims, Objects, Done, Compacted, Synced,
)  # fmt: skip


class MessageError(ValueError):
    """A frame that nobody sends."""


def pack(message: Sent) -> bytes:
    match message:
        case Claims(fragments):
            body = np.array(fragments, "<u8").tobytes()
        case Objects(puts):
            body = puts.message()
        case _:
            body = json.dumps(asdict(message)).encode()
    return FRAME.pack(len(body), _TYPES.index(type(message))) + body


def take_messages(received: bytearray) -> Iterator[Any]:
    """The whole messages at the start of `received`, which loses each as it is taken. Raises MessageError."""
    while len(received) >= FRAME.size:
        length, kind = FRAME.unpack_from(received)
        if kind >= len(_TYPES) or length > BODY_BYTES_MAX:
            raise MessageError(f"a message of type {kind} with {length} bytes")
        end = FRAME.size + length
        if len(received) < end:
            return
        body = bytes(received[FRAME.size : end])
        del received[:end]
        yield _unpack(_TYPES[kind], body)


def _unpack(kind: type[Any], body: bytes) -> Any:
    if kind is Claims:
        return Claims(tuple(map(tuple, np.frombuffer(body, "<u8").reshape(-1, 2).tolist())))
    if kind is Objects:
        return Objects(PutColumns.from_message(body))
    values = json.loads(body)
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def claims_of(places: Words) -> Iterator[Claims]:
    """`places` (n, 2): first byte and bytes of each."""
    for start in range(0, len(places), CLAIMS_PER_MESSAGE):
        yield Claims(tuple(map(tuple, places[start : start + CLAIMS_PER_MESSAGE].tolist())))


def objects_of(puts: PutColumns) -> Iterator[Objects]:
    yield from map(Objects, puts.slices(OBJECTS_PER_MESSAGE))
