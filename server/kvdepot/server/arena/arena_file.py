"""The files of the arena: created, or adopted from an earlier daemon (design.md#arena).

The tables lie at the configured path. Generations and data are memfds that nobody can cut short, or, where `sealed` is
off, files next to the tables. An engine gets a descriptor of the generations that can only read, and one of the data
that can write; no engine gets the tables (docs/adr/0070). All files are adopted, or none.

An orderly stop and a SIGKILL both leave the files, with their memory. The next daemon adopts them by their names, or by
descriptors that a supervisor or a holder kept (docs/adr/0025, docs/adr/0069). Delete the tables while no daemon runs to
free the memory; without a seal, the other two too. There is never a second arena while an earlier one has loans.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from kvdepot.core.arena import (
    FORMAT_VERSION,
    NO_FILE,
    ArenaFormatError,
    ArenaLayout,
    ArenaTables,
    FileId,
    GenerationsHeader,
    Superblock,
)
from kvdepot.core.arena_purpose import NO_PURPOSE
from kvdepot.core.data_mapping import DataParts, map_parts
from kvdepot.core.errors import ConfigError
from kvdepot.core.ram_size import kept_parts
from kvdepot.server.arena.arena_request import ArenaRequest, Outlook, kept_note
from kvdepot.server.arena.found_tables import Alive, lent_to, read_superblock
from kvdepot.server.arena.memory_files import (
    close_all,
    file_of,
    free_pages,
    free_range,
    is_open_elsewhere,
    is_sealed,
    new_file,
    new_memory,
    write_page,
)
from kvdepot.server.config.memory_room import MIB, directory_room, in_memory_alone, memory_room
from kvdepot.server.platform.file_room import NO_ROOM
from kvdepot.server.platform.own_files import open_own


class Origin(Enum):
    """How this run got its arena."""

    CREATED = "created"
    ADOPTED = "adopted"
    RECREATED = "recreated"


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Descriptors that a supervisor or a holder kept for this daemon.

    `others` are of generations and data. Which is which say the tables, by the inode.
    """

    tables: Sequence[int] = ()
    others: Sequence[int] = ()

    def __add__(self, other: KeptFiles) -> KeptFiles:
        return KeptFiles((*self.tables, *other.tables), (*self.others, *other.others))


NOTHING_KEPT = KeptFiles()


class ArenaFile:
    """A mapped arena with its superblock. The descriptors are the daemon's own; engines get fresh opens."""

    def __init__(
        self, path: Path, files: tuple[int, ...], superblock: Superblock, origin: Origin, note: str,
        rooms: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Map `files`: tables, generations, and each part of the data. `rooms`: what of each is used; empty: all."""
        self.path = path
        self.files = files
        self.tables_fd, self.generations_fd, *data_fds = files
        self.superblock = superblock
        self.layout = superblock.layout
        self.origin = origin
        self.note = note
        self._tables_maps = [
            mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            for fd, size_bytes in zip(files, (self.layout.tables_bytes, self.layout.generations_bytes), strict=False)
        ]
        self.parts: DataParts = tuple(zip(data_fds, self.layout.parts, strict=True))
        self.tables = ArenaTables(memoryview(self._tables_maps[0]), self.layout, memoryview(self._tables_maps[1]))
        self.tables.room_bytes = rooms or self.layout.parts
        self.data = map_parts(self.parts)
        """All parts in a row."""

    @property
    def rooms(self) -> tuple[int, ...]:
        """Return how many bytes of each part are used, from its start."""
        return self.tables.room_bytes

    def free_unused(self) -> int:
        """Free the memory beyond the rooms. Nothing there may be lent. Return the bytes that are not used.

        An engine's driver keeps pages pinned that are freed here, and copies to and from them ever after. So the
        superblock says first what must not be used again while such an engine may run.
        """
        before = self.superblock.freed_from or self.layout.parts
        kept = tuple(map(min, zip(before, self.rooms, strict=True)))
        self.superblock = replace(self.superblock, freed_from=kept if kept != self.layout.parts else ())
        write_page(self.tables_fd, self.superblock.pack())
        ranges = [(fd, room, size_bytes) for (fd, size_bytes), room in zip(self.parts, self.rooms, strict=True)]
        for fd, room, size_bytes in ranges:
            if room < size_bytes:
                free_range(fd, room, size_bytes - room)
        return sum(size_bytes - room for _, room, size_bytes in ranges)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return the address at which this process maps each part."""
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        return tuple(first + start for start in self.layout.part_starts)

    @property
    def tables_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return (address, length) of tables and generations, as this process maps them."""
        return tuple((ctypes.addressof(ctypes.c_char.from_buffer(one)), len(one)) for one in self._tables_maps)

    def populated_bytes(self, part: int) -> int:
        """Return how far from its start a part has all its pages: up to its first hole, or the end of its room."""
        try:
            return min(os.lseek(self.parts[part][0], 0, os.SEEK_HOLE), self.rooms[part])
        except OSError:  # cannot be said: everything is populated again, which changes no byte
            return 0

    def open_for_engine(self, part: int) -> tuple[int, int]:
        """Return descriptors of a part of the data, and of the generations for reading only, for another process.

        They share no offset, flag or lock with the daemon. The inode of the generations is the daemon's with mode 0600,
        so another uid cannot open them for writing by /proc. Raises OSError.
        """
        data = os.open(f"/proc/self/fd/{self.parts[part][0]}", os.O_RDWR)
        try:
            return data, os.open(f"/proc/self/fd/{self.generations_fd}", os.O_RDONLY)
        except OSError:
            os.close(data)
            raise

    def close(self) -> None:
        """Close the files. The mappings end with the process, because numpy views still point into them."""
        close_all(self.files)


@dataclass(slots=True)
class _Old:
    """What an earlier daemon left. `reason` says why it cannot be adopted; empty if it can.

    `superblock` is known where the tables can be read, of a former format too.
    """

    tables: int | None = None
    generations: int | None = None  # those that belong to the tables ...
    data: list[int] = field(default_factory=list)  # ... and all parts of the data, none if one is missing
    others: list[int] = field(default_factory=list)  # files that belong to no tables here, or may not be freed
    superblock: Superblock | None = None
    reason: str = ""

    @property
    def known(self) -> list[int]:
        """Return what is freed if it is not adopted, in this order: before the data what makes readers fail."""
        return [fd for fd in (self.tables, self.generations, *self.data) if fd is not None]

    @property
    def whole(self) -> bool:
        """Whether all files are there. In format 1, the data is behind the tables."""
        return bool(self.data) or (self.superblock is not None and self.superblock.data_files == (NO_FILE,))

    def close(self) -> None:
        close_all((*self.known, *self.others))


def open_arena(
    request: ArenaRequest,
    *,
    kept: KeptFiles = NOTHING_KEPT,
    boot_id: bytes,
    random_bytes: Callable[[int], bytes],
    alive: Alive,
) -> ArenaFile:
    """Adopt the arena at `request.path`, or create it. The caller holds its lock.

    `kept` is taken over. Of each file, one that has lost its name counts if there is none at the path.

    What cannot be adopted gives its pages back first, the generations before their data: engines that still map both
    see generations that match no grant, and then zeros. Data whose generations are not here is left as it is, because
    an engine may be in a copy by generations that still hold. Its pages go with the last mapping.

    Raises ConfigError when the size does not fit, or changes while extents are lent to living processes.
    """
    tables = _open_existing(request, request.path)
    forgotten: list[Superblock] = []
    for fd in _distinct(kept.tables):
        tables = _choose(tables, fd, request, alive, forgotten)
    old = _judge(tables, _candidates(request, kept), request, boot_id)
    for superblock in forgotten:
        _free_data_of(superblock, old.others)
    if old.superblock is not None and old.tables is not None and not old.reason:
        assert old.generations is not None
        close_all(old.others)
        layout, freed_from = old.superblock.layout, old.superblock.freed_from
        grows = kept_parts(layout, request.layout, freed_from) != kept_parts(layout, request.layout)
        if grows and not any(map(is_open_elsewhere, old.data)):
            freed_from = ()
        adopted = replace(
            old.superblock, run=old.superblock.run + 1, purpose=request.purpose, freed_from=freed_from
        )  # fmt: skip
        write_page(old.tables, adopted.pack())
        files = (old.tables, old.generations, *old.data)
        note = kept_note(adopted.layout, request.layout, freed_from)
        rooms = kept_parts(adopted.layout, request.layout, freed_from)
        return ArenaFile(request.path, files, adopted, Origin.ADOPTED, note, rooms)
    if old.superblock is not None and old.tables is not None and old.whole and old.superblock.boot == boot_id:
        _refuse_if_lent(old.tables, old.superblock.layout, request, alive, old.reason)
    _check_room(request, held_bytes=_held_bytes(old))
    free_pages(old.known)
    origin = Origin.RECREATED if old.known or old.others else Origin.CREATED
    old.close()
    for path in request.paths:
        path.unlink(missing_ok=True)
    return _create(request, boot_id, random_bytes, origin, old.reason)


def check_arena(request: ArenaRequest, boot_id: bytes, kept: KeptFiles = NOTHING_KEPT) -> Outlook:
    """Return what `open_arena` would do with an arena of another size or other tenants.

    Raise ConfigError where `open_arena` would, except for loans. Changes nothing. `kept` is taken over.
    """
    close_all(kept.tables)
    old = _judge(_open_existing(request, request.path), _candidates(request, kept), request, boot_id)
    try:
        if old.reason or not old.known:
            _check_room(request, held_bytes=_held_bytes(old))
        found = old.superblock
        if found is None or not (_is_resized(found, request) or found.freed_from):
            return Outlook()
        if not old.reason:
            return Outlook("", kept_note(found.layout, request.layout, found.freed_from))
        return Outlook(old.reason if _is_resized(found, request) else "")
    finally:
        old.close()


def _candidates(request: ArenaRequest, kept: KeptFiles) -> list[int]:
    """Return what may be generations or data of the arena: what has a name, then what was kept. Take over `kept`."""
    named = [_open_existing(request, path) for path in request.paths[1:]]
    return [*(fd for fd in named if fd is not None), *_distinct(kept.others)]


def _open_existing(request: ArenaRequest, path: Path) -> int | None:
    try:
        return open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            request.config_file, "ram.path", f"cannot open {path}: {error.strerror}",
            advice="remove it or configure another directory",
        ) from error  # fmt: skip


def _distinct(kept: Sequence[int]) -> list[int]:
    """Return one descriptor of each file of the daemon's that has no name, and close the others.

    What has a name is found by it. A file that two have kept must not count twice: the second would be freed.
    """
    files: dict[FileId, int] = {}
    for fd in kept:
        found = os.fstat(fd)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_nlink
        if not own or files.setdefault(file_of(fd), fd) != fd:
            os.close(fd)
    return list(files.values())


def _choose(
    tables: int | None, kept: int, request: ArenaRequest, alive: Alive, forgotten: list[Superblock]
) -> int | None:
    """Return the tables of two candidates. If no path leads to the other, its pages are freed.

    Its superblock, whose generations and data may then be freed too, is added to `forgotten`.
    """
    if tables is None and os.fstat(kept).st_dev == request.path.parent.stat().st_dev:
        return kept
    with contextlib.suppress(ArenaFormatError):
        superblock = read_superblock(kept)
        _refuse_if_lent(kept, superblock.layout, request, alive, "another one has its name")
        forgotten.append(superblock)
    free_pages([kept])
    os.close(kept)
    return tables


def _free_data_of(superblock: Superblock, files: Sequence[int]) -> None:
    """Free generations and data of tables that are gone; the data only after its generations."""
    found = {file_of(fd): fd for fd in files}
    generations = found.get(superblock.generations_file)
    if generations is not None or superblock.layout.former:  # those of a former format were in the tables
        data = [found.get(one) for one in superblock.data_files]
        free_pages(fd for fd in (generations, *data) if fd is not None)


def _judge(tables: int | None, files: list[int], request: ArenaRequest, boot_id: bytes) -> _Old:
    """Return what of these files can be adopted. Only files that the tables name belong to them."""
    old = _Old(tables, others=files)
    if tables is None:
        old.reason = "its tables are missing" if files else ""
        return old
    try:
        old.superblock = superblock = read_superblock(tables)
    except ArenaFormatError as error:
        old.reason = str(error)
        return old
    found = {file_of(fd): fd for fd in reversed(files)}
    old.generations = found.get(superblock.generations_file)
    if old.generations is not None or superblock.layout.former:
        data = [found[one] for one in superblock.data_files if one in found]
        old.data = data if len(data) == len(superblock.data_files) else []
    old.others = [fd for fd in files if fd not in (old.generations, *old.data)]
    old.reason = _why_not(superblock, old, request, boot_id)
    return old


def _is_resized(superblock: Superblock, request: ArenaRequest) -> bool:
    """Return whether the arena has another size, or other parts, than is asked for."""
    asked = (request.size_bytes, tuple(request.parts.values()), request.tenants)
    return (superblock.layout.size_bytes, superblock.layout.divided, superblock.tenants) != asked


def _why_not(superblock: Superblock, old: _Old, request: ArenaRequest, boot_id: bytes) -> str:
    """Return why a valid arena cannot be adopted; empty if it can."""
    layout = superblock.layout
    if layout.former:
        return f"it is of a former format, this is {FORMAT_VERSION}"
    if superblock.boot != boot_id:
        return "it is from before the last boot"
    is_kept = superblock.purpose == request.purpose != NO_PURPOSE and kept_parts(layout, request.layout)
    if layout.size_bytes != request.size_bytes and not is_kept:
        return f"its size changes from {layout.size_bytes} to {request.size_bytes} bytes"
    if _is_resized(superblock, request) and not is_kept:
        return "its tenants, or the sizes of their parts, change"
    if old.generations is None or not old.data:
        data_is_here = set(superblock.data_files) <= set(map(file_of, (*old.known, *old.others)))
        name = "generations are missing, or belong" if data_is_here else "data is missing, or belongs"
        return f"its {name} to another arena"
    for fd, expected_bytes in ((old.generations, layout.generations_bytes), *zip(old.data, layout.parts, strict=True)):
        if is_sealed(fd) != request.sealed:
            return "[ram] sealed has another value than when it was made"
        if (size_bytes := os.fstat(fd).st_size) != expected_bytes:
            return f"one of its files has {size_bytes} bytes instead of {expected_bytes}"
    return ""


def _refuse_if_lent(tables: int, layout: ArenaLayout, request: ArenaRequest, alive: Alive, reason: str) -> None:
    holders = lent_to(tables, layout, alive)
    if holders:
        pids = ", ".join(str(pid) if pid else "unknown" for pid in sorted(holders))
        raise ConfigError(
            request.config_file, "ram.capacity",
            f"the arena {request.path} cannot be adopted ({reason}), and extents of it are lent to living processes"
            f" (pid {pids}). It has {layout.size_bytes} bytes, {request.size_bytes} are configured",
            advice="keep [ram].capacity and the tenants until these engines have ended, or end them",
        )  # fmt: skip


def _create(
    request: ArenaRequest, boot_id: bytes, random_bytes: Callable[[int], bytes], origin: Origin, note: str
) -> ArenaFile:
    """Create an arena. The superblock is written last: files without one are no arena, and are created again."""
    layout = request.layout
    make = new_memory if request.sealed else new_file
    tables, generations, data = request.paths
    files = (
        new_file(tables, layout.tables_bytes),
        make(generations, layout.generations_bytes),
        *(make(data, size_bytes) for size_bytes in layout.parts),
    )
    try:
        for fd, size_bytes in ((files[0], layout.tables_bytes), (files[1], layout.generations_bytes)):
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        close_all(files)
        for path in request.paths:
            path.unlink(missing_ok=True)
        if error.errno not in NO_ROOM | {errno.ENOMEM}:
            raise
        raise ConfigError(
            request.config_file, "ram.capacity", f"no room in {request.path.parent} even for the arena's tables"
        ) from error
    arena_id = int.from_bytes(random_bytes(8), "little") | 1
    write_page(files[1], GenerationsHeader(arena_id, layout.rows).pack())
    superblock = Superblock(
        arena_id, layout, 1, boot_id, file_of(files[1]), tuple(map(file_of, files[2:])), request.tenants,
        request.purpose,
    )  # fmt: skip
    write_page(files[0], superblock.pack())
    return ArenaFile(request.path, files, superblock, origin, note)


def _held_bytes(old: _Old) -> int:
    return sum(os.fstat(fd).st_blocks * 512 for fd in old.known)


def _check_room(request: ArenaRequest, held_bytes: int) -> None:
    """Raise ConfigError, with numbers, if file system, cgroup or host have no room for the arena.

    `held_bytes` are those of the old files, which go. A memfd needs memory alone, unless a mount reserves its pages.
    """
    folder = request.path.parent
    alone = in_memory_alone(folder, sealed=request.sealed)
    for room in (memory_room(),) if alone else (directory_room(folder), memory_room()):
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
    files = arena.files[:1] if is_sealed(arena.generations_fd) else arena.files
    nameless = "" if all(os.fstat(fd).st_nlink for fd in files) else "its name was removed"
    why = f" ({arena.note or nameless})" if arena.note or nameless else ""
    size = f"{arena.layout.size_bytes // MIB} MiB, format {arena.superblock.version}, run {arena.superblock.run}"
    return f"{arena.path} {arena.origin.value}{why}, {size}"
