"""The arena as an I/O worker maps it, and its pages made present before a request needs them.

Direct I/O into a page that this process has not touched yet faults it in by itself, one by one: 4 MiB then took
1.8 to 3.8 ms to read instead of 0.9 (measured 2026-11-21). All pages of 4 MiB at once are 0.4 ms, once per worker.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Final

from kvdepot.core.data_mapping import map_data

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

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the arena. Raise OSError if `fd` cannot be mapped."""
        self._fd = fd
        self._map = map_data(fd, size_bytes)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._present_bytes = 0  # from the start
        self._wait = threading.Event()
        self.view = memoryview(self._map)

    def present(self, offset: int, length: int) -> None:
        """Make pages of an extent present, where `populate` has not come so far."""
        if offset + length > self._present_bytes:
            _madvise(self._start + offset, length, _MADV_POPULATE_READ)

    def populate(self, path_works: threading.Event) -> None:
        """Make all pages present as the daemon populates them, in the background; returns when all are.

        Not before `path_works`: on a mount that hangs, worker after worker would do it in vain. The pages of 1.5 GiB so
        often, and to take them back, made acquires of RAM wait five times as long (docs/benchmarks.md).

        A page touched here first would be charged to this process; to the file system it is a hole.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        path_works.wait()
        size_bytes = len(self.view)
        while self._present_bytes < size_bytes:
            try:
                populated_bytes = os.lseek(self._fd, self._present_bytes, os.SEEK_HOLE)
            except OSError:  # a file system that cannot say where its holes are
                return
            length = min(populated_bytes - self._present_bytes, _PIECE_BYTES)
            if length < min(_PIECE_BYTES, size_bytes - self._present_bytes):
                self._wait.wait(_AGAIN_SECONDS)
                continue
            if not _madvise(self._start + self._present_bytes, length, _MADV_POPULATE_READ):
                self._present_bytes += length
            elif ctypes.get_errno() == errno.EINVAL:  # before 5.14
                return
            else:  # memory is short, and not for ever
                self._wait.wait(_AGAIN_SECONDS)
