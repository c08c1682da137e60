"""The tables of an arena, read by processes that do not run on it: its superblock, and who may still touch its data."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection

from kvdepot.core.arena import NO_FILE, PAGE_BYTES, ArenaFormatError, ArenaLayout, ArenaTables, LentMode, Superblock
from kvdepot.server.depot.types import Liveness, ProcessIdentity

Alive = Callable[[ProcessIdentity], Liveness]


def read_superblock(tables: int) -> Superblock:
    """Return the superblock of tables that are all there, of a former format too. Raise ArenaFormatError."""
    page = os.pread(tables, PAGE_BYTES, 0)
    superblock = Superblock.unpack_former(page) or Superblock.unpack(page)
    size_bytes, tables_bytes = os.fstat(tables).st_size, superblock.layout.tables_bytes
    if size_bytes < tables_bytes or (size_bytes > tables_bytes and superblock.data_files != (NO_FILE,)):
        raise ArenaFormatError(f"its tables have {size_bytes} bytes, their superblock says otherwise")
    return superblock


def lent_to(tables_fd: int, layout: ArenaLayout, alive: Alive) -> set[int]:
    """Return the pids (0: unknown), not proven dead, of sessions with loans in this arena."""
    tables = ArenaTables(memoryview(mmap.mmap(tables_fd, layout.tables_bytes, access=mmap.ACCESS_READ)), layout)
    lent = tables.lent["mode"]
    borrowers = (lent == LentMode.READ) | (lent == LentMode.WRITE)
    return living(tables, alive, {int(session) for session in tables.lent["session"][borrowers]})


def living(tables: ArenaTables, alive: Alive, sessions: Collection[int] | None = None) -> set[int]:
    """Return the pids (0: unknown), not proven dead, of processes that are attached, all or those of these sessions."""
    attachments = tables.attachments
    found = set()
    for slot in attachments["used"].nonzero()[0]:
        if sessions is None or int(attachments["session"][slot]) in sessions:
            process = ProcessIdentity(
                pid=int(attachments["pid"][slot]),
                start_ticks=int(attachments["start"][slot]),
                boot_id=attachments["boot"][slot].tobytes(),
            )
            if alive(process) is not Liveness.DEAD:
                found.add(process.pid)
    return found
