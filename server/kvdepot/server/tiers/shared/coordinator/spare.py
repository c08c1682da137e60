"""Room that a shared directory keeps for the files by which nodes know of each other (ADR 0097).

A quota of the file system may be below the capacity, and statvfs(2) does not show it. When it is used up, a node could
not write its file, and a janitor not its lease: nothing would be deleted, and nothing could ever be written again. So
the janitor keeps some small files, in blocks and inodes, that any node removes where its own file has no room.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.platform.durable_files import naming
from kvdepot.server.platform.file_room import NO_ROOM
from kvdepot.server.storage.shared_layout import NODES, SPARE, spare_file
from kvdepot.server.tiers.shared.coordinator.files import opened_within, replace_small
from kvdepot.server.tiers.shared.coordinator.purge import remove

_PIECES: Final = 32
_SHARE: Final = 256
"""Of the capacity: all pieces together take no more, but for the first one."""


class SpareRoom:
    """The spare room of one directory, as one node keeps and uses it: a page and an inode a piece."""

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        self._root = root
        self._pieces = max(min(capacity_bytes // _SHARE // PAGE_BYTES, _PIECES), 1)

    def replace(self, file: str, data: bytes, temporary: str) -> None:
        """Write a file as `replace_small` does, in the spare room if there is no other. Raise OSError."""
        try:
            replace_small(self._root, file, data, temporary)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._give():
                raise
            replace_small(self._root, file, data, temporary)

    def fill(self) -> Iterator[int]:
        """Make what is missing, a piece a step, until there is no room. Yield the bytes taken. Raise OSError."""
        there = set(self._there())
        for piece in map(spare_file, range(self._pieces)):
            if piece in there:
                continue
            try:
                with opened_within(self._root, piece, os.O_WRONLY | os.O_CREAT) as fd, naming("write", piece):
                    os.write(fd, os.urandom(PAGE_BYTES))  # zeros take no room where the file system compresses
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                remove(self._root, piece)
                return
            yield PAGE_BYTES

    def _give(self) -> bool:
        """Remove all pieces, of every node. Return whether there was one. Raise OSError."""
        return sum(remove(self._root, piece) for piece in self._there()) > 0

    def _there(self) -> list[str]:
        with naming("readdir", self._root / NODES):
            names = os.listdir(self._root / NODES)  # noqa: PTH208
        return [f"{NODES}/{name}" for name in names if name.endswith(SPARE)]
