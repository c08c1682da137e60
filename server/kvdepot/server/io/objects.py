"""Objects between a device and the arena: read and verified, or encoded and written (docs/formats/object.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from kvdepot.core.object_keys import NO_KEYS, KeyRing
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
from kvdepot.server.io.context import Context, padded
from kvdepot.server.io.direct_io import first_bytes
from kvdepot.server.io.jobs import Answer, Part, ReadObject, WriteObject
from kvdepot.server.io.macs import Mac, mac_of, with_mac
from kvdepot.server.storage.base import IoOutcome

PIECE_BYTES: Final = 4 << 20
"""What is verified or copied without a place in the arena is read piece by piece."""


class Source(Protocol):
    """Where the bytes of objects come from. An object is read from its start on, and nothing of it twice."""

    def read(self, parts: Sequence[Part], buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from the parts, and return how many bytes that are. Raise OSError."""


def read_object(job: ReadObject, context: Context, keys: KeyRing = NO_KEYS, source: Source | None = None) -> Answer:
    """Read an object, from the directory's files if no source is given.

    Raise ObjectDamageError if it is not the one that the job names, or not one of these keys.
    """
    source = source or context.files
    room = room_of(job.parts)
    if job.extents is None:
        return _verify(job, context, room, keys, source)
    raw = context.views(job.extents, job.name.raw_bytes)
    if room >= padded(job.name.raw_bytes):  # so that is most likely what is stored
        header, mac = _header(job, context, source.read(job.parts, [context.header, *raw]), keys)
        stored = _exactly(raw, header.stored_bytes)
        if header.codec is Codec.NONE:
            return _plain(header, stored, mac)
        coded = context.scratch(0, header.stored_bytes)
        _copy(stored, coded)
    else:
        coded = context.scratch(0, room)
        header, mac = _header(job, context, source.read(job.parts, [context.header, coded]), keys)
        coded = coded[: header.stored_bytes]
    return _decoded(header, coded, _exactly(raw, job.name.raw_bytes), mac)


def _verify(job: ReadObject, context: Context, room: int, keys: KeyRing, source: Source) -> Answer:
    """Read all of it, keep nothing."""
    read = source.read(job.parts, [context.header])
    header, mac = _header(job, context, read + room if read == HEADER_BYTES else read, keys)
    payload = within(job.parts, HEADER_BYTES, padded(header.stored_bytes))
    if header.codec is Codec.NONE:
        return _plain(header, first_bytes(_pieces(payload, context, source), header.stored_bytes), mac)
    coded = context.scratch(0, padded(header.stored_bytes))
    header.check_room(source.read(payload, [coded]))
    return _decoded(header, coded[: header.stored_bytes], [context.scratch(1, header.name.raw_bytes)], mac)


def _header(job: ReadObject, context: Context, read_bytes: int, keys: KeyRing) -> tuple[ObjectHeader, Mac | None]:
    """Make checks 1 to 11 of docs/formats/object.md. Return the header, and the MAC that the payload has to give.

    Raise ObjectDamageError. `read_bytes` of the object were there.
    """
    page = context.header[:read_bytes]
    header = ObjectHeader.unpack(page)
    header.check(job.name, job.sequence)
    mac = mac_of(header, page, keys)
    header.check_room(read_bytes - HEADER_BYTES)
    return header, mac


def _plain(header: ObjectHeader, stored: Iterable[memoryview], mac: Mac | None) -> Answer:
    total = _stored_sum(stored, mac)
    if total != header.stored_sum or total != header.raw_sum:
        raise ObjectDamageError(Damage.CORRUPT, "payload: checksum does not match")
    if mac is not None:
        mac.check(header)
    return Answer(IoOutcome.OK, "", header.stored_bytes, total, total)


def _decoded(header: ObjectHeader, coded: memoryview, raw: list[memoryview], mac: Mac | None) -> Answer:
    """Decode a payload and make checks 12 to 15. Nothing reaches the codec before checksum and MAC are found right."""
    if _stored_sum([coded], mac) != header.stored_sum:
        raise ObjectDamageError(Damage.CORRUPT, "stored payload: checksum does not match")
    if mac is not None:
        mac.check(header)
    if codecs.decode(header.codec, coded, raw) is not IoOutcome.OK:
        raise ObjectDamageError(Damage.CODEC, f"codec {header.codec.name} refuses a payload whose checksum held")
    raw_sum = payload_sum(raw)
    if raw_sum != header.raw_sum:
        raise ObjectDamageError(Damage.CORRUPT, "decoded payload: checksum does not match")
    return Answer(IoOutcome.OK, "", header.stored_bytes, header.stored_sum, raw_sum)


def _stored_sum(stored: Iterable[memoryview], mac: Mac | None) -> int:
    """Return the checksum of a stored payload, which the MAC takes in on the same way."""
    return payload_sum(stored if mac is None else mac.over(stored))


def write_object(job: WriteObject, context: Context, keys: KeyRing = NO_KEYS) -> Answer:
    """Write an object: header and payload."""
    if room_of(job.parts) < padded(job.name.raw_bytes):
        raise ValueError(f"{room_of(job.parts)} bytes of room for a payload of {job.name.raw_bytes}")
    answer, pages = packed_object(job, context, keys)
    if answer.outcome is IoOutcome.OK:
        context.files.write(within(job.parts, 0, object_bytes(answer.stored_bytes)), pages)
        if job.sync:
            context.files.sync(job.parts)
    return answer


def packed_object(job: WriteObject, context: Context, keys: KeyRing) -> tuple[Answer, list[memoryview]]:
    """Return the answer to a write that works, and what is written: header and payload, in whole pages.

    CORRUPT, and nothing is to be written, if the payload has another checksum than the job says. The checksum is
    computed first because it goes in front. Its cost is hidden by the other thread's request.
    """
    raw = _exactly(context.views(job.extents, job.name.raw_bytes), job.name.raw_bytes)
    raw_sum = payload_sum(raw)
    if job.raw_sum is not None and job.raw_sum != raw_sum:
        return Answer(IoOutcome.CORRUPT, "the copy in RAM is not what was committed", 0, 0, raw_sum), []
    codec, payload, stored_bytes, stored_sum = _encoded(job, context, raw, raw_sum)
    header = ObjectHeader(job.name, codec, stored_bytes, raw_sum, stored_sum, job.sequence, job.created_at)
    context.header[:] = with_mac(header, payload, keys).pack()
    answer = Answer(IoOutcome.OK, "", stored_bytes, stored_sum, raw_sum)
    return answer, [context.header, *_whole_pages(payload, context.tail)]


def _encoded(
    job: WriteObject, context: Context, raw: list[memoryview], raw_sum: int
) -> tuple[Codec, list[memoryview], int, int]:
    """Return what is stored: the codec, the payload, its length in bytes and its checksum."""
    room = worth_bytes_max(job.name.raw_bytes)
    if job.codec != Codec.NONE and room and job.name.raw_bytes <= context.coded_bytes_max:
        coded = context.scratch(0, room)
        stored_bytes = codecs.encode(Codec(job.codec), raw, coded)
        if stored_bytes:
            payload = [coded[:stored_bytes]]
            return Codec(job.codec), payload, stored_bytes, payload_sum(payload)
    return Codec.NONE, raw, job.name.raw_bytes, raw_sum


def _whole_pages(payload: list[memoryview], tail: memoryview) -> list[memoryview]:
    """Return the payload in whole pages. The last one has to end in zeros.

    That page is copied to `tail`, because the worker must not write to the payload.
    """
    *views, last = payload
    whole = len(last) // PAGE_BYTES * PAGE_BYTES
    rest = len(last) - whole
    if rest:
        tail[:rest] = last[whole:]
        tail[rest:] = bytes(PAGE_BYTES - rest)
    return [view for view in (*views, last[:whole], tail if rest else tail[:0]) if view]


def _pieces(parts: Sequence[Part], context: Context, source: Source) -> Iterator[memoryview]:
    """Yield the bytes of the parts. Each piece is valid until the next one.

    Raise ObjectDamageError if a file ends too early.
    """
    total = sum(part.length for part in parts)
    for start in range(0, total, PIECE_BYTES):
        length = min(PIECE_BYTES, total - start)
        piece = context.scratch(0, length)
        read = source.read(within(parts, start, length), [piece])
        if read < length:
            raise ObjectDamageError(Damage.TOO_SHORT, f"payload: {start + read} of {total} bytes")
        yield piece


def room_of(parts: Sequence[Part]) -> int:
    """Return the bytes after the header. Raise ValueError if there are none, or direct I/O could not be done."""
    room = sum(part.length for part in parts) - HEADER_BYTES
    if room < 0 or any(part.offset % PAGE_BYTES or part.length % PAGE_BYTES for part in parts):
        raise ValueError(f"parts {parts[:4]} are not the pages of an object")
    return room


def within(parts: Sequence[Part], start: int, length: int) -> list[Part]:
    """Return the parts of `length` bytes from `start` on; fewer bytes if the parts end before."""
    found = []
    for part in parts:
        first, end = max(start, 0), min(start + length, part.length)
        if first < end:
            found.append(Part(part.file, part.offset + first, end - first))
        start -= part.length
    return found


def _exactly(views: Iterable[memoryview], length: int) -> list[memoryview]:
    """Return the pages without the padding."""
    return list(first_bytes(views, length))


def _copy(views: Iterable[memoryview], into: memoryview) -> None:
    at = 0
    for view in views:
        into[at : at + len(view)] = view
        at += len(view)
