"""What a directory's device reads and writes alone, in a process of its own, because a file system may hang.

Run by its path, with the standard library alone: `python -I -S medium.py DIRECTORY BYTES`. Two threads, each its half
of one file that is removed at once, in requests of 4 MiB past the page cache. It prints `Medium` as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

REQUEST_BYTES = 4 << 20
THREADS = 2
ROOM = 4
"""Free space that has to be left, as a multiple of the file's size: a live tier is in the same file system."""
TEMPORARY = ".probe-bench-"
"""How the file's name begins: as those of the daemon's probes do, which the opening of a tier passes over."""


@dataclass(frozen=True, slots=True)
class Medium:
    """Bytes a second; `why_not`: why there are none. `direct` False: the page cache is in it."""

    write: float = 0.0
    read: float = 0.0
    direct: bool = True
    why_not: str = ""


def measure(directory: str, size_bytes: int) -> Medium:
    path = Path(directory, f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < ROOM * size_bytes:
            return Medium(why_not="it has not the room for the device's own file")
        direct = True
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError as error:
            if isinstance(error, PermissionError | FileNotFoundError):
                raise
            direct = False
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            path.unlink()
            requests = max(size_bytes // REQUEST_BYTES // THREADS, 1)
            os.posix_fallocate(fd, 0, THREADS * requests * REQUEST_BYTES)
            write = _rate(lambda buffer, at: os.pwritev(fd, [buffer], at), requests, lambda: os.fsync(fd))
            read = _rate(lambda buffer, at: os.preadv(fd, [buffer], at), requests, lambda: None)
        finally:
            os.close(fd)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        return Medium(why_not=error.strerror or str(error))
    return Medium(write, read, direct)


def _rate(move: Callable[[mmap.mmap, int], int], requests: int, finish: Callable[[], None]) -> float:
    """Return the bytes per second of moves by threads. Raise OSError if a thread failed."""
    failed: list[OSError] = []

    def half(first: int) -> None:
        buffer = mmap.mmap(-1, REQUEST_BYTES)  # aligned as O_DIRECT asks for
        buffer[:] = secrets.token_bytes(REQUEST_BYTES)
        try:
            for at in range(first * requests, (first + 1) * requests):
                if move(buffer, at * REQUEST_BYTES) != REQUEST_BYTES:
                    raise OSError(0, "a short read or write")
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=half, args=(first,)) for first in range(THREADS)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish()
    if failed:
        raise failed[0]
    return THREADS * requests * REQUEST_BYTES / (time.monotonic() - started)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
