"""A probe does to a path what jobs do, so that it tells what they would meet; it leaves nothing there."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.io.context import Context
from kvdepot.server.io.direct_io import forget, outcome_of
from kvdepot.server.io.jobs import Answer, Part, Probe
from kvdepot.server.platform.durable_files import TEMPORARY, naming, opened, sync_file
from kvdepot.server.platform.file_room import check_room
from kvdepot.server.storage.base import IoOutcome

_READ_MAX: Final = 16
_OPENED_MAX: Final = 256
"""Files of a folder that a page is read of, and that are opened to write: others each time, where there are more."""


def probe(job: Probe, context: Context) -> Answer:
    """Do a probe. Raise OSError.

    The answer is READ_ONLY also if files of the folder can be read and permission is missing to write.
    """
    context.files.close()  # what is open here may be opened by nobody else
    files = _files(job.folder, context) if job.folder else []
    _read(files[:: max(len(files) // _READ_MAX, 1)], context)
    try:
        answer = _write(job, context)
        for file in files:
            context.files.check_writable(file)
    except PermissionError as error:
        if not files:
            raise
        return Answer(IoOutcome.READ_ONLY, str(error))
    return answer


def _files(folder: str, context: Context) -> list[str]:
    path = context.files.path(folder)
    with naming("readdir", path):
        names = [name for name in os.listdir(path) if not name.endswith(TEMPORARY)]  # noqa: PTH208
    return [f"{folder}/{name}" for name in sorted(random.sample(names, min(len(names), _OPENED_MAX)))]


def _read(files: list[str], context: Context) -> None:
    """Read a page of each file, a random page each time. Raise OSError if every file fails.

    A page that cannot be read says nothing about a path where other pages can be read.
    """
    failed: list[OSError] = []
    for file in files:
        path = context.files.path(file)
        try:
            with naming("stat", path):
                pages = os.stat(path).st_size // PAGE_BYTES  # noqa: PTH116
            page = random.randrange(max(pages, 1))  # noqa: S311 - for nobody to guess
            context.files.read([Part(file, page * PAGE_BYTES, PAGE_BYTES)], [context.tail])
        except OSError as error:
            if outcome_of(error) is not IoOutcome.IO_ERROR:
                raise
            failed.append(error)
    if failed and len(failed) == len(files):
        raise failed[0]


def _write(job: Probe, context: Context) -> Answer:
    """Write, sync and read a file of this prober.

    The file is made, renamed and removed first, so that it cannot be left there.
    """
    path, page = context.files.path(job.file), context.tail
    if not job.folder:
        check_room(os.path.dirname(path), PAGE_BYTES)  # noqa: PTH120
    with _same_each_time(path):
        name = job.made_by(os.getpid(), threading.get_native_id())
        part = Part(name, 0, PAGE_BYTES)
        with contextlib.suppress(FileNotFoundError), naming("unlink", path):  # of an earlier one that could not
            os.unlink(context.files.path(name))  # noqa: PTH108
        with context.files.held(name, create=True) as fd, _renamed(context.files.path(name)) as buffered:
            page[:] = os.urandom(PAGE_BYTES)
            context.files.write([part], [page])
            sync_file(fd, path, data_only=True)
            forget(fd, 0, PAGE_BYTES)
            with naming("read", path):
                found = os.pread(buffered, PAGE_BYTES, 0)
            if found != page or context.files.read([part], [context.header]) < PAGE_BYTES or context.header != page:
                return Answer(IoOutcome.IO_ERROR, f"{path} does not hold what was written to it")
    return Answer(IoOutcome.OK)


@contextlib.contextmanager
def _renamed(path: str) -> Iterator[int]:
    """Yield a second descriptor of a file, which is renamed first and then removed."""
    other = f"{path}{TEMPORARY}"
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            with naming("rename", path):
                os.rename(path, other)  # noqa: PTH104
            with naming("unlink", path):
                os.unlink(other)  # noqa: PTH108
            yield fd
    except OSError:
        for name in (path, other):
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
        raise


@contextlib.contextmanager
def _same_each_time(path: str) -> Iterator[None]:
    """Make each probe of a path in trouble fail with the same text, so that the trouble is logged once."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
