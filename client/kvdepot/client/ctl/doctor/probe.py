"""Looking at a directory, in a process of its own, because a file system that hangs keeps the process that asks it.

Run by its path, with the standard library alone, so that it starts in some hundredths of a second:
`python -I -S probe.py DIRECTORY HELD WRITE`, all texts. HELD: a pattern of the files below it whose bytes are counted.
WRITE: 1, to try with two temporary files what a tier does there. It prints `Probed` as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE_BYTES = 4096
NOT_TRIED = "not tried"
TEMPORARY = ".probe-doctor-"
"""How names of temporary files begin: as those of the daemon's probes do, which the opening of a tier passes over."""


@dataclass(frozen=True, slots=True)
class Probed:
    """`resolved` is the path without links, or, where it is not there, of the nearest folder above it.

    Texts of what was tried: empty where it worked, else the reason.
    """

    resolved: str
    is_there: bool = False
    is_directory: bool = False
    is_empty: bool = False
    looking: str = ""
    denied: bool = False  # that it may not be looked at by this user is no trouble of the device's
    mode: int = 0
    uid: int = 0
    on_root_filesystem: bool = False
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int = 0
    total_files: int = 0  # 0: the file system has no limit of them
    held_bytes: int = 0
    writing: str = NOT_TRIED  # whether temporary files can be made at all
    writing_denied: bool = False  # that this user may not says nothing of the daemon's
    rename: str = ""
    direct: str = ""
    ahead_seconds: float = 0.0  # the clock that stamps files, against this machine's


def probe(directory: str, held: str, *, write: bool) -> Probed:
    path = Path(directory)
    try:
        is_there, above = True, path
        while not above.exists():
            is_there, above = False, above.parent
        found, room = above.stat(), os.statvfs(above)
        is_directory = above.is_dir()
        tried = _Tried(path) if write and is_there and is_directory else None
        return Probed(
            resolved=str(above.resolve()), is_there=is_there, is_directory=is_directory,
            is_empty=is_there and is_directory and not os.listdir(above),  # noqa: PTH208 - names are all that is asked for
            mode=found.st_mode & 0o7777, uid=found.st_uid,
            on_root_filesystem=found.st_dev == os.stat("/").st_dev,  # noqa: PTH116 - of a fixed path
            free_bytes=room.f_bavail * room.f_frsize, total_bytes=room.f_blocks * room.f_frsize,
            free_files=room.f_favail, total_files=room.f_files,
            held_bytes=_held_bytes(path, held) if is_there and held else 0,
            writing=tried.writing if tried else NOT_TRIED,
            writing_denied=tried.writing_denied if tried else False,
            rename=tried.rename if tried else "", direct=tried.direct if tried else "",
            ahead_seconds=tried.ahead_seconds if tried else 0.0,
        )  # fmt: skip
    except OSError as error:
        return Probed(directory, looking=_text(error), denied=isinstance(error, PermissionError))


class _Tried:
    """What a tier does there: making a file, replacing one by rename, and I/O past the page cache."""

    def __init__(self, path: Path) -> None:
        self.writing = self.rename = self.direct = ""
        self.writing_denied = False
        self.ahead_seconds = 0.0
        one, other = (path / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}" for _ in range(2))
        try:
            before = time.time()
            one.write_bytes(b"one")
            self.ahead_seconds = _outside(one.stat().st_mtime, before, time.time())
            self.rename = _outcome(lambda: _check_rename(one, other))
            self.direct = _outcome(lambda: _check_direct(one))
        except OSError as error:
            self.writing, self.writing_denied = _text(error), isinstance(error, PermissionError)
        finally:
            for left in (one, other):
                with suppress(OSError):
                    left.unlink()


def _outcome(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except OSError as error:
        return _text(error)


def _check_rename(one: Path, other: Path) -> str:
    """Check that a replaced file stays as it was for its readers, and that the name has the new bytes at once."""
    other.write_bytes(b"other")
    with other.open("rb") as opened:
        one.rename(other)
        if one.exists() or other.read_bytes() != b"one":
            return "a rename over a file does not replace it"
        return "" if opened.read() == b"other" else "a rename changes a file that is open"


def _check_direct(path: Path) -> str:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        page, back = mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)  # aligned as O_DIRECT asks for
        page[:] = secrets.token_bytes(PAGE_BYTES)
        os.pwritev(fd, [page], 0)
        os.preadv(fd, [back], 0)
        return "" if back[:] == page[:] else "what is read is not what was written"
    finally:
        os.close(fd)


def _held_bytes(path: Path, pattern: str) -> int:
    held_bytes = 0
    for one in path.rglob(pattern):
        with suppress(FileNotFoundError):  # gone meanwhile
            held_bytes += one.lstat().st_blocks * 512
    return held_bytes


def _outside(value: float, low: float, high: float) -> float:
    """How far it is from the time in which it happened; stamps are as coarse as the kernel's tick."""
    return value - high if value > high else min(value - low + 0.01, 0.0)


def _text(error: OSError) -> str:
    return error.strerror or str(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(probe(sys.argv[1], sys.argv[2], write=sys.argv[3] == "1"))))
