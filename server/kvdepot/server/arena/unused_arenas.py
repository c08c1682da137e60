"""Arenas of this user: which daemons use them, and the removal of those that no daemon uses (docs/adr/0069).

An arena stays when its daemon ends, so that the next one adopts it. A daemon with another socket has another arena, and
so every place in which somebody has tried kvdepot leaves one in memory. Looking changes nothing, and takes no lock.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.core.arena import ArenaFormatError, ArenaTables
from kvdepot.core.errors import ArenaInUse, NotFound
from kvdepot.server.arena.arena_request import arena_paths
from kvdepot.server.arena.found_tables import Alive, living, read_superblock
from kvdepot.server.arena.holding import Connection
from kvdepot.server.config import arena_directory
from kvdepot.server.platform.file_lock import LOCK_SUFFIX, FileLock, lock_holder
from kvdepot.server.platform.own_files import open_own

_NAME: Final = re.compile(r"kvdepot-[0-9]+-[0-9a-f]{12}\.arena")
_BLOCK_BYTES: Final = 512
_NAMES: Final = "`kvdepotd arena list` prints the names"


@dataclass(frozen=True, slots=True)
class FoundArena:
    """One arena. `memory_bytes` is what it takes now, in files and in memory that its holder keeps."""

    path: str
    memory_bytes: int
    daemon_pid: int | None  # of the daemon that runs on it; 0: not known, None: none does
    engine_pids: tuple[int, ...]  # of attached processes that are not proven dead; 0: not known
    holder_pid: int | None
    started_seconds_ago: float  # its latest daemon

    @property
    def unused(self) -> bool:
        """Whether it can be removed."""
        return self.daemon_pid is None and not self.engine_pids


def find_arenas(folders: Iterable[Path], alive: Alive) -> Iterator[FoundArena]:
    """Yield the arenas in these folders and in the default places, each once."""
    seen = set()
    own: list[Path] = []
    with contextlib.suppress(OSError):  # this host has no such place
        own = [*arena_directory.own_directories(), arena_directory.BASE]
    for folder in (*own, *folders):
        with contextlib.suppress(OSError):  # it is gone, or of another user
            for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names
                path = folder.absolute() / name
                if _NAME.fullmatch(name) and path.resolve() not in seen:
                    seen.add(path.resolve())
                    with contextlib.suppress(OSError):
                        yield look_at(path, alive)


def look_at(path: Path, alive: Alive) -> FoundArena:
    """Return what is known of an arena. Raise OSError if it is gone, or of another user."""
    tables = open_own(path, os.O_RDONLY)
    try:
        files = [os.fstat(tables)]
        for other in arena_paths(path)[1:]:
            with contextlib.suppress(FileNotFoundError):
                files.append(other.stat(follow_symlinks=False))
        engines = _attached(tables, alive)
    finally:
        os.close(tables)
    holder, held_bytes = _held(path)
    lock = path.with_name(f"{path.name}{LOCK_SUFFIX}")
    begun = lock.stat().st_mtime if lock.exists() else files[0].st_mtime
    return FoundArena(
        str(path), sum(one.st_blocks * _BLOCK_BYTES for one in files) + held_bytes, lock_holder(lock),
        tuple(sorted(engines)), holder, max(time.time() - begun, 0.0),
    )  # fmt: skip


def remove_arena(path: Path, alive: Alive) -> FoundArena:
    """Delete an arena's files, so that its holder lets its memory go within seconds. Return what it was.

    Raise NotFound if there is no arena of this user, ArenaInUse if a daemon or an engine uses it, and OSError. The
    lock's file stays: with another one of its name, two daemons could have one arena.
    """
    if not _NAME.fullmatch(path.name):
        raise NotFound(f"{path} is not the name of an arena", advice=_NAMES)
    try:
        found = look_at(path, alive)
    except OSError as error:
        raise NotFound(f"no arena of this user at {path}: {error.strerror}", advice=_NAMES) from error
    if found.daemon_pid is None:  # before the lock too, whose file says when the latest daemon began
        _refuse_engines(found)
    with FileLock(path.with_name(f"{path.name}{LOCK_SUFFIX}"), f"the arena {path}"):
        found = look_at(path, alive)
        _refuse_engines(found)
        for one in reversed(arena_paths(path)):  # the tables last: by their name all of it is found again
            one.unlink(missing_ok=True)
    return found


def _refuse_engines(found: FoundArena) -> None:
    if found.engine_pids:
        pids = ", ".join(str(pid) if pid else "unknown" for pid in found.engine_pids)
        raise ArenaInUse(f"engines are attached to the arena {found.path} (pid {pids})", advice="end them first")


def _attached(tables: int, alive: Alive) -> set[int]:
    """Return the pids of processes that may still map the arena. None are known of what is no arena."""
    with contextlib.suppress(ArenaFormatError):
        layout = read_superblock(tables).layout
        mapped = memoryview(mmap.mmap(tables, layout.tables_bytes, access=mmap.ACCESS_READ))
        return living(ArenaTables(mapped, layout), alive)
    return set()


def _held(path: Path) -> tuple[int | None, int]:
    """Return the pid of the arena's holder, and the bytes that it keeps."""
    try:
        connection = Connection(path)
    except OSError:
        return None, 0
    connection.close()
    held_bytes = sum(os.fstat(fd).st_blocks * _BLOCK_BYTES for fd in connection.held)
    for fd in connection.held:
        os.close(fd)
    return connection.pid, held_bytes
