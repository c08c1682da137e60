"""What an I/O worker does with each job; free of processes, so that tests and offline verbs call it too."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    PAGE_BYTES,
    Codec,
    Damage,
    ObjectDamageError,
    ObjectHeader,
    object_bytes,
    payload_sum,
    worth_bytes_max,
)
from kvdepot.server.io import codecs
from kvdepot.server.io.direct_io import DirectFiles, first_bytes, outcome_of, past_the_cache
from kvdepot.server.io.jobs import (
    Allocate,
    Answer,
    Append,
    Job,
    Part,
    Probe,
    Quarantine,
    ReadObject,
    Remove,
    WriteObject,
)
from kvdepot.server.tiers.base import IoOutcome

SCRATCH_BYTES_MAX: Final = 64 << 20
"""Of one buffer; it holds the longest coded object of any arena (`coded_limit`)."""
SCRATCH_KEPT_BYTES: Final = 8 << 20
"""Larger scratch memory is given back after the job."""
_PIECE_BYTES: Final = 4 << 20
"""What is verified or copied without a place in the arena is read piece by piece."""


def coded_limit(arena_bytes: int) -> int:
    """The longest object that is stored with a codec, from an arena of this size; longer ones are stored as they are.

    Coded bytes are checked as a whole before they are decoded, in scratch memory, which should be little beside RAM.
    """
    return min(max(arena_bytes // 256, SCRATCH_KEPT_BYTES), SCRATCH_BYTES_MAX)


class Context:
    """What one thread of a worker works with: its directory, the arena it maps, its open files, its scratch memory."""

    def __init__(
        self,
        directory: str,
        arena: memoryview | None = None,
        present: Callable[[int, int], None] = lambda offset, length: None,  # noqa: ARG005
    ) -> None:
        """`arena`: all of it, writable; None where no job has extents. Extents are offsets in it.

        `present` is told of each extent before it is read or written: see `arena_pages`.
        """
        self.files = DirectFiles(directory)
        self.header = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.tail = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.coded_bytes_max = coded_limit(len(arena or b""))
        self._arena = arena
        self._present = present
        self._scratch: list[memoryview] = []

    def views(self, extents: Sequence[Extent], raw_bytes: int) -> list[memoryview]:
        """The extents, page-rounded: the tail of an extent's last page belongs to it. Raises ValueError."""
        arena = self._arena
        if arena is None or sum(length for _, length in extents) != raw_bytes:
            raise ValueError(f"extents {extents[:4]} of together {raw_bytes} bytes, in {'an' if arena else 'no'} arena")
        views = []
        for index, (offset, length) in enumerate(extents):
            end = offset + _padded(length)
            if offset % PAGE_BYTES or end > len(arena) or (length % PAGE_BYTES and index < len(extents) - 1):
                raise ValueError(f"extent {index} of {len(extents)} is {length} bytes at {offset}")
            self._present(offset, end - offset)
            views.append(arena[offset:end])
        return views

    def scratch(self, number: int, length: int) -> memoryview:
        """Page-aligned private memory; what it holds is anything. Raises ValueError beyond SCRATCH_BYTES_MAX."""
        if length > SCRATCH_BYTES_MAX:
            raise ValueError(f"{length} bytes of scratch memory; the limit is {SCRATCH_BYTES_MAX}")
        while len(self._scratch) <= number:
            self._scratch.append(memoryview(b""))
        if len(self._scratch[number]) < length:
            self._scratch[number] = memoryview(mmap.mmap(-1, _padded(length)))
        return self._scratch[number][:length]

    def trim(self) -> None:
        """Give large scratch memory back."""
        self._scratch = [kept if len(kept) <= SCRATCH_KEPT_BYTES else memoryview(b"") for kept in self._scratch]

    def close(self) -> None:
        """Close the files; whatever comes next opens them again."""
        self.files.close()


def perform(job: Job, context: Context) -> Answer:
    """Do it. Never raises for what a medium does or holds: that is the answer's `outcome`.

    A job that contradicts itself or the arena is answered IO_ERROR, and nothing was touched.
    """
    started = time.monotonic()
    try:
        answer = _PERFORM[type(job)](job, context)
    except ObjectDamageError as damage:
        answer = Answer(IoOutcome(damage.damage.value), str(damage))
    except OSError as error:
        answer = Answer(outcome_of(error), str(error))
    except ValueError as error:
        answer = Answer(IoOutcome.IO_ERROR, f"refused: {error}")
    context.trim()
    return replace(answer, seconds=time.monotonic() - started, direct=context.files.direct)


# Objects.


def _read(job: ReadObject, context: Context) -> Answer:
    room = _room(job.parts)
    if job.extents is None:
        return _verify(job, context, room)
    raw = context.views(job.extents, job.name.raw_bytes)
    if room >= _padded(job.name.raw_bytes):  # so that is most likely what is stored
        header = _header(job, context, context.files.read(job.parts, [context.header, *raw]))
        stored = _exactly(raw, header.stored_bytes)
        if header.codec is Codec.NONE:
            return _plain(header, payload_sum(stored))
        coded = context.scratch(0, header.stored_bytes)
        _copy(stored, coded)
    else:
        coded = context.scratch(0, room)
        header = _header(job, context, context.files.read(job.parts, [context.header, coded]))
        coded = coded[: header.stored_bytes]
    return _decoded(header, coded, _exactly(raw, job.name.raw_bytes))


def _verify(job: ReadObject, context: Context, room: int) -> Answer:
    """Read all of it, keep nothing."""
    read = context.files.read(job.parts, [context.header])
    header = _header(job, context, read + room if read == HEADER_BYTES else read)
    payload = _within(job.parts, HEADER_BYTES, _padded(header.stored_bytes))
    if header.codec is Codec.NONE:
        return _plain(header, payload_sum(first_bytes(_pieces(payload, context), header.stored_bytes)))
    coded = context.scratch(0, _padded(header.stored_bytes))
    header.check_room(context.files.read(payload, [coded]))
    return _decoded(header, coded[: header.stored_bytes], [context.scratch(1, header.name.raw_bytes)])


def _header(job: ReadObject, context: Context, read_bytes: int) -> ObjectHeader:
    """Checks 1 to 9 of docs/formats/object.md; `read_bytes` of the object were there. Raises ObjectDamageError."""
    header = ObjectHeader.unpack(context.header[:read_bytes])
    header.check(job.name, job.sequence)
    header.check_room(read_bytes - HEADER_BYTES)
    return header


def _plain(header: ObjectHeader, total: int) -> Answer:
    if total != header.stored_sum or total != header.raw_sum:
        raise ObjectDamageError(Damage.CORRUPT, "payload: checksum does not match")
    return Answer(IoOutcome.OK, "", header.stored_bytes, total, total)


def _decoded(header: ObjectHeader, coded: memoryview, raw: list[memoryview]) -> Answer:
    """Checks 10 to 12. Nothing reaches the codec before its sum held."""
    if payload_sum([coded]) != header.stored_sum:
        raise ObjectDamageError(Damage.CORRUPT, "stored payload: checksum does not match")
    if codecs.decode(header.codec, coded, raw) is not IoOutcome.OK:
        raise ObjectDamageError(Damage.CODEC, f"codec {header.codec.name} refuses a payload whose checksum held")
    raw_sum = payload_sum(raw)
    if raw_sum != header.raw_sum:
        raise ObjectDamageError(Damage.CORRUPT, "decoded payload: checksum does not match")
    return Answer(IoOutcome.OK, "", header.stored_bytes, header.stored_sum, raw_sum)


def _write(job: WriteObject, context: Context) -> Answer:
    """The checksum is taken first because it goes in front: its cost hides behind the other thread's request."""
    pages = context.views(job.extents, job.name.raw_bytes)
    raw = _exactly(pages, job.name.raw_bytes)
    if _room(job.parts) < _padded(job.name.raw_bytes):
        raise ValueError(f"{_room(job.parts)} bytes of room for a payload of {job.name.raw_bytes}")
    raw_sum = payload_sum(raw)
    if job.raw_sum is not None and job.raw_sum != raw_sum:
        return Answer(IoOutcome.CORRUPT, "the copy in RAM is not what was committed", 0, 0, raw_sum)
    codec, payload, stored_bytes, stored_sum = _encoded(job, context, raw, raw_sum)
    header = ObjectHeader(job.name, codec, stored_bytes, raw_sum, stored_sum, job.sequence, job.created_at)
    context.header[:] = header.pack()
    pages = [context.header, *_whole_pages(payload, context.tail)]
    context.files.write(_within(job.parts, 0, object_bytes(stored_bytes)), pages)
    if job.sync:
        context.files.sync(job.parts)
    return Answer(IoOutcome.OK, "", stored_bytes, stored_sum, raw_sum)


def _encoded(
    job: WriteObject, context: Context, raw: list[memoryview], raw_sum: int
) -> tuple[Codec, list[memoryview], int, int]:
    """What is stored: with what codec, which bytes, how many, their checksum."""
    room = worth_bytes_max(job.name.raw_bytes)
    if job.codec != Codec.NONE and room and job.name.raw_bytes <= context.coded_bytes_max:
        coded = context.scratch(0, room)
        stored_bytes = codecs.encode(Codec(job.codec), raw, coded)
        if stored_bytes:
            payload = [coded[:stored_bytes]]
            return Codec(job.codec), payload, stored_bytes, payload_sum(payload)
    return Codec.NONE, raw, job.name.raw_bytes, raw_sum


def _whole_pages(payload: list[memoryview], tail: memoryview) -> list[memoryview]:
    """The last page of a payload has to end in zeros, and is not the worker's to write to."""
    *views, last = payload
    whole = len(last) // PAGE_BYTES * PAGE_BYTES
    rest = len(last) - whole
    if rest:
        tail[:rest] = last[whole:]
        tail[rest:] = bytes(PAGE_BYTES - rest)
    return [view for view in (*views, last[:whole], tail if rest else tail[:0]) if view]


def _pieces(parts: Sequence[Part], context: Context) -> Iterator[memoryview]:
    """The bytes of the parts, each piece gone with the next. Raises ObjectDamageError where a file ends too early."""
    total = sum(part.length for part in parts)
    for start in range(0, total, _PIECE_BYTES):
        length = min(_PIECE_BYTES, total - start)
        piece = context.scratch(0, length)
        read = context.files.read(_within(parts, start, length), [piece])
        if read < length:
            raise ObjectDamageError(Damage.TOO_SHORT, f"payload: {start + read} of {total} bytes")
        yield piece


def _room(parts: Sequence[Part]) -> int:
    """Bytes behind the header. Raises ValueError where there is none, or direct I/O could not be done."""
    room = sum(part.length for part in parts) - HEADER_BYTES
    if room < 0 or any(part.offset % PAGE_BYTES or part.length % PAGE_BYTES for part in parts):
        raise ValueError(f"parts {parts[:4]} are not the pages of an object")
    return room


def _within(parts: Sequence[Part], start: int, length: int) -> list[Part]:
    """`length` bytes from `start` on; fewer where the parts end."""
    found = []
    for part in parts:
        first, end = max(start, 0), min(start + length, part.length)
        if first < end:
            found.append(Part(part.file, part.offset + first, end - first))
        start -= part.length
    return found


def _exactly(views: Iterable[memoryview], length: int) -> list[memoryview]:
    """Without the padding."""
    return list(first_bytes(views, length))


def _copy(views: Iterable[memoryview], into: memoryview) -> None:
    at = 0
    for view in views:
        into[at : at + len(view)] = view
        at += len(view)


def _padded(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


# Everything else.


def _append(job: Append, context: Context) -> Answer:
    """All of it is in the file, or nothing, as far as a failing medium lets itself be undone."""
    with _opened(context.files.open_buffered(job.file, create=not job.expected_bytes)) as fd:
        found = os.fstat(fd).st_size
        if found != job.expected_bytes:
            return Answer(IoOutcome.IO_ERROR, f"{job.file} has {found} bytes, not {job.expected_bytes}")
        try:
            _write_all(fd, job.data, job.expected_bytes)
            if job.sync:
                os.fdatasync(fd)
        except OSError:
            os.ftruncate(fd, job.expected_bytes)
            raise
    if job.sync and not job.expected_bytes:
        context.files.sync_folder(job.file)
    return Answer(IoOutcome.OK, stored_bytes=len(job.data))


def _allocate(job: Allocate, context: Context) -> Answer:
    with _opened(context.files.open_buffered(job.file, create=True)) as fd:
        before = os.fstat(fd).st_size
        try:
            if job.length:
                os.posix_fallocate(fd, 0, job.length)
            os.ftruncate(fd, job.length)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, before)
            if not before:
                os.unlink(context.files.path(job.file))  # noqa: PTH108
            raise
    context.files.sync_folder(job.file)
    return Answer(IoOutcome.OK)


def _remove(job: Remove, context: Context) -> Answer:
    context.files.close()  # a file that is open here keeps its blocks
    for file in job.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(context.files.path(file))  # noqa: PTH108
    return Answer(IoOutcome.OK)


def _quarantine(job: Quarantine, context: Context) -> Answer:
    """What cannot be read is left out, from the first such piece on. `stored_bytes`: how many are in the copy."""
    total = HEADER_BYTES + _room(job.parts)
    copied, why = 0, ""
    with _opened(context.files.open_buffered(job.file, create=True, flags=os.O_TRUNC)) as fd:
        try:
            for start in range(0, total, _PIECE_BYTES):
                piece = context.scratch(0, min(_PIECE_BYTES, total - start))
                read, why = _read_what_can_be(_within(job.parts, start, len(piece)), piece, context)
                _write_all(fd, piece[:read], start)
                copied += read
                if read < len(piece):
                    break
            past_the_cache(fd, 0, copied, written=True)
        except OSError:
            os.unlink(context.files.path(job.file))  # noqa: PTH108
            raise
    return Answer(IoOutcome.OK, f"{copied} of {total} bytes copied{why}", stored_bytes=copied)


def _read_what_can_be(parts: Sequence[Part], piece: memoryview, context: Context) -> tuple[int, str]:
    try:
        return context.files.read(parts, [piece]), ""
    except OSError as error:
        return 0, f": {error}"


def _probe(job: Probe, context: Context) -> Answer:
    page = context.tail
    if not job.write:
        read = context.files.read([Part(job.file, 0, PAGE_BYTES)], [page])
        return Answer(IoOutcome.OK, stored_bytes=read)
    name = f"{job.file}.{os.getpid()}"
    with _opened(context.files.open_buffered(name, create=True, flags=os.O_TRUNC)) as fd:
        os.unlink(context.files.path(name))  # noqa: PTH108 - first, so that nobody who dies here leaves it behind
        page[:] = os.urandom(PAGE_BYTES)
        _write_all(fd, page, 0)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        if os.pread(fd, PAGE_BYTES, 0) != page:
            return Answer(IoOutcome.IO_ERROR, f"{name} does not hold what was written to it")
    return Answer(IoOutcome.OK)


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        left, offset = left[done:], offset + done


_PERFORM: Final[dict[type[Any], Callable[[Any, Context], Answer]]] = {
    ReadObject: _read,
    WriteObject: _write,
    Append: _append,
    Allocate: _allocate,
    Remove: _remove,
    Quarantine: _quarantine,
    Probe: _probe,
}
