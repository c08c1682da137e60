"""The arena as this process sees it: the data, read and written by the copiers, and the generations, only read."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from kvdepot.client.copy.base import Direction
from kvdepot.core.arena import PAGE_BYTES, ArenaFormatError, GenerationsHeader, generations
from kvdepot.core.calls import CHECKSUM_BYTES
from kvdepot.core.data_mapping import map_data
from kvdepot.core.objectfile import payload_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdepot.client.copy.base import BlockCopier, CopyBatch
    from kvdepot.client.extents import Extents

_MADV_POPULATE_WRITE = 23
POPULATE_AGAIN_SECONDS = 0.2
"""How soon to look whether the daemon has populated more."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL, unlike mmap.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArenaMap:
    """A mapping of one arena. `arena_id` says which: extents of one arena mean nothing in another.

    There is no forced unmap: `close` drops this object's references, and the pages go
    when the last view (a tensor, a copy in progress) is gone. A copy that still runs
    after the daemon has moved on to another arena therefore writes into memory nobody
    reads, and never faults.
    """

    def __init__(self, data: int, column: int, size_bytes: int) -> None:
        """Map the data, of `size_bytes`, and the generations. The caller closes the descriptors.

        Raises ArenaFormatError (not an arena, or another format) or OSError (cannot be mapped).
        """
        header = GenerationsHeader.unpack(os.pread(column, PAGE_BYTES, 0))
        self.size_bytes: int = size_bytes  # of the data
        for descriptor, least_bytes in ((column, header.file_bytes), (data, size_bytes)):
            if os.fstat(descriptor).st_size < least_bytes:
                raise ArenaFormatError(f"arena: {least_bytes} bytes, the file is shorter")
        self._file = _file_of(data)
        mapped = mmap.mmap(column, header.file_bytes, access=mmap.ACCESS_READ)
        self._map: mmap.mmap | None = map_data(data, self.size_bytes)
        self._buffer: memoryview | None = memoryview(self._map)
        self.arena_id: int = header.arena_id
        self._generations: memoryview | None = generations(memoryview(mapped), header.rows)
        self._populated_bytes = 0

    def is_of(self, data: int) -> bool:
        """Return whether this is a mapping of the file of this descriptor. Raise OSError."""
        return self._file == _file_of(data)

    @property
    def buffer(self) -> memoryview:
        """All bytes of the data, writable. Raises ValueError after `close`."""
        if self._buffer is None:
            raise ValueError("this arena mapping was closed")
        return self._buffer

    @property
    def pinnable(self) -> memoryview:
        return self._buffer[: self._populated_bytes] if self._buffer is not None else memoryview(b"")

    def populated(self, size_bytes: int) -> None:
        """Note that the first `size_bytes` have their pages. For `Population`."""
        self._populated_bytes = size_bytes

    def load(
        self,
        copier: BlockCopier,
        extents: Extents,  # noqa: ARG002 - all of them are mapped
        batch: CopyBatch,
        timeout_seconds: float = 0.0,  # noqa: ARG002
    ) -> bool:
        """Start copying; `copier.wait` and `check` say whether it was right. No copy here takes long."""
        copier.copy(self, batch, Direction.LOAD)
        return True

    def verify(self, copier: BlockCopier, batch: CopyBatch) -> bool:
        """See Arena."""
        return copier.verify(self, batch)

    def store(
        self,
        copier: BlockCopier,
        extents: Extents,  # noqa: ARG002
        batch: CopyBatch,
        meanwhile: Callable[[], None] | None = None,  # noqa: ARG002
    ) -> bool:
        """Likewise."""
        copier.copy(self, batch, Direction.STORE)
        return True

    @property
    def closed(self) -> bool:
        return self._buffer is None

    def generation(self, row: int) -> int:
        """Return the generation of an extent row, by one aligned load; 0 (never granted) if closed or out of range."""
        column = self._generations
        if column is None or not 0 <= row < len(column):
            return 0
        return column[row]

    def check(self, rows: Sequence[int], granted: Sequence[int]) -> bool:
        """Whether every row still has the generation it was granted with: ask before and after a copy."""
        column = self._generations
        if column is None:
            return False
        limit = len(column)
        return all(
            0 <= row < limit and column[row] == generation for row, generation in zip(rows, granted, strict=True)
        )

    def intact(self, extents: Extents, checksums: bytes) -> bool | None:
        """Compare each object of a grant with its checksum, as `Arena` has it. Only `check` after it makes it true."""
        buffer = self._buffer
        if buffer is None:
            return None
        known = True
        for index, (first, end) in extents.fragments.items():
            raw_sum = int.from_bytes(checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES], "little")
            if not raw_sum:  # the object has none yet
                known = False
                continue
            offsets, lengths = extents.offsets[first:end].tolist(), extents.lengths[first:end].tolist()
            parts = (buffer[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True))
            if payload_sum(parts) != raw_sum:
                return False
        return True if known else None

    def close(self) -> None:
        """Forget the mapping. Views handed out before stay valid."""
        self._generations = None
        self._buffer = None
        self._map = None


def _file_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class Population:
    """Makes an arena's pages present in this process, piece by piece: a first touch costs a fault a page.

    Only pages that the daemon has populated: one touched here first would be charged to the
    engine, and could be one too many for the file system. To tmpfs all others are holes.
    """

    def __init__(self, arena: ArenaMap, descriptor: int) -> None:
        """Take over `descriptor`, of the data."""
        self._arena = arena
        self._descriptor = descriptor
        self._at_bytes = 0

    def step(self, piece_bytes: int) -> float | None:
        """One piece. Seconds until the next step is worth it: 0, some, or None: there is none.

        Advice only: a kernel before 5.14, or a refusal, leaves the pages to their first touch.
        """
        size_bytes = self._arena.size_bytes
        if self._arena.closed or self._at_bytes >= size_bytes:
            return None
        try:
            populated = os.lseek(self._descriptor, self._at_bytes, os.SEEK_HOLE)
        except OSError:  # a file system that cannot say where its holes are
            return None
        length = min(populated - self._at_bytes, piece_bytes)
        if length < min(piece_bytes, size_bytes - self._at_bytes):
            return POPULATE_AGAIN_SECONDS
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._arena.buffer, self._at_bytes))
        _madvise(start, length, _MADV_POPULATE_WRITE)
        self._at_bytes += length
        self._arena.populated(self._at_bytes)
        return 0.0

    def close(self) -> None:
        os.close(self._descriptor)
