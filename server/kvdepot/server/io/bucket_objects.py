"""Objects in a bucket: what the jobs of the shared tier are where the files are a bucket's objects (ADR 75).

An object is put once, under a condition that nothing has its key. Nothing is renamed, touched or evicted here: the
lifecycle rules of the bucket delete.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.objectfile import HEADER_BYTES, Damage, ObjectDamageError, ObjectHeader, object_bytes
from kvdepot.server.io.bucket import Bucket, Incoming, Version
from kvdepot.server.io.context import Context
from kvdepot.server.io.file_objects import ask_each, foreign, retired, room_bytes
from kvdepot.server.io.jobs import (
    Answer,
    Job,
    Part,
    Probe,
    PublishFile,
    ReadFile,
    ReadObject,
    StatFiles,
    WriteObject,
)
from kvdepot.server.io.macs import mac_of
from kvdepot.server.io.objects import packed_object, read_object
from kvdepot.server.storage.base import DAMAGED, OTHER_KEYS, IoOutcome, ObjectName
from kvdepot.server.storage.shared_layout import SUFFIX

_PUTS_MAX: Final = 3
"""Of one publication: what is in its place may vanish, or change, between two requests."""
_PUBLISH_REQUESTS_MAX: Final = 5
"""Of each of these: a put, up to three to read what is there, and a put in its place."""
_READ_REQUESTS_MAX: Final = 3
"""A get, and a copy and a deletion if what came is damaged."""
_PROBE_REQUESTS: Final = 4
IGNORES_CONDITIONS: Final = "the server ignores If-None-Match: a put replaced an object that was there"


def _bucket(context: Context) -> Bucket:
    if context.bucket is None:
        raise ValueError("a job for a bucket, and this worker has none")
    return context.bucket


def _stat(job: StatFiles, context: Context) -> Answer:
    """Return the length of each object, or ABSENT. One request each, and many at once."""
    return ask_each(job.files, _bucket(context).head)


def _read(job: ReadFile, context: Context) -> Answer:
    try:
        answer = _read_all(job, job.name, context, job.extents)
        if answer.raw_sum in job.doubtful:
            raise ObjectDamageError(Damage.CORRUPT, "payload: another checksum of it differed")
        return answer
    except ObjectDamageError as damage:
        return _judged(job, damage, context)


def _read_all(
    job: ReadFile | PublishFile, name: ObjectName, context: Context, extents: tuple[tuple[int, int], ...] | None
) -> Answer:
    """Read an object by one request, into the extents if there are any."""
    found = _bucket(context).get(job.file)
    room = room_bytes(name.raw_bytes, found.size, context.coded_bytes_max)
    read = ReadObject((Part(job.file, 0, room),), name, 0, extents)
    return read_object(read, context, job.keys, found)


def _publish(job: PublishFile, context: Context) -> Answer:
    """Put an object, unless it is already there. One that is there and damaged is replaced by a put that names it.

    `raw_sum` of the answer is always that of the payload in RAM. Another node's payload may differ in its last bits.
    """
    bucket, part = _bucket(context), Part(job.file, 0, object_bytes(job.name.raw_bytes))
    write = WriteObject((part,), job.name, 0, job.codec, job.created_at, job.extents, job.raw_sum, sync=False)
    for _ in range(_PUTS_MAX):
        answer, pages = packed_object(write, context, job.keys)
        if answer.outcome is not IoOutcome.OK:
            return answer
        try:
            bucket.create(job.file, pages)
        except FileExistsError:
            pass
        else:
            return answer
        with contextlib.suppress(FileNotFoundError):  # it is no longer there
            there, version = _there(job, context)
            if there.outcome is IoOutcome.OK:
                return replace(there, raw_sum=answer.raw_sum)
            if _stays(job, there, context):
                return there
            answer, pages = packed_object(write, context, job.keys)  # what is there was read to the same memory
            if answer.outcome is not IoOutcome.OK:
                return answer
            with contextlib.suppress(FileExistsError):  # it is no longer the same
                bucket.replace(job.file, pages, version)
                damaged = there.outcome if there.outcome in DAMAGED - OTHER_KEYS else IoOutcome.OK
                return replace(answer, replaced=damaged, detail=there.detail if damaged in DAMAGED else "")
    return Answer(IoOutcome.IO_ERROR, f"{job.file}: what has its place changes with every request")


def _there(job: PublishFile, context: Context) -> tuple[Answer, Version]:
    """Return what a read of the object in the place would say, and its version. Without keys its header decides.

    Raise FileNotFoundError if there is none.
    """
    found = _bucket(context).get(job.file, HEADER_BYTES)
    try:
        header = _header(found, job, context)
        header.check(job.name)
        mac_of(header, context.header, job.keys)
        header.check_room(found.size - HEADER_BYTES)
        if job.keys:
            _read_all(job, header.name, context, None)
    except ObjectDamageError as damage:
        outcome = _outcome(job, damage, context)
        return Answer(outcome, str(damage)), found.version
    return Answer(IoOutcome.OK, "", header.stored_bytes, header.stored_sum, already_there=True), found.version


def _header(found: Incoming, job: PublishFile, context: Context) -> ObjectHeader:
    read = found.read([Part(job.file, 0, HEADER_BYTES)], [context.header])
    return ObjectHeader.unpack(context.header[:read])


def _stays(job: PublishFile, there: Answer, context: Context) -> bool:
    """Return whether what is there is right for somebody else."""
    return there.outcome in (IoOutcome.FOREIGN, IoOutcome.UNKNOWN_KEY) and not retired(job.keys, context)


def _outcome(job: ReadFile | PublishFile, damage: ObjectDamageError, context: Context) -> IoOutcome:
    """Return what a damage means. The header that was read is still in its place."""
    if foreign(job, damage, context):
        try:
            if job.keys:
                _read_all(job, ObjectHeader.unpack(context.header).name, context, None)
        except ObjectDamageError as forged:
            damage = forged
        else:
            return IoOutcome.FOREIGN
    return IoOutcome(damage.damage.value)


def _judged(job: ReadFile, damage: ObjectDamageError, context: Context) -> Answer:
    """Return the answer to a read that failed so. An object that is proved damaged is moved to quarantine."""
    outcome = _outcome(job, damage, context)
    if outcome in DAMAGED - OTHER_KEYS:
        try:
            _bucket(context).move(job.file, f"{job.quarantine}.{outcome}{SUFFIX}")
        except FileNotFoundError:
            pass
        except OSError as error:  # by a load nothing is served, whatever becomes of the object
            if job.only_moves:
                raise OSError(errno.EIO, f"cannot be moved aside: {error.strerror}", job.file) from error
    return Answer(outcome, str(damage))


def _probe(job: Probe, context: Context) -> Answer:
    """Put an object twice under the condition that it is new, read it, delete it. Raise OSError."""
    bucket = _bucket(context)
    key = f"{job.file}.{os.urandom(8).hex()}"
    content, other = os.urandom(32), os.urandom(32)
    bucket.create(key, [content])
    try:
        refused = False
        try:
            bucket.create(key, [other])
        except FileExistsError:
            refused = True
        found = bucket.get(key)
        read = memoryview(bytearray(len(content)))
        whole = found.read([Part(key, 0, len(content))], [read]) == found.size == len(content)
        if not whole or read != (content if refused else other):
            return Answer(IoOutcome.IO_ERROR, f"{key} does not hold what was put there")
    finally:
        with contextlib.suppress(OSError):
            bucket.delete(key)
    if not refused and not bucket.settings.unconditional:
        return Answer(IoOutcome.IO_ERROR, IGNORES_CONDITIONS)
    return Answer(IoOutcome.OK)


def cost_max(job: Job) -> tuple[int, int]:
    """Return the requests that a job takes at most, and the bytes of its object that it receives at most.

    Headers alone do not count: they decide whether what is there is right. A node with keys reads what is there as a
    whole before it publishes, and reads an object twice whose MAC may be that of another name.
    """
    match job:
        case StatFiles():
            return len(job.files), 0
        case ReadFile():
            times = 2 if job.keys else 1
            return _READ_REQUESTS_MAX + times - 1, times * object_bytes(job.name.raw_bytes)
        case PublishFile():
            times = 2 * _PUTS_MAX if job.keys else 0
            return _PUTS_MAX * _PUBLISH_REQUESTS_MAX, times * object_bytes(job.name.raw_bytes)
        case Probe():
            return _PROBE_REQUESTS, 0
        case _:
            return 0, 0


IN_BUCKET: Final[dict[type[Any], Callable[[Any, Context], Answer]]] = {
    StatFiles: _stat,
    ReadFile: _read,
    PublishFile: _publish,
    Probe: _probe,
}
"""What is done to a bucket. A worker of a bucket gets no other jobs."""
