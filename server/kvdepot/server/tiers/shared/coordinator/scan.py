"""A count of everything below a shared directory's root, in small steps and bounded memory.

A file may be renamed while it is being counted. It is met all the same where it goes the way of its life: temporaries
are looked at first, quarantine last. The directory itself may be moved away meanwhile, and back: what is not there for
a moment must not be taken for room. So only the root is looked up by its path; and where something is missing, the
marker says whether it is the directory that is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.storage.shared_layout import MARKER, QUARANTINE, TEMPORARIES, object_of, object_path
from kvdepot.server.tiers.shared.coordinator.files import is_oversized, read_small, taken_bytes

OBJECTS_MAX: Final = 8 << 20
"""Objects that are candidates for eviction; more are counted only."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FOLDERS_DEEP_MAX: Final = 32
_PASSING: Final = frozenset({errno.EIO, errno.ETIMEDOUT})
"""What a soft mount answers for a server that pauses."""
_QUARANTINED_MAX: Final = 1 << 16
_NAMESPACES_MAX: Final = (1 << 16) - 1
_MTIME_NS_MAX: Final = (1 << 63) - 1
"""In the year 2262: file systems know later times, and some before 1970. No server has stamped them."""
_GROWN_BY: Final = 1 << 16

UNREAD: Final = 0
"""Boundary of an object whose header was not looked at."""

ROW: Final = np.dtype(
    [
        ("mtime_ns", "<i8"),
        ("key", "u1", (16,)),
        ("parent", "<u8"),  # `chunks` of the parent chunk, once the header was read; 0: none
        ("pages", "<u4"),
        ("tokens", "<u4"),  # boundary
        ("bucket", "<i4"),  # hour of recency
        ("namespace", "<u2"),
        ("kind", "u1"),
        ("gone", "u1"),
    ]
)
Rows = npt.NDArray[Any]


class Columns:
    """The objects that a scan met: one row each, no Python object."""

    def __init__(self, objects_max: int = OBJECTS_MAX) -> None:
        self._objects_max = objects_max
        self._rows = np.zeros(0, ROW)
        self._length = 0
        self._numbers: dict[bytes, int] = {}
        self.namespaces: list[bytes] = []
        self.left_out = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Rows:
        """All rows, to be changed in place."""
        return self._rows[: self._length]

    def add(self, namespace: bytes, key: bytes, kind: int, status: os.stat_result) -> None:
        number = self._numbers.get(namespace)
        full = self._length == self._objects_max or (number is None and len(self.namespaces) == _NAMESPACES_MAX)
        if full or not 0 <= status.st_mtime_ns <= _MTIME_NS_MAX:
            self.left_out += 1
            return
        if number is None:
            number = self._numbers[namespace] = len(self.namespaces)
            self.namespaces.append(namespace)
        if self._length == len(self._rows):
            grown = np.zeros(min(self._length + max(_GROWN_BY, self._length // 4), self._objects_max), ROW)
            grown[: self._length] = self._rows
            self._rows = grown
        row = self._rows[self._length]
        row["mtime_ns"], row["pages"] = status.st_mtime_ns, taken_bytes(status) // PAGE_BYTES
        row["namespace"], row["kind"] = number, kind
        row["key"] = np.frombuffer(key, "u1")
        self._length += 1

    def file(self, row: int) -> str:
        """Return the object's file, below the root."""
        found = self._rows[row]
        return object_path(self.namespaces[int(found["namespace"])], found["key"].tobytes(), int(found["kind"]))


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A file in quarantine."""

    file_name: str
    ctime_ns: int  # of its renaming: the time of modification is that of its last use
    size_bytes: int


class _Folder:
    """An open folder, and where it is below the root."""

    def __init__(self, fd: int, path: str) -> None:
        """Take over `fd`. Raise OSError."""
        self.fd = fd
        self.path = path
        try:
            self.entries = os.scandir(fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


@dataclass
class Scan:
    """One count. `steps` does it; only `files` is true before it ended. OSError ends it without a result."""

    root: Path
    columns: Columns = field(default_factory=Columns)
    files: int = 0
    used_bytes: int = 0
    quarantined_bytes: int = 0
    quarantined: list[Quarantined] = field(default_factory=list)
    skipped: int = 0  # folders that nobody may look into, or too deep
    oversized: int = 0  # files that are longer than any object; of these, the blocks count

    def steps(self) -> Iterator[OSError | None]:
        """Yield before every entry: the steps are some microseconds, or an answer of the server, apart.

        Yield an error if a server may answer the same request later: then the next step asks again.
        """
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            status = os.fstat(root)
            self.used_bytes += taken_bytes(status)
            yield from self._below(root, TEMPORARIES, status.st_dev)
            with os.scandir(root) as entries:
                for entry in entries:
                    if entry.name not in (TEMPORARIES, QUARANTINE):
                        yield from self._below(root, entry.name, status.st_dev)
            yield from self._below(root, QUARANTINE, status.st_dev)
        finally:
            os.close(root)

    def _below(self, root: int, top: str, device: int) -> Iterator[OSError | None]:
        folders: list[_Folder] = []
        found: tuple[int, str, str] | None = (root, top, top)  # the folder that it is in, its name, its path
        try:
            while True:
                if found is not None:
                    yield None
                    while isinstance(folder := self._entry(*found, device, len(folders)), OSError):
                        yield folder
                    if folder is not None:
                        folders.append(folder)
                if not folders:
                    return
                above = folders[-1]
                entry = next(above.entries, None)
                found = (above.fd, entry.name, f"{above.path}/{entry.name}") if entry else None
                if entry is None:
                    folders.pop().close()
        finally:
            for folder in folders:
                folder.close()

    def _entry(self, within: int, name: str, path: str, device: int, depth: int) -> _Folder | OSError | None:
        """Count it, once; of a folder, what is in it."""
        try:
            status = os.stat(name, dir_fd=within, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                self._count(path, status)  # whatever its device is: overlayfs shows that of the layer
                return None
            if status.st_dev != device:
                return None  # another file system, mounted here
            folder = None
            if depth < _FOLDERS_DEEP_MAX:
                with suppress(PermissionError):
                    folder = _Folder(os.open(name, _FOLDER, dir_fd=within), path)
            self.used_bytes += taken_bytes(status)
            self.skipped += folder is None
            return folder
        except (FileNotFoundError, NotADirectoryError):
            if read_small(self.root, MARKER, 0) is None:
                raise OSError(errno.ENOENT, "the directory went away while it was counted") from None
            return None
        except PermissionError:
            self.skipped += 1
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            return error
        return None

    def _count(self, file: str, status: os.stat_result) -> None:
        named = object_of(file)
        is_foreign = named is None and not file.startswith((f"{TEMPORARIES}/", f"{QUARANTINE}/"))
        size_bytes = taken_bytes(status, by_blocks=is_foreign)
        self.files += 1
        self.used_bytes += size_bytes
        if not stat.S_ISREG(status.st_mode):
            return
        if is_oversized(status):
            self.oversized += 1
            return
        if named is not None:
            self.columns.add(*named, status)
        elif file.startswith(QUARANTINE + "/"):
            self.quarantined_bytes += size_bytes
            if len(self.quarantined) < _QUARANTINED_MAX and file.endswith(".kvd"):
                name = file[len(QUARANTINE) + 1 :]
                self.quarantined.append(Quarantined(name, max(status.st_ctime_ns, status.st_mtime_ns), size_bytes))
