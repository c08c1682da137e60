"""What I/O workers are asked and what they answer, as plain values; `wire` packs them.

File names are relative to the directory that the pool was made for: a worker opens them
itself, so that a hung mount hangs only the worker. All sizes and offsets are bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.server.durable_files import TEMPORARY
from kvdepot.server.tiers.base import IoOutcome, ObjectName

ABSENT: Final = -1
"""The length of a file that is not there."""
UNKNOWN: Final = -2
"""Of one that could not be asked for, while others could."""
FILES_PER_LOOK_UP: Final = 256
_PROBERS: Final = re.compile(rf"\.([0-9]{{1,10}})\.[0-9]{{1,10}}({re.escape(TEMPORARY)})?")
JOBS_PER_WORKER: Final = 2
"""In a worker's hands at once: it has a thread for each, and one reads or writes while the other verifies."""


class Priority(IntEnum):
    """Lower goes first: loads before stores, everything that serves before everything that tends."""

    LOAD = 0
    STORE = 1
    TEND = 2  # scrubbing, probing, checksums


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ReadObject:
    """Read an object in the on-medium format (docs/formats/object.md), verify all of it, leave its raw payload.

    `parts` hold header and stored payload, padded to pages, in order. `extents` are where the
    raw payload goes; None: verify only (the scrubber, fsck).
    """

    parts: tuple[Part, ...]
    name: ObjectName
    sequence: int  # the header must repeat it; 0: any
    extents: tuple[Extent, ...] | None


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write an object: header, then the payload from the extents through the codec.

    `parts` have room for the raw payload; what a codec saves stays unwritten at their end.
    `raw_sum`: of the payload when known, compared with what was read from RAM.
    """

    parts: tuple[Part, ...]
    name: ObjectName
    sequence: int
    codec: int  # a `kvdepot.core.objectfile.Codec`
    created_at: int  # unix seconds
    extents: tuple[Extent, ...]
    raw_sum: int | None
    sync: bool  # fdatasync before the answer


@dataclass(frozen=True, slots=True)
class Append:
    """Append whole records to a journal. A short write is undone by truncation, or answered as an error."""

    file: str
    expected_bytes: int  # length of the file before: anything else is an error
    data: bytes
    sync: bool


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make a file of exactly `length` with all its blocks (posix_fallocate). NO_SPACE before the last byte is taken.

    `beside_bytes`: what is still to be written beside it, and has to have room then, too.
    """

    file: str
    length: int
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Remove:
    """Unlink files; one that is not there is fine."""

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Copy the bytes of a damaged object to a file of its own, then leave them. OK also when they cannot be read."""

    parts: tuple[Part, ...]
    file: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Do what jobs do, on a small file that is removed; for a path that was taken out of use.

    `folder`: its files are what jobs read and write. All of them are opened so, and some are read.
    """

    file: str
    write: bool
    folder: str = ""  # empty: each job has a file of its own

    def made_by(self, pid: int, thread: int) -> str:
        """The name of the file: each prober has its own, and it is renamed by `TEMPORARY` for a moment."""
        return f"{self.file}.{pid}.{thread}"


def prober(file_name: str, probe: str) -> int | None:
    """The pid of whose probe this file is, as far as its name says; `probe` is `Probe.file`. None: no probe's."""
    match = _PROBERS.fullmatch(file_name.removeprefix(probe)) if file_name.startswith(probe) else None
    return int(match[1]) if match else None


# Objects that are files of their own, in a directory that others have too (docs/formats/shared.md).


@dataclass(frozen=True, slots=True)
class LookUpFiles:
    """Which of these are there, and how long: `Answer.lengths`. All at once, as far as a file system does that.

    Fails only where none could be found out.
    """

    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read the object that a file holds, as `ReadObject` does. One that is proved damaged is quarantined by rename.

    FOREIGN: its header is sound, and differs from `name` in parent or boundary alone. The file stays.

    `quarantine`: the name it gets, to which outcome and suffix are added. A file that is not there, or no more, is
    GONE; where the marker of the directory is missing too that says nothing of the file: IO_ERROR.
    """

    file: str
    name: ObjectName
    extents: tuple[Extent, ...] | None
    quarantine: str


@dataclass(frozen=True, slots=True)
class PublishFile:
    """Make an object a file: write `temporary`, then rename it; or nothing, where it is there already.

    GONE: the folder of temporaries is missing, or on another file system than `device` (0: any); nothing was written.
    Nor was it where the answer is FOREIGN (see `ReadFile`).
    """

    file: str
    temporary: str  # nobody else has a file of this name
    device: int
    name: ObjectName
    codec: int  # a `kvdepot.core.objectfile.Codec`
    created_at: int  # unix seconds
    extents: tuple[Extent, ...]
    raw_sum: int | None  # of the payload when known
    sync: bool
    quarantine: str  # as for `ReadFile`: of a damaged file that is in the way


@dataclass(frozen=True, slots=True)
class TouchFiles:
    """Set the times of these to now, by the file system's clock. `Answer.lengths`: 0, ABSENT or UNKNOWN.

    Fails only where none could be touched.
    """

    files: tuple[str, ...]


def job_bytes(job: Job) -> int:
    """Payload bytes that a job moves; what a queue is bounded by."""
    match job:
        case ReadObject() | WriteObject() | ReadFile() | PublishFile():
            return job.name.raw_bytes
        case Append():
            return len(job.data)
        case Quarantine():
            return sum(part.length for part in job.parts)
        case _:
            return 0


Job = (
    ReadObject | WriteObject | Append | Allocate | Remove | Quarantine | Probe
    | LookUpFiles | ReadFile | PublishFile | TouchFiles
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """`stored_bytes`, `stored_sum` and `raw_sum` (XXH3-128) are of the payload, where the job had one."""

    outcome: IoOutcome
    detail: str = ""  # for the log: errno and path, or the field that differed
    stored_bytes: int = 0
    stored_sum: int = 0
    raw_sum: int = 0
    seconds: float = 0.0  # in the worker
    direct: bool = True  # False: through the page cache: O_DIRECT is refused, or not safe
    already_there: bool = False  # a publication found the object, and wrote nothing
    lengths: tuple[int, ...] = ()  # of each file of the job, or ABSENT, or UNKNOWN
