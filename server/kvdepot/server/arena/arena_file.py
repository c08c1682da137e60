"""The file of the arena: created, or adopted from an earlier daemon (design.md#arena).

An orderly stop and a SIGKILL both leave the file, with its memory. The next daemon adopts it by its name, or by a
descriptor that the supervisor kept, if the name was deleted (docs/adr/0025). Delete the file while no daemon runs to
free its memory. There is never a second arena while an earlier one has loans.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from kvdepot.core.arena import (
    FORMAT_VERSION,
    PAGE_BYTES,
    ArenaFormatError,
    ArenaLayout,
    ArenaTables,
    LentMode,
    Superblock,
)
from kvdepot.core.errors import ConfigError
from kvdepot.server.config.memory_room import MIB, directory_room, memory_room
from kvdepot.server.depot.types import Liveness, ProcessIdentity
from kvdepot.server.platform.own_files import open_own

_FALLOC_FL_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02


class Origin(Enum):
    """How this run got its arena."""

    CREATED = "created"
    ADOPTED = "adopted"
    RECREATED = "recreated"


@dataclass(frozen=True, slots=True)
class ArenaRequest:
    """What the configuration asks for. `capacity_bytes` is only for messages; the file has `size_bytes`."""

    path: Path
    size_bytes: int
    capacity_bytes: int
    config_file: str


class ArenaFile:
    """A mapped arena with its superblock. The daemon's own descriptor; engines get fresh opens of it."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, origin: Origin, note: str) -> None:
        self.path = path
        self.fd = fd
        self.superblock = superblock
        self.layout = superblock.layout
        self.origin = origin
        self.note = note
        self._map = mmap.mmap(fd, self.layout.size_bytes)
        self.buffer = memoryview(self._map)
        self.tables = ArenaTables(self.buffer, self.layout)

    @property
    def address(self) -> int:
        """Return the address at which this process maps the arena."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def populated_bytes(self) -> int:
        """Return how far from its start the file has all its pages: up to its first hole."""
        try:
            return os.lseek(self.fd, 0, os.SEEK_HOLE)
        except OSError:  # cannot be said: everything is populated again, which changes no byte
            return 0

    def open_descriptor(self) -> int:
        """Return another descriptor for another process. It shares no offset, flag or lock with the daemon."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file. The mapping ends with the process, because numpy views still point into it."""
        os.close(self.fd)


def open_arena(
    request: ArenaRequest,
    *,
    kept: Sequence[int] = (),
    boot_id: bytes,
    random_bytes: Callable[[int], bytes],
    alive: Callable[[ProcessIdentity], Liveness],
) -> ArenaFile:
    """Adopt the arena at `request.path`, or create it. The caller holds its lock.

    `kept`: descriptors that an earlier daemon had its supervisor keep; taken over. One whose file has lost its name
    is the arena if there is none at the path.

    Never a second arena beside an old one: what cannot be adopted gives its pages back first
    (engines that still map it see zeros, whose generations match no grant).

    Raises ConfigError when the size does not fit, or changes while extents are lent to living processes.
    """
    old = _open_existing(request)
    for fd in kept:
        old = _choose(old, fd, request, alive)
    if old is None:
        _check_room(request, held_bytes=0)
        return _create(request, boot_id, random_bytes, Origin.CREATED, "")
    try:
        superblock = _read_superblock(old)
        reason = _why_not(superblock, request, boot_id)
        if reason and superblock.boot == boot_id:
            _refuse_if_lent(old, superblock, request, alive)
    except ArenaFormatError as error:
        superblock, reason = None, str(error)
    if superblock is not None and not reason:
        adopted = replace(superblock, run=superblock.run + 1)
        _write_superblock(old, adopted)
        return ArenaFile(request.path, old, adopted, Origin.ADOPTED, "")
    _check_room(request, held_bytes=os.fstat(old).st_blocks * 512)
    _discard(old, request.path)
    return _create(request, boot_id, random_bytes, Origin.RECREATED, reason)


def check_arena(request: ArenaRequest, boot_id: bytes) -> None:
    """Raise ConfigError where `open_arena` would, except for loans. Changes nothing."""
    old = _open_existing(request)
    if old is None:
        _check_room(request, held_bytes=0)
        return
    try:
        if _why_not(_read_superblock(old), request, boot_id):
            _check_room(request, held_bytes=os.fstat(old).st_blocks * 512)
    except ArenaFormatError:
        _check_room(request, held_bytes=os.fstat(old).st_blocks * 512)
    finally:
        os.close(old)


def _open_existing(request: ArenaRequest) -> int | None:
    try:
        return open_own(request.path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            request.config_file, "ram.path", f"cannot open {request.path}: {error.strerror}",
            advice="remove it or configure another directory",
        ) from error  # fmt: skip


def _choose(
    old: int | None, kept: int, request: ArenaRequest, alive: Callable[[ProcessIdentity], Liveness]
) -> int | None:
    """Return the arena of two candidates. The other is closed; if no path leads to it, its pages are freed."""
    found = os.fstat(kept)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink:
        os.close(kept)  # what has a name is found by it
        return old
    if old is None and found.st_dev == request.path.parent.stat().st_dev:
        return kept
    with contextlib.suppress(ArenaFormatError):
        _refuse_if_lent(kept, _read_superblock(kept), request, alive)
    _punch(kept)
    os.close(kept)
    return old


def _read_superblock(fd: int) -> Superblock:
    superblock = Superblock.unpack(os.pread(fd, PAGE_BYTES, 0))
    size_bytes = os.fstat(fd).st_size
    if size_bytes != superblock.layout.size_bytes:
        raise ArenaFormatError(f"the file has {size_bytes} bytes, its superblock says {superblock.layout.size_bytes}")
    return superblock


def _why_not(superblock: Superblock, request: ArenaRequest, boot_id: bytes) -> str:
    """Return why a valid arena cannot be adopted; empty if it can."""
    if superblock.boot != boot_id:
        return "it is from before the last boot"
    if superblock.layout.size_bytes != request.size_bytes:
        return f"its size changes from {superblock.layout.size_bytes} to {request.size_bytes} bytes"
    return ""


def _refuse_if_lent(
    fd: int, superblock: Superblock, request: ArenaRequest, alive: Callable[[ProcessIdentity], Liveness]
) -> None:
    holders = lent_to(fd, superblock.layout, alive)
    if holders:
        pids = ", ".join(str(pid) if pid else "unknown" for pid in sorted(holders))
        raise ConfigError(
            request.config_file, "ram.capacity",
            f"the arena {request.path} has {superblock.layout.size_bytes} bytes, {request.size_bytes} are configured"
            f" (the capacity, less what the workers and objects of the tiers below take), and extents of it are lent to"
            f" living processes (pid {pids})",
            advice="keep [ram].capacity, and capacity, codec and io_workers of each [[tier]], until these engines"
            " have ended, or end them",
        )  # fmt: skip


def lent_to(fd: int, layout: ArenaLayout, alive: Callable[[ProcessIdentity], Liveness]) -> set[int]:
    """Return the pids (0: unknown), not proven dead, of sessions with loans in this arena."""
    tables = ArenaTables(memoryview(mmap.mmap(fd, layout.data_offset, access=mmap.ACCESS_READ)), layout)
    lent = tables.lent["mode"]
    borrowers = (lent == LentMode.READ) | (lent == LentMode.WRITE)
    sessions = {int(session) for session in tables.lent["session"][borrowers]}
    attachments = tables.attachments
    found = set()
    for slot in attachments["used"].nonzero()[0]:
        if int(attachments["session"][slot]) in sessions:
            process = ProcessIdentity(
                pid=int(attachments["pid"][slot]),
                start_ticks=int(attachments["start"][slot]),
                boot_id=attachments["boot"][slot].tobytes(),
            )
            if alive(process) is not Liveness.DEAD:
                found.add(process.pid)
    return found


def _create(
    request: ArenaRequest, boot_id: bytes, random_bytes: Callable[[int], bytes], origin: Origin, note: str
) -> ArenaFile:
    """Create an arena. The superblock is written last: a file without one is no arena, and is created again."""
    layout = ArenaLayout.plan(request.size_bytes)
    fd = os.open(request.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, layout.size_bytes)
        os.posix_fallocate(fd, 0, layout.data_offset)
    except OSError as error:
        os.close(fd)
        request.path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise ConfigError(
            request.config_file, "ram.capacity", f"no room in {request.path.parent} even for the arena's tables"
        ) from error
    superblock = Superblock(int.from_bytes(random_bytes(8), "little") | 1, layout, run=1, boot=boot_id)
    _write_superblock(fd, superblock)
    return ArenaFile(request.path, fd, superblock, origin, note)


def _write_superblock(fd: int, superblock: Superblock) -> None:
    """Write the superblock with one system call within one page, so that a SIGKILL leaves the old or the new one."""
    page = superblock.pack()
    try:
        os.pwrite(fd, page, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with mmap.mmap(fd, PAGE_BYTES) as mapped:  # hugetlbfs has no write(2)
            mapped[: len(page)] = page


def _discard(fd: int, path: Path) -> None:
    _punch(fd)
    path.unlink(missing_ok=True)
    os.close(fd)


def _punch(fd: int) -> None:
    """Free all pages. Truncation was rejected: an engine that still maps the file would get SIGBUS instead of zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    size_bytes = os.fstat(fd).st_size
    if size_bytes:
        libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(size_bytes))


def _check_room(request: ArenaRequest, held_bytes: int) -> None:
    """Raise ConfigError, with numbers, if file system, cgroup or host have no room for the arena.

    `held_bytes` are those of the old file, which goes.
    """
    for room in (directory_room(request.path.parent), memory_room()):
        available = room.available_bytes + held_bytes
        if request.size_bytes > available:
            raise ConfigError(
                request.config_file, "ram.capacity",
                f"a capacity of {request.capacity_bytes // MIB} MiB needs an arena of {request.size_bytes // MIB} MiB,"
                f" and the {room.limit} is {available // MIB} MiB",
                advice="lower [ram].capacity or give it more room",
            )  # fmt: skip


def describe(arena: ArenaFile) -> str:
    """Return one line for the log."""
    nameless = "" if os.fstat(arena.fd).st_nlink else "its name was removed"
    why = f" ({arena.note or nameless})" if arena.note or nameless else ""
    size = f"{arena.layout.size_bytes // MIB} MiB, format {FORMAT_VERSION}, run {arena.superblock.run}"
    return f"{arena.path} {arena.origin.value}{why}, {size}"
