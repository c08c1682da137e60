"""What I/O workers are asked and what they answer, as plain values and as frames.

File names are relative to the directory that the pool was made for: a worker opens them
itself, so that a hung mount hangs only the worker. All sizes and offsets are bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Final

from kvdepot.core.allocator import Extent
from kvdepot.core.bounds import AtMost, Between, Count, Duration, Prose, bad
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.limits import check_limit
from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.objectfile import Codec
from kvdepot.server.io.framing import As, Digest, Framing, Signed
from kvdepot.server.platform.durable_files import TEMPORARY
from kvdepot.server.storage.base import IoOutcome, ObjectName

ABSENT: Final = -1
"""The length of a file that is not there."""
UNKNOWN: Final = -2
"""Of one that could not be asked for, while others could."""
FILES_PER_STAT: Final = 256
EXTENTS_MAX: Final = 1 << 16
"""Extents of one object: 200 times what the worst churn of the allocator left (`core.allocator`)."""
PARTS_MAX: Final = 1 << 16
DOUBTFUL_MAX: Final = 4
"""Checksums of one object that differ: of two doubts, the second of which may come before the first is over."""
FILES_MAX: Final = 4_096
"""Different files of one job."""
FILE_NAME_BYTES_MAX: Final = 512
"""With its folder; the name in the folder alone may have 255 (NAME_MAX)."""
APPEND_BYTES_MAX: Final = 16 << 20
DETAIL_BYTES_MAX: Final = 1_024
LANE_BYTES_MAX: Final = 512
JOB_BYTES_MAX: Final = 20 << 20
"""Body of one frame to a worker: the longest Append, or the most parts and extents."""
ANSWER_BYTES_MAX: Final = 4_096
PEER_CHARACTERS_MAX: Final = 128 << 10
STARTED: Final = 0
"""Number of a worker's first answer, which is to no job: its process has started."""
_OFFSET_MAX: Final = 1 << 63
_PAIR: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<H")
_PLACE: Final = struct.Struct("<IQQ")
_IN_DIRECTORY: Final = re.compile(rb"(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\.{1,2}(?:/|\Z))[^/\0]+)*").fullmatch
_PROBERS: Final = re.compile(rf"\.([0-9]{{1,10}})\.[0-9]{{1,10}}({re.escape(TEMPORARY)})?")
JOBS_PER_WORKER: Final = 2
"""Jobs that a worker does at once. It has a thread for each: one reads or writes while the other verifies."""


class Priority(IntEnum):
    """The priority of a job. Lower goes first: loads before stores, and what serves before what tends."""

    LOAD = 0
    STORE = 1
    TEND = 2  # scrubbing, probing, checksums


@dataclass(frozen=True, slots=True)
class _Ranges:
    """At most EXTENTS_MAX extents, all below the last offset of a file."""

    def check(self, field: str, value: Collection[Extent]) -> None:
        check_limit(field, len(value), EXTENTS_MAX)
        for offset, length in value:
            if offset < 0 or length < 0 or offset + length >= _OFFSET_MAX:
                raise _bad_range(offset, length)


def _bad_range(offset: int, length: int) -> InvalidArgument:
    return bad("range", f"{length} bytes at {offset}")


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of a file."""

    file: str
    offset: int
    length: int


def _encode_parts(parts: tuple[Part, ...]) -> bytes:
    """Encode parts by hand, because each object has some (ADR 58).

    Each file is encoded once: an object may lie in hundreds of places.
    """
    index: dict[str, int] = {}
    places = []
    for part in parts:
        offset, length = part.offset, part.length
        if offset < 0 or length < 0 or offset + length >= _OFFSET_MAX:
            raise _bad_range(offset, length)
        places.append(_PLACE.pack(index.setdefault(part.file, len(index)), offset, length))
    check_limit("files", len(index), FILES_MAX)
    check_limit("parts", len(places), PARTS_MAX)
    names = [_encode_name(file) for file in index]
    lengths = _PAIR.pack(len(names), len(places)) + b"".join([_LENGTH.pack(len(name)) for name in names])
    return lengths + b"".join(names) + b"".join(places)


def _decode_parts(data: bytes) -> tuple[Part, ...]:
    count, places = _PAIR.unpack_from(data)
    check_limit("files", count, FILES_MAX)
    check_limit("parts", places, PARTS_MAX)
    files = []
    at = _PAIR.size + count * _LENGTH.size
    for (length,) in _LENGTH.iter_unpack(data[_PAIR.size : at]):
        files.append(_decode_name(data[at : at + length]))
        at += length
    if len(data) != at + places * _PLACE.size:
        raise bad("parts", f"{len(data)} bytes for {places} of them")
    parts = []
    for index, offset, length in _PLACE.iter_unpack(data[at:]):
        if index >= count or offset + length >= _OFFSET_MAX:
            raise bad("parts", f"{length} bytes at {offset} of file {index} of {count}")
        parts.append(Part(files[index], offset, length))
    return tuple(parts)


def _encode_name(name: str) -> bytes:
    """Return a name as bytes, whatever these are. No file outside the directory is ever opened."""
    return _check_name(name.encode("utf-8", "surrogateescape"))


def _decode_name(name: bytes) -> str:
    return _check_name(name).decode("utf-8", "surrogateescape")


def _check_name(name: bytes) -> bytes:
    if len(name) > FILE_NAME_BYTES_MAX or not _IN_DIRECTORY(name):
        raise bad("file", f"{name!r} is no file of the directory")
    return name


FileName = Annotated[str, As(bytes, _encode_name, _decode_name)]
FileNames = Annotated[tuple[FileName, ...], Count(FILES_MAX)]
FewFileNames = Annotated[tuple[FileName, ...], Count(FILES_PER_STAT)]
Parts = Annotated[tuple[Part, ...], As(bytes, _encode_parts, _decode_parts)]
Extents = Annotated[tuple[Extent, ...], _Ranges()]
CodecNumber = Annotated[int, AtMost(max(Codec))]


@dataclass(frozen=True, slots=True)
class ReadObject:
    """Read an object in the on-medium format (docs/formats/object.md), verify all of it, leave its raw payload.

    `parts` hold header and stored payload, padded to pages, in order. `extents` are where the
    raw payload goes; None: verify only (the scrubber, fsck).
    """

    parts: Parts
    name: ObjectName
    sequence: int  # the header must repeat it; 0: any
    extents: Extents | None


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write an object: header, then the payload from the extents through the codec.

    `parts` have room for the raw payload; what a codec saves stays unwritten at their end.
    `raw_sum`: of the payload when known, compared with what was read from RAM.
    """

    parts: Parts
    name: ObjectName
    sequence: int
    codec: CodecNumber
    created_at: int  # unix seconds
    extents: Extents
    raw_sum: Digest | None
    sync: bool  # fdatasync before the answer


@dataclass(frozen=True, slots=True)
class Append:
    """Append whole records to a journal. A short write is undone by truncation, or answered as an error."""

    file: FileName
    expected_bytes: int  # length of the file before: anything else is an error
    data: Annotated[bytes, Count(APPEND_BYTES_MAX)]
    sync: bool

    def check_fields(self) -> None:
        if self.expected_bytes + len(self.data) >= _OFFSET_MAX:
            raise _bad_range(self.expected_bytes, len(self.data))


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make a file of exactly `length` with all its blocks (posix_fallocate). NO_SPACE before the last byte is taken.

    `beside_bytes`: what is still to be written in addition, and has to have room then, too.
    """

    file: FileName
    length: Annotated[int, AtMost(_OFFSET_MAX - 1)]
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Remove:
    """Unlink files; one that is not there is fine."""

    files: FileNames


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Copy the bytes of a damaged object to a file of its own, then leave them. OK also when they cannot be read."""

    parts: Parts
    file: FileName


@dataclass(frozen=True, slots=True)
class Probe:
    """Do what jobs do, on a small file that is removed afterwards. It tells whether a disabled path works again.

    `folder`: its files are what jobs read and write. All of them are opened in the same way, and some are read.
    """

    file: FileName
    folder: FileName | None = None  # None: each job has a file of its own

    def made_by(self, pid: int, thread: int) -> str:
        """Return the name of the file. Each prober has its own file, and renames it by `TEMPORARY` for a moment."""
        return f"{self.file}.{pid}.{thread}"


def prober(file_name: str, probe: str) -> int | None:
    """Return the pid of the prober that made this file, as its name has it. Return None if it is no probe's file.

    `probe` is `Probe.file`.
    """
    match = _PROBERS.fullmatch(file_name.removeprefix(probe)) if file_name.startswith(probe) else None
    return int(match[1]) if match else None


# Objects that are files of their own, in a directory that others have too (docs/formats/shared.md).


@dataclass(frozen=True, slots=True)
class StatFiles:
    """Which of these are there, and how long: `Answer.lengths`. All at once, as far as a file system does that.

    Fails only where none could be found out.
    """

    files: FewFileNames


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Read the object that a file holds, as `ReadObject` does. One that is proved damaged is quarantined by rename.

    FOREIGN: its header is sound, and differs from `name` in parent or boundary alone. The file stays.

    `quarantine`: the name it gets, to which outcome and suffix are added. A file that is not there, or no more, is
    GONE. If the marker of the directory is missing too, that says nothing of the file: IO_ERROR.

    `doubtful`: sums of payloads that count as damaged (CORRUPT), although they match the header. Without `extents` the
    answer to such a job is IO_ERROR if a damaged file could not be quarantined.

    `keys`: UNKEYED and UNKNOWN_KEY leave the file where it is.
    """

    file: FileName
    name: ObjectName
    extents: Extents | None
    quarantine: FileName
    doubtful: Annotated[tuple[Digest, ...], Count(DOUBTFUL_MAX)] = ()
    keys: KeyRing = NO_KEYS

    @property
    def only_moves(self) -> bool:
        """Return whether the job is there to quarantine doubtful bytes."""
        return self.extents is None and bool(self.doubtful)


@dataclass(frozen=True, slots=True)
class PublishFile:
    """Make an object a file: write `temporary`, then rename it; or nothing, where it is there already.

    GONE: the folder of temporaries is missing, or on another file system than `device` (0: any); nothing was written.
    Nor was it where the answer is FOREIGN (see `ReadFile`), or UNKNOWN_KEY: the file is right for those who have its
    key. A file without a MAC is replaced where there are `keys`, and so is one of a retired key. With `keys`, all of a
    file is read before it counts as there: a key's id is public, so a header alone proves nothing.
    """

    file: FileName
    temporary: FileName  # nobody else has a file of this name
    device: int
    name: ObjectName
    codec: CodecNumber
    created_at: int  # unix seconds
    extents: Extents
    raw_sum: Digest | None  # of the payload when known
    sync: bool
    quarantine: FileName  # as for `ReadFile`: of a damaged file that is in the way
    keys: KeyRing = NO_KEYS


@dataclass(frozen=True, slots=True)
class TouchFiles:
    """Set the times of these to now, by the file system's clock. `Answer.lengths`: 0, ABSENT or UNKNOWN.

    Fails only where none could be touched.
    """

    files: FewFileNames


def job_bytes(job: Job) -> int:
    """Return the payload bytes that a job moves. They bound a queue."""
    match job:
        case ReadObject() | WriteObject() | ReadFile() | PublishFile():
            return job.name.raw_bytes
        case Append():
            return len(job.data)
        case Quarantine():
            return sum(part.length for part in job.parts)
        case _:
            return 0


@dataclass(frozen=True, slots=True)
class ServePeer:
    """Do the jobs that come next at this peer. It is no job, and has no answer. `peer`: packed `PeerSettings`."""

    peer: Annotated[str, Count(PEER_CHARACTERS_MAX)]


Job = (
    ReadObject | WriteObject | Append | Allocate | Remove | Quarantine | Probe
    | StatFiles | ReadFile | PublishFile | TouchFiles
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """`stored_bytes`, `stored_sum` and `raw_sum` (XXH3-128) are of the payload, where the job had one."""

    outcome: IoOutcome
    detail: Annotated[str, Prose(DETAIL_BYTES_MAX)] = ""  # for the log: errno and path, or the field that differed
    stored_bytes: int = 0
    stored_sum: Digest = 0
    raw_sum: Digest = 0
    seconds: Annotated[float, Duration()] = 0.0  # in the worker
    direct: bool = True  # False: through the page cache: O_DIRECT is refused, or not safe
    already_there: bool = False  # a publication found the object, and wrote nothing
    lengths: Annotated[tuple[FileLength, ...], Count(FILES_PER_STAT)] = ()  # of each file of the job
    replaced: IoOutcome = IoOutcome.OK  # what was wrong with a file that a publication found there and replaced
    requests: FileLength = UNKNOWN  # to a bucket, of this worker since its last answer; UNKNOWN without a bucket
    received_bytes: int = 0  # of a bucket's objects, of this worker since its last answer
    source_id: int = 0  # of the peer that has answered: the id of its arena
    lane: Annotated[str, Prose(LANE_BYTES_MAX)] = ""  # of a peer's objects; if not as configured, and why: `x: why`

    def cut(self) -> Answer:
        """Return it with as much of the detail as fits in a frame: it is for the log."""
        if len(self.detail) <= DETAIL_BYTES_MAX // 4:
            return self
        detail = self.detail.encode("utf-8", "replace")[:DETAIL_BYTES_MAX]
        return replace(self, detail=detail.decode("utf-8", "ignore"))


FileLength = Annotated[Signed, Between(UNKNOWN, _OFFSET_MAX - 1)]
"""Bytes, or ABSENT, or UNKNOWN."""
JOBS: Final[Framing[Job | ServePeer]] = Framing(
    ReadObject, WriteObject, Append, Allocate, Remove, Quarantine, Probe,
    StatFiles, ReadFile, PublishFile, TouchFiles, ServePeer,
    bytes_max=JOB_BYTES_MAX,
)  # fmt: skip
ANSWERS: Final[Framing[Answer]] = Framing(Answer, bytes_max=ANSWER_BYTES_MAX)
