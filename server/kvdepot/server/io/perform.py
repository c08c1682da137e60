"""What an I/O worker does with each job; free of processes, so that tests and offline verbs call it too."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.objectfile import HEADER_BYTES, ObjectDamageError
from kvdepot.server.io.bucket_objects import IN_BUCKET
from kvdepot.server.io.context import Context
from kvdepot.server.io.direct_io import outcome_of, past_the_cache
from kvdepot.server.io.file_objects import publish, read_file, stat_files, touch
from kvdepot.server.io.jobs import (
    Allocate,
    Answer,
    Append,
    Job,
    Part,
    Probe,
    PublishFile,
    Quarantine,
    ReadFile,
    ReadObject,
    Remove,
    StatFiles,
    TouchFiles,
    WriteObject,
)
from kvdepot.server.io.objects import PIECE_BYTES, read_object, room_of, within, write_object
from kvdepot.server.io.probing import probe
from kvdepot.server.platform.durable_files import naming, sync_file
from kvdepot.server.platform.file_room import allocate, explained
from kvdepot.server.storage.base import IoOutcome


def perform(job: Job, context: Context) -> Answer:
    """Do it. Never raises for what a device does or holds: that is the answer's `outcome`.

    A job that contradicts itself or the arena is answered IO_ERROR, and nothing was touched.
    """
    started = time.monotonic()
    try:
        answer = _actions(context)[type(job)](job, context)
    except ObjectDamageError as damage:
        answer = Answer(IoOutcome(damage.damage.value), str(damage))
    except OSError as error:
        answer = Answer(outcome_of(error), str(explained(error)))
    except ValueError as error:
        answer = Answer(IoOutcome.IO_ERROR, f"refused: {error}")
    context.trim()
    if context.bucket is not None:
        requests, received_bytes = context.bucket.take_counts()
        answer = replace(answer, requests=requests, received_bytes=received_bytes)
    return replace(answer, seconds=time.monotonic() - started, direct=context.files.direct)


def _actions(context: Context) -> Mapping[type[Any], Callable[[Any, Context], Answer]]:
    if context.peer is not None:
        from kvdepot.server.io.peer_objects import IN_PEER  # messages and NIXL, which other workers never need

        return IN_PEER
    return _IN_DIRECTORY if context.bucket is None else IN_BUCKET


def _append(job: Append, context: Context) -> Answer:
    """Append all of the data or nothing, as far as a failing device lets the write be undone."""
    path = context.files.path(job.file)
    with _opened(context.files.open_buffered(job.file, create=not job.expected_bytes)) as fd:
        found = os.fstat(fd).st_size
        if found != job.expected_bytes:
            return Answer(IoOutcome.IO_ERROR, f"{job.file} has {found} bytes, not {job.expected_bytes}")
        try:
            with naming("write", path):
                _write_all(fd, job.data, job.expected_bytes)
            if job.sync:
                sync_file(fd, path, data_only=True)
        except OSError:
            with naming("truncate", path):
                os.ftruncate(fd, job.expected_bytes)
            raise
    if job.sync and not job.expected_bytes:
        context.files.sync_folder(job.file)
    return Answer(IoOutcome.OK, stored_bytes=len(job.data))


def _allocate(job: Allocate, context: Context) -> Answer:
    path = context.files.path(job.file)
    with _opened(context.files.open_buffered(job.file, create=True)) as fd:
        before = os.fstat(fd).st_size
        try:
            allocate(fd, path, job.length, job.beside_bytes)
            sync_file(fd, path)
        except OSError:
            with naming("truncate", path):
                os.ftruncate(fd, before)
            if not before:
                os.unlink(path)  # noqa: PTH108
            raise
    context.files.sync_folder(job.file)
    return Answer(IoOutcome.OK)


def _remove(job: Remove, context: Context) -> Answer:
    context.files.close()  # a file that is open here keeps its blocks
    for file in job.files:
        path = context.files.path(file)
        with contextlib.suppress(FileNotFoundError), naming("unlink", path):
            os.unlink(path)  # noqa: PTH108
    return Answer(IoOutcome.OK)


def _quarantine(job: Quarantine, context: Context) -> Answer:
    """Copy an object to quarantine, up to the first piece that cannot be read.

    `stored_bytes` of the answer: the bytes in the copy.
    """
    total = HEADER_BYTES + room_of(job.parts)
    copied, why = 0, ""
    with _opened(context.files.open_buffered(job.file, create=True, flags=os.O_TRUNC)) as fd:
        try:
            for start in range(0, total, PIECE_BYTES):
                piece = context.scratch(0, min(PIECE_BYTES, total - start))
                read, why = _read_what_can_be(within(job.parts, start, len(piece)), piece, context)
                with naming("write", context.files.path(job.file)):
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


_IN_DIRECTORY: Final[dict[type[Any], Callable[[Any, Context], Answer]]] = {
    ReadObject: read_object,
    WriteObject: write_object,
    Append: _append,
    Allocate: _allocate,
    Remove: _remove,
    Quarantine: _quarantine,
    Probe: probe,
    StatFiles: stat_files,
    ReadFile: read_file,
    PublishFile: publish,
    TouchFiles: touch,
}
