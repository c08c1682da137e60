"""Objects that are files of their own, in a directory that others have too: jobs of the shared tier."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from stat import S_ISREG
from typing import Final

from kvdepot.core.object_keys import KeyRing
from kvdepot.core.objectfile import HEADER_BYTES, Damage, ObjectDamageError, ObjectHeader, object_bytes, payload_sum
from kvdepot.server.io.context import Context, padded
from kvdepot.server.io.direct_io import first_bytes
from kvdepot.server.io.jobs import (
    ABSENT,
    UNKNOWN,
    Answer,
    Part,
    PublishFile,
    ReadFile,
    ReadObject,
    StatFiles,
    TouchFiles,
    WriteObject,
)
from kvdepot.server.io.macs import mac_of
from kvdepot.server.io.objects import read_object, write_object
from kvdepot.server.platform.durable_files import LACKED, naming
from kvdepot.server.platform.file_room import check_room
from kvdepot.server.storage.base import DAMAGED, OTHER_KEYS, IoOutcome
from kvdepot.server.storage.shared_layout import FORMAT_VERSION, MARKER, NAMESPACE, SUFFIX

_THREADS_MAX: Final = 64
"""Requests at once of one `StatFiles`: it costs the server's latency, whatever the number of its names."""
_VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_RENAMES_MAX: Final = 3


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads of this process. The process ends without waiting for them."""
    return ThreadPoolExecutor(_THREADS_MAX, "files")


def stat_files(job: StatFiles, context: Context) -> Answer:
    """Return the length of each file, or ABSENT if it is no regular file. Raise OSError if every request failed."""

    def length(file: str) -> int:
        with naming("stat", context.files.path(file)), context.files.within(file) as (name, folder):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return found.st_size if S_ISREG(found.st_mode) else ABSENT

    return ask_each(job.files, length)


def touch(job: TouchFiles, context: Context) -> Answer:
    """Set the times of files to now. Raise OSError if this failed for all of them.

    It is no error if the file system cannot set times at all.
    """

    def now(file: str) -> int:
        with naming("utimensat", context.files.path(file)), context.files.within(file) as (name, folder):
            os.utime(name, dir_fd=folder, follow_symlinks=False)  # without a time: the server's
        return 0

    return ask_each(job.files, now, lacked=LACKED)


def ask_each(files: Iterable[str], ask: Callable[[str], int], lacked: frozenset[int] = frozenset()) -> Answer:
    """Ask for each file, by several threads. Raise OSError if every request failed and one of the errors counts.

    `lacked`: errors of a call that the file system does not have. They say nothing against the file system.
    """

    def asked(file: str) -> int | OSError:
        try:
            return ask(file)
        except OSError as error:
            return ABSENT if error.errno in _VANISHED else error

    answers = list(_threads().map(asked, files))
    errors = [answer for answer in answers if isinstance(answer, OSError)]
    serious = [error for error in errors if error.errno not in lacked]
    if serious and len(errors) == len(answers):
        raise serious[0]
    lengths = tuple(UNKNOWN if isinstance(answer, OSError) else answer for answer in answers)
    return Answer(IoOutcome.OK, str(errors[0]) if errors else "", lengths=lengths)


def read_file(job: ReadFile, context: Context) -> Answer:
    try:
        with context.files.held(job.file) as fd:
            room = room_bytes(job.name.raw_bytes, os.fstat(fd).st_size, context.coded_bytes_max)
            try:
                read = ReadObject((Part(job.file, 0, room),), job.name, 0, job.extents)
                answer = read_object(read, context, job.keys)
                if answer.raw_sum in job.doubtful:
                    raise ObjectDamageError(Damage.CORRUPT, "payload: another checksum of it differed")
                return answer
            except ObjectDamageError as damage:
                judged = _judged(job, fd, damage, context)
                if job.only_moves and judged.outcome in DAMAGED - OTHER_KEYS and _in_place(job, fd, context):
                    raise OSError(errno.EIO, "cannot be moved aside", job.file) from damage
                return judged
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
        try:
            os.stat(context.files.path(MARKER))  # noqa: PTH116
        except OSError as missing:
            raise OSError(errno.EIO, f"the directory is gone: {missing.strerror}", missing.filename) from error
        raise


def publish(job: PublishFile, context: Context) -> Answer:
    """Write an object under a temporary name and rename it, unless it is already there.

    `raw_sum` of the answer is always that of the payload in RAM. Another node's payload may differ in its last bits.
    """
    already = _already_there(job, context)
    if already is not None and already.outcome not in DAMAGED - OTHER_KEYS:
        return already
    answer = _written(job, context)
    if already is None:
        return answer
    return replace(answer, replaced=already.outcome, detail=answer.detail or already.detail)


def _written(job: PublishFile, context: Context) -> Answer:
    """Write the object in the place of whatever is there."""
    with contextlib.suppress(FileNotFoundError):  # of a worker that died over this job
        _unlink(job.temporary, context)
    try:
        answer = _write_temporary(job, context)
        if answer.outcome is IoOutcome.OK:
            new = _rename(job, context)
            if job.sync:
                for name in (job.file, *new):
                    context.files.sync_folder(name)
            return answer
    except BaseException:
        with contextlib.suppress(OSError):
            _unlink(job.temporary, context)
        raise
    _unlink(job.temporary, context)
    return answer


def _unlink(file: str, context: Context) -> None:
    with naming("unlink", context.files.path(file)), context.files.within(file) as (name, folder):
        os.unlink(name, dir_fd=folder)


def room_bytes(raw_bytes: int, file_bytes: int, coded_bytes_max: int) -> int:
    """Return how much to read at most: what the name allows.

    It is less if a codec made the object short, so that scratch memory holds it.
    """
    limit, found = object_bytes(raw_bytes), padded(file_bytes)
    return found if HEADER_BYTES < found < limit and found - HEADER_BYTES <= coded_bytes_max else limit


def _already_there(job: PublishFile, context: Context) -> Answer | None:
    """Return the answer if the object is already there, or another one is in its place. Return None otherwise.

    A foreign object is not replaced, nor one of an unknown key: it is a hit for somebody. A damaged one is moved to
    quarantine, and its damage returned. None is also returned for a file that is to be replaced.
    """
    try:
        with context.files.held(job.file) as fd:
            try:
                read = context.files.read([Part(job.file, 0, HEADER_BYTES)], [context.header])
                header = ObjectHeader.unpack(context.header[:read])
                header.check(job.name)
                mac_of(header, context.header, job.keys)
                header.check_room(os.fstat(fd).st_size - HEADER_BYTES)
                if job.keys:
                    _check_writer(job, fd, context)
            except ObjectDamageError as damage:
                answer = _judged(job, fd, damage, context)
                stays = answer.outcome in (IoOutcome.FOREIGN, IoOutcome.UNKNOWN_KEY)
                useless = answer.outcome is IoOutcome.UNKEYED or (stays and retired(job.keys, context))
                return None if useless else answer
            with contextlib.suppress(OSError):  # not ours to write to: it is there all the same
                os.utime(fd)
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
        return None
    raw_sum = job.raw_sum
    if raw_sum is None:
        raw_sum = payload_sum(first_bytes(context.views(job.extents, job.name.raw_bytes), job.name.raw_bytes))
    return Answer(IoOutcome.OK, "", header.stored_bytes, header.stored_sum, raw_sum, already_there=True)


def _write_temporary(job: PublishFile, context: Context) -> Answer:
    check_room(os.path.dirname(context.files.path(job.temporary)), object_bytes(job.name.raw_bytes))  # noqa: PTH120
    with context.files.held(job.temporary, create=True) as fd:
        if job.device and os.fstat(fd).st_dev != job.device:
            raise FileNotFoundError(errno.ENOENT, "on another file system than before: not mounted?", job.temporary)
        parts = (Part(job.temporary, 0, object_bytes(job.name.raw_bytes)),)
        write = WriteObject(
            parts, job.name, 0, job.codec, job.created_at, job.extents, job.raw_sum, job.sync,
        )  # fmt: skip
        answer = write_object(write, context, job.keys)
        length = os.fstat(fd).st_size
        if answer.outcome is IoOutcome.OK and length != object_bytes(answer.stored_bytes):
            raise OSError(
                errno.EIO, f"{length} bytes of {object_bytes(answer.stored_bytes)} were written", job.temporary
            )
    return answer


def _rename(job: PublishFile, context: Context) -> list[str]:
    """Rename the temporary. Return the folders that this made.

    The rename is repeated if its folder was missing, or was removed because it was empty.
    """
    made: list[str] = []
    path = context.files.path(job.file)
    for attempt in range(1, _RENAMES_MAX + 1):
        try:
            with (
                naming("rename", context.files.path(job.temporary), path),
                context.files.within(job.temporary) as (temporary, aside),
                context.files.within(job.file) as (name, within),
            ):
                os.rename(temporary, name, src_dir_fd=aside, dst_dir_fd=within)
        except NotADirectoryError as error:
            raise OSError(errno.EIO, "a symbolic link or a file is in the place of its folder", path) from error
        except FileNotFoundError as error:
            if attempt == _RENAMES_MAX:  # the temporary is what is missing: somebody removed it
                raise OSError(errno.EIO, "cannot be renamed", job.temporary) from error
            folder = job.file.partition("/")[0]
            made += context.files.make_folders(job.file)
            if folder in made:
                _describe(folder, job.name.namespace, context)
        else:
            break
    return made


def _describe(folder: str, namespace: bytes, context: Context) -> None:
    """Describe a namespace for people. Its fields are not known here, and a tier without them serves as well."""
    values = {"format": FORMAT_VERSION, "namespace": namespace.hex()}
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with contextlib.suppress(OSError):
        with context.files.within(f"{folder}/{NAMESPACE}") as (name, within):
            fd = os.open(name, flags, 0o600, dir_fd=within)
        with open(fd, "w") as file:  # noqa: PTH123 - a descriptor
            file.write(json.dumps(values, indent=1) + "\n")


def _judged(job: ReadFile | PublishFile, fd: int, damage: ObjectDamageError, context: Context) -> Answer:
    """Return the answer to a read that failed so. A file that is proved damaged is quarantined."""
    if foreign(job, damage, context):
        try:
            if job.keys:
                _check_writer(job, fd, context)
            return Answer(IoOutcome.FOREIGN, str(damage))
        except ObjectDamageError as forged:
            damage = forged
    outcome = IoOutcome(damage.damage.value)
    if outcome not in OTHER_KEYS:
        _quarantine(job, fd, damage, context)
    return Answer(outcome, str(damage))


def foreign(job: ReadFile | PublishFile, damage: ObjectDamageError, context: Context) -> bool:
    """Return whether only a client's word speaks against the file (ADR 0022).

    Parent and boundary are what a client said, in the job and in the file. Namespace, key and kind make the file's
    name, and the length follows from the namespace. A header with others proves that the file is not what it should be.
    """
    if damage.damage is not Damage.IDENTITY:
        return False
    name = ObjectHeader.unpack(context.header).name
    return replace(name, parent=job.name.parent, boundary_tokens=job.name.boundary_tokens) == job.name


def _check_writer(job: ReadFile | PublishFile, fd: int, context: Context) -> None:
    """Verify all of an object by the name in its header: somebody with a key wrote it. Raise ObjectDamageError."""
    name = ObjectHeader.unpack(context.header).name
    room = room_bytes(name.raw_bytes, os.fstat(fd).st_size, context.coded_bytes_max)
    read_object(ReadObject((Part(job.file, 0, room),), name, 0, None), context, job.keys)


def retired(keys: KeyRing, context: Context) -> bool:
    """Return whether the header that was read is of a key that nobody has any more."""
    return ObjectHeader.unpack(context.header).key_id in keys.retired


def _in_place(job: ReadFile, fd: int, context: Context) -> bool:
    """Return whether the file of `fd` still has its name, or nobody can tell."""
    read = os.fstat(fd)
    try:
        with context.files.within(job.file) as (name, folder):
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        return error.errno not in _VANISHED
    return (there.st_dev, there.st_ino) == (read.st_dev, read.st_ino)


def _quarantine(job: ReadFile | PublishFile, fd: int, damage: ObjectDamageError, context: Context) -> None:
    """Quarantine a file by a rename.

    If that took another file than the one of `fd`, another node has published again: its file is put back.
    """
    there = context.files.within(f"{job.quarantine}.{damage.damage}{SUFFIX}")
    read = os.fstat(fd)
    with contextlib.suppress(OSError), context.files.within(job.file) as (name, folder), there as (aside, beside):
        # Whatever becomes of the file, it is not served.
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=beside)
        taken = os.stat(aside, dir_fd=beside, follow_symlinks=False)
        if (taken.st_dev, taken.st_ino) != (read.st_dev, read.st_ino):
            with contextlib.suppress(FileExistsError):
                os.link(aside, name, src_dir_fd=beside, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(aside, dir_fd=beside)
