"""The data of an arena, from outside: it has a name only where it is not sealed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvdepot.server.arena.holding import Connection

from tests.rigs.patience import patient


def data_of(arena: Path) -> Path:
    """Return a path by which the data can be opened and looked at, whether a daemon runs or not.

    Raises OSError while nobody holds any: a daemon that starts has its arena held after it has made it.
    """
    named = arena.with_name(f"{arena.name}.data")
    if named.exists():
        return named
    holder = Connection(arena, patient(20))
    holder.close()
    if not holder.held:
        raise FileNotFoundError(f"the holder {holder.pid} has no data")
    *_, data = holder.held
    inode = os.fstat(data).st_ino
    for held in holder.held:
        os.close(held)
    for path in Path(f"/proc/{holder.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of another connection, which it closes
            if path.stat().st_ino == inode:
                return path
    raise FileNotFoundError(f"the holder {holder.pid} does not have the data of {arena} any more")
