"""Messages between the daemon and an I/O worker, over a socketpair of streams.

A frame is its own length (u32), a job number (u64) and a body. Both ends bound what they read
before they read it, and believe nothing they read: the daemon may be of another version than a
worker that outlived its upgrade, and neither must do harm to the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvdepot.core.allocator import Extent
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.objectfile import Codec
from kvdepot.server.io.jobs import (
    FILES_PER_LOOK_UP,
    UNKNOWN,
    Allocate,
    Answer,
    Append,
    Job,
    LookUpFiles,
    Part,
    Probe,
    PublishFile,
    Quarantine,
    ReadFile,
    ReadObject,
    Remove,
    TouchFiles,
    WriteObject,
)
from kvdepot.server.tiers.base import IoOutcome, ObjectName

EXTENTS_MAX: Final = 1 << 16
"""Extents of one object: 200 times what the worst churn of the allocator left (`core.allocator`)."""
PARTS_MAX: Final = 1 << 16
FILES_MAX: Final = 4_096
"""Different files of one job."""
FILE_NAME_BYTES_MAX: Final = 512
"""With its folder; the name in the folder alone may have 255 (NAME_MAX)."""
APPEND_BYTES_MAX: Final = 16 << 20
DETAIL_BYTES_MAX: Final = 1_024
JOB_BYTES_MAX: Final = 20 << 20
"""One frame to a worker: the longest Append, or the most parts and extents."""
ANSWER_BYTES_MAX: Final = 4_096

STARTED: Final = 0
"""Number of a worker's first answer, which is to no job: its process has started."""

FRAME: Final = struct.Struct("<IQ")
_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PART = struct.Struct("<IQQ")
_EXTENT = struct.Struct("<QQ")
_NAME = struct.Struct("<16s16s16sBIQ")
_READ = struct.Struct("<Q?")
_WRITE = struct.Struct("<QBQ??16s")
_PUBLISH = struct.Struct("<QBQ??16s")
_ANSWER = struct.Struct("<BQ16s16sd??H")
_LENGTH = struct.Struct("<q")
_OFFSET_MAX = 1 << 63
_OUTCOMES = tuple(IoOutcome)

_T = TypeVar("_T")


class WireError(ValueError):
    """A message that is not one, or over a limit."""


class _Reader:
    """Takes a body apart. Raises WireError where it ends too early."""

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.data(layout.size))

    def data(self, length: int) -> memoryview:
        start, self._at = self._at, self._at + length
        if self._at > len(self._body):
            raise WireError(f"a message of {len(self._body)} bytes ends before its byte {self._at}")
        return self._body[start : self._at]

    def text(self, length: int) -> str:
        try:
            return str(self.data(length), "utf-8")
        except UnicodeDecodeError as error:
            raise WireError("a text that is not UTF-8") from error

    def several(self, limit: int, item: Callable[[], _T]) -> tuple[_T, ...]:
        (count,) = self.take(_U32)
        if count > limit:
            raise WireError(f"{count} of what there are at most {limit}")
        return tuple(item() for _ in range(count))

    def flag(self) -> bool:
        return bool(self.take(_U8)[0])

    def end(self) -> None:
        if self._at != len(self._body):
            raise WireError(f"{len(self._body) - self._at} bytes behind the end of a message")


# Jobs.


def pack_job(number: int, job: Job) -> bytes:
    """One frame. Raises WireError where the job is over a limit."""
    tag, pack, _ = _JOBS[type(job)]
    try:
        body = _U8.pack(tag) + pack(job)
    except (struct.error, OverflowError, UnicodeError) as error:
        raise WireError(f"{type(job).__name__}: {error}") from error
    return _frame(number, body, JOB_BYTES_MAX)


def unpack_job(body: bytes | memoryview) -> Job:
    """What stands behind a frame's head. Raises WireError."""
    reader = _Reader(body)
    (tag,) = reader.take(_U8)
    unpack = _UNPACK.get(tag)
    if unpack is None:
        raise WireError(f"job {tag} is unknown")
    job = unpack(reader)
    reader.end()
    return job


def body_bytes(head: bytes, limit: int) -> tuple[int, int]:
    """(job number, length of the body) of a frame. Raises WireError where it is longer than `limit`."""
    length, number = FRAME.unpack(head)
    if not FRAME.size < length <= limit:
        raise WireError(f"a frame of {length} bytes")
    return number, length - FRAME.size


def _frame(number: int, body: bytes, limit: int) -> bytes:
    length = FRAME.size + len(body)
    if length > limit:
        raise WireError(f"a message of {length} bytes; the limit is {limit}")
    return FRAME.pack(length, number) + body


def _pack_several(items: Sequence[bytes], limit: int, what: str) -> bytes:
    if len(items) > limit:
        raise WireError(f"{len(items)} {what}; the limit is {limit}")
    return _U32.pack(len(items)) + b"".join(items)


def _pack_file(file: str) -> bytes:
    name = file.encode(errors="surrogateescape")  # a name is bytes, whatever these are
    _check_file(file, len(name))
    return _U16.pack(len(name)) + name


def _take_file(reader: _Reader) -> str:
    (length,) = reader.take(_U16)
    file = str(reader.data(length), "utf-8", "surrogateescape")
    _check_file(file, length)
    return file


def _check_file(file: str, length: int) -> None:
    """Nothing outside the directory is ever opened."""
    pieces = file.split("/")
    if not 0 < length <= FILE_NAME_BYTES_MAX or "\0" in file or any(piece in ("", ".", "..") for piece in pieces):
        raise WireError(f"{file!r} is no file of the directory")


def _pack_files(files: Sequence[str]) -> bytes:
    return _pack_several([_pack_file(file) for file in files], FILES_MAX, "files")


def _take_files(reader: _Reader) -> tuple[str, ...]:
    return reader.several(FILES_MAX, lambda: _take_file(reader))


def _pack_parts(parts: Sequence[Part]) -> bytes:
    files = list(dict.fromkeys(part.file for part in parts))
    index = {file: number for number, file in enumerate(files)}
    for part in parts:
        _check_range(part.offset, part.length)
    packed = [_PART.pack(index[part.file], part.offset, part.length) for part in parts]
    return _pack_files(files) + _pack_several(packed, PARTS_MAX, "parts")


def _take_parts(reader: _Reader) -> tuple[Part, ...]:
    files = _take_files(reader)

    def part() -> Part:
        index, offset, length = reader.take(_PART)
        if index >= len(files):
            raise WireError(f"a part in file {index} of {len(files)}")
        _check_range(offset, length)
        return Part(files[index], offset, length)

    return reader.several(PARTS_MAX, part)


def _pack_extents(extents: Sequence[Extent]) -> bytes:
    for offset, length in extents:
        _check_range(offset, length)
    return _pack_several([_EXTENT.pack(*extent) for extent in extents], EXTENTS_MAX, "extents")


def _take_extents(reader: _Reader) -> tuple[Extent, ...]:
    def extent() -> Extent:
        offset, length = reader.take(_EXTENT)
        _check_range(offset, length)
        return offset, length

    return reader.several(EXTENTS_MAX, extent)


def _check_range(offset: int, length: int) -> None:
    if length < 0 or offset < 0 or offset + length >= _OFFSET_MAX:
        raise WireError(f"a range of {length} bytes at {offset}")


def _pack_name(name: ObjectName) -> bytes:
    if not 0 < name.raw_bytes <= OBJECT_BYTES_MAX or {len(name.namespace), len(name.key), len(name.parent)} != {16}:
        raise WireError(f"an object of {name.raw_bytes} bytes")
    return _NAME.pack(name.namespace, name.key, name.parent, name.kind, name.boundary_tokens, name.raw_bytes)


def _take_name(reader: _Reader) -> ObjectName:
    name = ObjectName(*reader.take(_NAME))
    if not 0 < name.raw_bytes <= OBJECT_BYTES_MAX:
        raise WireError(f"an object of {name.raw_bytes} bytes")
    return name


def _pack_read(job: ReadObject) -> bytes:
    head = _READ.pack(job.sequence, job.extents is not None)
    return head + _pack_name(job.name) + _pack_parts(job.parts) + _pack_extents(job.extents or ())


def _take_read(reader: _Reader) -> ReadObject:
    sequence, has_extents = reader.take(_READ)
    name, parts, extents = _take_name(reader), _take_parts(reader), _take_extents(reader)
    return ReadObject(parts, name, sequence, extents if has_extents else None)


def _pack_write(job: WriteObject) -> bytes:
    raw_sum = (job.raw_sum or 0).to_bytes(16, "little")
    head = _WRITE.pack(job.sequence, job.codec, job.created_at, job.sync, job.raw_sum is not None, raw_sum)
    return head + _pack_name(job.name) + _pack_parts(job.parts) + _pack_extents(job.extents)


def _take_write(reader: _Reader) -> WriteObject:
    sequence, codec, created_at, sync, known, raw_sum = reader.take(_WRITE)
    if codec not in Codec.__members__.values():
        raise WireError(f"codec {codec} is unknown")
    name, parts, extents = _take_name(reader), _take_parts(reader), _take_extents(reader)
    known_sum = int.from_bytes(raw_sum, "little") if known else None
    return WriteObject(parts, name, sequence, codec, created_at, extents, known_sum, sync)


def _pack_append(job: Append) -> bytes:
    if len(job.data) > APPEND_BYTES_MAX:
        raise WireError(f"{len(job.data)} bytes to append; the limit is {APPEND_BYTES_MAX}")
    _check_range(job.expected_bytes, len(job.data))
    head = _U64.pack(job.expected_bytes) + _U8.pack(job.sync) + _U32.pack(len(job.data))
    return _pack_file(job.file) + head + job.data


def _take_append(reader: _Reader) -> Append:
    file = _take_file(reader)
    (expected_bytes,) = reader.take(_U64)
    sync = reader.flag()
    (length,) = reader.take(_U32)
    if length > APPEND_BYTES_MAX:
        raise WireError(f"{length} bytes to append; the limit is {APPEND_BYTES_MAX}")
    _check_range(expected_bytes, length)
    return Append(file, expected_bytes, bytes(reader.data(length)), sync)


def _pack_allocate(job: Allocate) -> bytes:
    _check_range(0, job.length)
    return _pack_file(job.file) + _U64.pack(job.length) + _U64.pack(job.beside_bytes)


def _take_allocate(reader: _Reader) -> Allocate:
    file, (length,), (beside_bytes,) = _take_file(reader), reader.take(_U64), reader.take(_U64)
    _check_range(0, length)
    return Allocate(file, length, beside_bytes)


def _take_quarantine(reader: _Reader) -> Quarantine:
    return Quarantine(_take_parts(reader), _take_file(reader))


def _pack_probe(job: Probe) -> bytes:
    folder = _pack_file(job.folder) if job.folder else b""
    return _pack_file(job.file) + _U8.pack(job.write) + _U8.pack(bool(folder)) + folder


def _take_probe(reader: _Reader) -> Probe:
    file, write, in_folder = _take_file(reader), reader.flag(), reader.flag()
    return Probe(file, write, _take_file(reader) if in_folder else "")


def _pack_few_files(files: Sequence[str]) -> bytes:
    return _pack_several([_pack_file(file) for file in files], FILES_PER_LOOK_UP, "files")


def _take_few_files(reader: _Reader) -> tuple[str, ...]:
    return reader.several(FILES_PER_LOOK_UP, lambda: _take_file(reader))


def _pack_read_file(job: ReadFile) -> bytes:
    names = _pack_file(job.file) + _pack_file(job.quarantine) + _pack_name(job.name)
    return _U8.pack(job.extents is not None) + names + _pack_extents(job.extents or ())


def _take_read_file(reader: _Reader) -> ReadFile:
    has_extents = reader.flag()
    file, quarantine, name = _take_file(reader), _take_file(reader), _take_name(reader)
    extents = _take_extents(reader)
    return ReadFile(file, name, extents if has_extents else None, quarantine)


def _pack_publish(job: PublishFile) -> bytes:
    raw_sum = (job.raw_sum or 0).to_bytes(16, "little")
    head = _PUBLISH.pack(job.device, job.codec, job.created_at, job.sync, job.raw_sum is not None, raw_sum)
    files = b"".join(map(_pack_file, (job.file, job.temporary, job.quarantine)))
    return head + files + _pack_name(job.name) + _pack_extents(job.extents)


def _take_publish(reader: _Reader) -> PublishFile:
    device, codec, created_at, sync, known, raw_sum = reader.take(_PUBLISH)
    if codec not in Codec.__members__.values():
        raise WireError(f"codec {codec} is unknown")
    file, temporary, quarantine = _take_file(reader), _take_file(reader), _take_file(reader)
    name, extents = _take_name(reader), _take_extents(reader)
    known_sum = int.from_bytes(raw_sum, "little") if known else None
    return PublishFile(file, temporary, device, name, codec, created_at, extents, known_sum, sync, quarantine)


_JOBS: dict[type[Any], tuple[int, Callable[[Any], bytes], Callable[[_Reader], Job]]] = {
    ReadObject: (1, _pack_read, _take_read),
    WriteObject: (2, _pack_write, _take_write),
    Append: (3, _pack_append, _take_append),
    Allocate: (4, _pack_allocate, _take_allocate),
    Remove: (5, lambda job: _pack_files(job.files), lambda reader: Remove(_take_files(reader))),
    Quarantine: (6, lambda job: _pack_parts(job.parts) + _pack_file(job.file), _take_quarantine),
    Probe: (7, _pack_probe, _take_probe),
    LookUpFiles: (8, lambda job: _pack_few_files(job.files), lambda reader: LookUpFiles(_take_few_files(reader))),
    ReadFile: (9, _pack_read_file, _take_read_file),
    PublishFile: (10, _pack_publish, _take_publish),
    TouchFiles: (11, lambda job: _pack_few_files(job.files), lambda reader: TouchFiles(_take_few_files(reader))),
}
_UNPACK = {tag: unpack for tag, _, unpack in _JOBS.values()}


# Answers.


def pack_answer(number: int, answer: Answer) -> bytes:
    """One frame. A detail that is too long is cut: it is for the log."""
    detail = answer.detail.encode("utf-8", "replace")[:DETAIL_BYTES_MAX].decode("utf-8", "ignore").encode()
    head = _ANSWER.pack(
        _OUTCOMES.index(answer.outcome), answer.stored_bytes, answer.stored_sum.to_bytes(16, "little"),
        answer.raw_sum.to_bytes(16, "little"), answer.seconds, answer.direct, answer.already_there, len(detail),
    )  # fmt: skip
    lengths = _pack_several([_LENGTH.pack(length) for length in answer.lengths], FILES_PER_LOOK_UP, "lengths")
    return _frame(number, head + detail + lengths, ANSWER_BYTES_MAX)


def unpack_answer(body: bytes | bytearray | memoryview) -> Answer:
    """What stands behind a frame's head. Raises WireError."""
    reader = _Reader(body)
    outcome, stored_bytes, stored_sum, raw_sum, seconds, direct, already_there, length = reader.take(_ANSWER)
    if outcome >= len(_OUTCOMES):
        raise WireError(f"outcome {outcome} is unknown")
    if not 0 <= seconds < math.inf:
        raise WireError(f"{seconds} seconds")
    detail = reader.text(length)
    lengths = reader.several(FILES_PER_LOOK_UP, lambda: _take_length(reader))
    reader.end()
    sums = (int.from_bytes(stored_sum, "little"), int.from_bytes(raw_sum, "little"))
    return Answer(_OUTCOMES[outcome], detail, stored_bytes, *sums, seconds, direct, already_there, lengths)


def _take_length(reader: _Reader) -> int:
    (length,) = reader.take(_LENGTH)
    if length < UNKNOWN:
        raise WireError(f"a file of {length} bytes")
    return int(length)


def take_answers(received: bytearray) -> list[tuple[int, Answer]]:
    """The whole answers at the start of `received`, which loses them. Raises WireError."""
    answers = []
    at = 0
    while len(received) - at >= FRAME.size:
        number, length = body_bytes(bytes(received[at : at + FRAME.size]), ANSWER_BYTES_MAX)
        start = at + FRAME.size
        if len(received) - start < length:
            break
        at = start + length
        answers.append((number, unpack_answer(bytes(received[start:at]))))
    del received[:at]
    return answers
