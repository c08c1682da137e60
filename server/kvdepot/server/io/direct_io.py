"""Files of one directory, read and written past the page cache (O_DIRECT) where the path allows it.

Offsets, lengths and memory are multiples of a page (4096 bytes) throughout: no device in use asks for more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.io.jobs import Part
from kvdepot.server.platform.beneath import within
from kvdepot.server.platform.durable_files import LACKED, naming, sync_file, sync_folder
from kvdepot.server.platform.file_room import NO_ROOM
from kvdepot.server.storage.base import IoOutcome

OPEN_FILES_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 16 << 20
"""One system call: large enough for every device, short enough that a slow one lets a killed process go."""
_BUFFERS_MAX = 1024  # IOV_MAX
_OPEN: Final = os.O_NOFOLLOW | os.O_NONBLOCK
"""Of every file: the opening of a FIFO in its place waits for nobody. For regular files O_NONBLOCK has no meaning."""
_OUTCOMES: Final = {
    errno.ENOSPC: IoOutcome.NO_SPACE,
    errno.EDQUOT: IoOutcome.NO_SPACE,
    errno.EROFS: IoOutcome.READ_ONLY,
    errno.EACCES: IoOutcome.UNREADABLE,
    errno.EPERM: IoOutcome.UNREADABLE,
    errno.ENOENT: IoOutcome.GONE,
    errno.ENOTDIR: IoOutcome.GONE,
    errno.ESTALE: IoOutcome.GONE,
}
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4  # WAIT_BEFORE | WRITE | WAIT_AFTER
_REFUSES_DIRECT: Final = LACKED | {errno.EPERM, errno.EACCES}
"""What may be said of O_DIRECT alone: such a call is tried once without. Refused again, it is about the file."""
_SEES_DIRECT_TO_ITS_END: Final = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # XFS
        0x9123683E,  # Btrfs
        0xCA451A4E,  # bcachefs
        0xF2F52010,  # F2FS
        0x2FC12FC1,  # ZFS
        0x01021994,  # tmpfs
        0x794C7630,  # overlayfs: what is written lies on one of these
        0x65735546,  # FUSE: a request that its server has is waited for, killed or not
    }
)
"""File systems (statfs(2), f_type) whose direct requests are over when the process is that made them.

NFS, SMB, Ceph and 9p let a killed process go while its request is under way: what the server answers later is still
written to the pages, and these may be another object's by then (docs/adr/0012). Of others nothing is known. Some (9p,
SMB with `cache=none`) have no page cache: they do so without O_DIRECT, too.
"""
_OWN_BYTES: Final = 4 << 20


def outcome_of(error: OSError) -> IoOutcome:
    return _OUTCOMES.get(error.errno or 0, IoOutcome.IO_ERROR)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    fd: int
    writable: bool
    device: int
    inode: int


class DirectFiles:
    """Open files of a directory, for one thread. Everything raises OSError, with the path in it.

    The first file that refuses O_DIRECT, at open or at the first request, shows that it does not work. So does a file
    that lies where O_DIRECT is not safe. Then every file goes through the page cache. What was moved is put on the
    device at once, and dropped from the cache. So what is answered has met the same errors, and the cache stays the
    engines'.
    Where O_DIRECT is not safe, what is read first comes into the process's own memory.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.direct = True
        self._open: dict[str, _OpenFile] = {}  # the least recently used first
        self._held: dict[str, _OpenFile] = {}
        self._safe: dict[int, bool] = {}  # by device, asked once: with FUSE it is a request
        self._own: memoryview | None = None  # what is read comes here first; None: to where it belongs

    def path(self, file: str) -> str:
        return os.path.join(self.directory, file)  # noqa: PTH118 - names, and in the way of every job

    def read(self, parts: Sequence[Part], buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from the parts, as far as these go; how many bytes that are. Less: a file ends there."""
        return self._move(parts, buffers, writing=False)

    def write(self, parts: Sequence[Part], buffers: Sequence[memoryview]) -> None:
        """Write all of the buffers to where the parts are; the files exist."""
        self._move(parts, buffers, writing=True)

    def check_writable(self, file: str) -> None:
        """Open it as a write would."""
        self._file(file, writable=True)

    def sync(self, parts: Sequence[Part]) -> None:
        for file in dict.fromkeys(part.file for part in parts):
            sync_file(self._file(file, writable=True).fd, self.path(file), data_only=True)

    def sync_folder(self, file: str) -> None:
        """Make the name of a new file durable."""
        sync_folder(os.path.dirname(self.path(file)))  # noqa: PTH120

    def within(self, file: str) -> contextlib.AbstractContextManager[tuple[str, int]]:
        """Yield the file's name and its folder's descriptor, as `beneath.within` does."""
        return within(self.directory, file)

    @contextlib.contextmanager
    def held(self, file: str, *, create: bool = False) -> Iterator[int]:
        """Open it once: until the end this name means this file, whatever others do with the name. Its descriptor.

        No symbolic link below the directory is followed.
        `create`: a new file, and nothing else may have this name. What closing says is raised: the write of a
        network file system may fail that late.
        """
        flags = (os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDONLY) | _OPEN
        with self.within(file) as (name, folder):
            fd = self._open_directly(self.path(file), flags, name, folder)
        self._held[file] = _OpenFile(fd, create, 0, 0)
        try:
            yield fd
        finally:
            del self._held[file]
            with naming("close", self.path(file)):
                os.close(fd)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def open_buffered(self, file: str, *, create: bool, flags: int = 0) -> int:
        """Return a descriptor without O_DIRECT, which the caller has to close.

        `create`: make the file if it is missing, and the folders below the directory. The directory itself is never
        made.
        """
        wanted, path = os.O_RDWR | _OPEN | (os.O_CREAT if create else 0) | flags, self.path(file)
        with naming("open", path):
            try:
                return os.open(path, wanted, 0o600)
            except FileNotFoundError:
                if not create:
                    raise
                self.make_folders(file)
                return os.open(path, wanted, 0o600)

    def make_folders(self, file: str) -> list[str]:
        """Make the folders that the file lies in, below the directory. Return those that were new."""
        folder, made = "", []
        for name in file.split("/")[:-1]:
            folder = f"{folder}/{name}" if folder else name
            with contextlib.suppress(FileExistsError), naming("mkdir", self.path(folder)):
                with self.within(folder) as (last, above):
                    os.mkdir(last, 0o700, dir_fd=above)
                made.append(folder)
        return made

    def _move(self, parts: Sequence[Part], buffers: Sequence[memoryview], *, writing: bool) -> int:
        moved = 0
        for part, pieces in _split(parts, buffers):
            length = sum(map(len, pieces))
            done = self._move_part(part, pieces, writing=writing)
            moved += done
            if done < length:
                break
        return moved

    def _move_part(self, part: Part, pieces: list[memoryview], *, writing: bool) -> int:
        moved = 0
        for request in _requests(pieces):
            length = sum(map(len, request))
            done = self._move_request(part.file, part.offset + moved, request, writing=writing)
            moved += done
            if done < length:
                break
        return moved

    def _move_request(self, file: str, offset: int, request: list[memoryview], *, writing: bool) -> int:
        try:
            return self._move_once(file, offset, request, writing=writing)
        except OSError as error:
            if not self.direct or error.errno not in _REFUSES_DIRECT:
                raise
        self._give_up_direct()
        try:
            return self._move_once(file, offset, request, writing=writing)
        except OSError:
            self.direct = True  # it was not that
            raise

    def _move_once(self, file: str, offset: int, request: list[memoryview], *, writing: bool) -> int:
        with naming("write" if writing else "read", self.path(file)):
            moved = self._move_all(file, offset, request, writing=writing)
            if not self.direct:
                past_the_cache(self._file(file, writable=writing).fd, offset, moved, written=writing)
        return moved

    def _move_all(self, file: str, offset: int, request: list[memoryview], *, writing: bool) -> int:
        """Make one request, and repeat it if the kernel does less than all of it."""
        fd = self._file(file, writable=writing).fd
        left, moved, length = request, 0, sum(map(len, request))
        while moved < length:
            if writing:
                done = os.pwritev(fd, left, offset + moved)
            elif self._own is None:
                done = os.preadv(fd, left, offset + moved)
            else:
                done = os.preadv(fd, [self._own[: length - moved]], offset + moved)
                _scatter(self._own[:done], left)
            if writing and done < min(length - moved, PAGE_BYTES):
                raise OSError(errno.EIO, "nothing was written", self.path(file))
            if not writing and (done == 0 or done % PAGE_BYTES) and _ends(fd, offset + moved + done):
                return moved + done
            done -= done % PAGE_BYTES if done < length - moved else 0
            if not done:
                raise OSError(errno.EIO, "less than a page was read before the end of the file", self.path(file))
            moved += done
            left = list(_behind(left, done))
        return moved

    def _file(self, file: str, *, writable: bool) -> _OpenFile:
        """Open, and still what is found under this name: its directory may have been removed or mounted over."""
        held = self._held.get(file)
        if held is not None:
            return held
        path = self.path(file)
        known = self._open.pop(file, None)
        if known is not None:
            if (known.writable or not writable) and _identity(path) == (known.device, known.inode):
                self._open[file] = known
                return known
            os.close(known.fd)
        elif len(self._open) >= OPEN_FILES_MAX:
            os.close(self._open.pop(next(iter(self._open))).fd)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | _OPEN
        fd = self._open_directly(path, flags)
        status = os.fstat(fd)
        self._open[file] = opened = _OpenFile(fd, writable, status.st_dev, status.st_ino)
        return opened

    def _open_directly(self, path: str, flags: int, name: str = "", folder: int | None = None) -> int:
        """Open with O_DIRECT, or without it if it is refused or not safe. A refusal may leave a new file.

        `name`: of the file in its `folder`, if that is open.
        """
        with naming("open", path):
            try:
                fd = os.open(name or path, flags | (os.O_DIRECT if self.direct else 0), 0o600, dir_fd=folder)
            except OSError as error:
                if not self.direct or error.errno not in _REFUSES_DIRECT:
                    raise
                fd = os.open(name or path, flags & ~os.O_EXCL, 0o600, dir_fd=folder)
                self._give_up_direct()
        try:
            if not self._is_safe(fd):
                self._own = self._own or memoryview(bytearray(_OWN_BYTES))
                if self.direct:
                    self._give_up_direct()
                    _buffer(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_safe(self, fd: int) -> bool:
        device = os.fstat(fd).st_dev
        if device not in self._safe:
            self._safe[device] = file_system(fd) in _SEES_DIRECT_TO_ITS_END
        return self._safe[device]

    def _give_up_direct(self) -> None:
        self.close()
        self.direct = False
        for held in self._held.values():
            _buffer(held.fd)


def _ends(fd: int, at: int) -> bool:
    """Return whether the file has no bytes from `at` on.

    A read that got less does not prove it. A FUSE server or a failing device may answer with a part, and an object that
    was taken for too short would be quarantined.
    """
    return os.fstat(fd).st_size <= at


def _buffer(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def file_system(fd: int) -> int:
    """Return the f_type of statfs(2), or 0 if the call fails."""
    status = (ctypes.c_long * 32)()  # of its first word; the whole struct has fifteen
    return status[0] & 0xFFFFFFFF if _libc().fstatfs(fd, status) == 0 else 0


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode, or None if they cannot be had: opening the file again says why."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _split(parts: Iterable[Part], buffers: Sequence[memoryview]) -> Iterator[tuple[Part, list[memoryview]]]:
    """Yield each part with the pieces of the buffers that lie in it."""
    left = list(buffers)
    for part in parts:
        if not left:
            return
        pieces = list(first_bytes(left, part.length))
        left = list(_behind(left, part.length))
        yield part, pieces
    if left:
        raise ValueError(f"{sum(map(len, left))} bytes more than the parts hold")


def _requests(pieces: list[memoryview]) -> Iterator[list[memoryview]]:
    while pieces:
        request = list(first_bytes(pieces[:_BUFFERS_MAX], REQUEST_BYTES_MAX))
        yield request
        pieces = list(_behind(pieces, sum(map(len, request))))


def _scatter(data: memoryview, buffers: Iterable[memoryview]) -> None:
    """Copy the data into the first of the buffers, as far as the data reaches."""
    for buffer in first_bytes(buffers, len(data)):
        buffer[:], data = data[: len(buffer)], data[len(buffer) :]


def first_bytes(buffers: Iterable[memoryview], length: int) -> Iterator[memoryview]:
    """Yield the first `length` bytes of the buffers."""
    for buffer in buffers:
        if length <= 0:
            return
        yield buffer[:length]
        length -= len(buffer)


def _behind(buffers: Iterable[memoryview], length: int) -> Iterator[memoryview]:
    """Yield the buffers without their first `length` bytes."""
    for buffer in buffers:
        if length < len(buffer):
            yield buffer[max(length, 0) :]
        length -= len(buffer)


def past_the_cache(fd: int, offset: int, length: int, *, written: bool) -> None:
    if length and written and _libc().sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE_AND_WAIT):
        number = ctypes.get_errno()
        if number in NO_ROOM | {errno.EIO}:  # others say that it cannot be done here
            raise OSError(number, os.strerror(number))
    if length:
        forget(fd, offset, length)


def forget(fd: int, offset: int, length: int) -> None:
    """Drop it from the page cache: advice, which a file system need not take."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library: `os` has neither sync_file_range(2) nor the f_type of statfs(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return libc
