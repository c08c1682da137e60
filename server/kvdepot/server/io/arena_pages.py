"""The arena as an I/O worker maps it, and its pages made present before a request needs them.

Direct I/O into a page that this process has not touched yet faults it in by itself, one by one: 4 MiB then took
1.8 to 3.8 ms to read instead of 0.9 (measured 2026-11-21). All pages of 4 MiB at once are 0.4 ms, once per worker.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from itertools import accumulate
from typing import Final

from kvdepot.core.data_mapping import DataParts, map_parts

_MADV_POPULATE_READ = 22
"""Linux 5.14. Maps the pages around as well, and writable: the mapping is shared, and no file system is told."""
_PIECE_BYTES: Final = 16 << 20
_NICENESS: Final = 19
_AGAIN_SECONDS: Final = 0.2
"""How soon to look whether the daemon has populated more."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL, unlike mmap.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaPages:
    """All of the arena, writable. Advice to the kernel only: where it is refused, pages wait for their first touch."""

    def __init__(self, parts: DataParts) -> None:
        """Map the arena. Raise OSError if it cannot be mapped."""
        self.view = map_parts(parts)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        starts = accumulate((size_bytes for _, size_bytes in parts), initial=0)
        self._parts = [_Part(fd, start, size_bytes) for (fd, size_bytes), start in zip(parts, starts, strict=False)]
        self._wait = threading.Event()

    def present(self, offset: int, length: int) -> None:
        """Make pages of an extent present, where `populate` has not come so far."""
        if not any(part.start <= offset and offset + length <= part.present_to for part in self._parts):
            _madvise(self._start + offset, length, _MADV_POPULATE_READ)

    def populate(self, path_works: threading.Event) -> None:
        """Make all pages present as the daemon populates them, in the background; returns when all are.

        Not before `path_works`: on a mount that hangs, worker after worker would do it in vain. The pages of 1.5 GiB so
        often, and to take them back, made acquires of RAM wait five times as long (docs/benchmarks.md).

        A page touched here first would be charged to this process; to the file system it is a hole.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        path_works.wait()
        left = list(self._parts)
        while left:
            moved = False
            for part in list(left):
                if (length := part.next_bytes()) is None:
                    return
                if length and _madvise(self._start + part.present_to, length, _MADV_POPULATE_READ):
                    if ctypes.get_errno() == errno.EINVAL:  # before 5.14
                        return
                    length = 0  # memory is short, and not for ever
                part.present_to += length
                moved |= length > 0
                if part.present_to == part.end:
                    left.remove(part)
            if left and not moved:
                self._wait.wait(_AGAIN_SECONDS)


class _Part:
    """One file of the data, and up to where its pages are present. Offsets count over all data."""

    def __init__(self, fd: int, start: int, size_bytes: int) -> None:
        self._fd = fd
        self.start = self.present_to = start
        self.end = start + size_bytes

    def next_bytes(self) -> int | None:
        """Return how many bytes to make present next: 0 if the daemon has not populated them yet, None if never."""
        try:
            populated_bytes = os.lseek(self._fd, self.present_to - self.start, os.SEEK_HOLE)
        except OSError:  # a file system that cannot say where its holes are
            return None
        length = min(self.start + populated_bytes - self.present_to, _PIECE_BYTES)
        return length if length >= min(_PIECE_BYTES, self.end - self.present_to) else 0
