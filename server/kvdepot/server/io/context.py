"""What one thread of an I/O worker works with: its directory, its place in the arena, its scratch memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.io.bucket import Bucket
from kvdepot.server.io.direct_io import DirectFiles

if TYPE_CHECKING:
    from kvdepot.server.io.peer_wire import Lender, PeerSettings, Question, Reply

SCRATCH_BYTES_MAX: Final = 64 << 20
"""Of one buffer; it holds the longest coded object of any arena (`coded_limit`)."""
SCRATCH_KEPT_BYTES: Final = 8 << 20
"""Larger scratch memory is freed after the job."""


def padded(length: int) -> int:
    """Return the length, rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def coded_limit(arena_bytes: int) -> int:
    """Return the length of the longest object that is stored with a codec, for an arena of this size.

    Longer objects are stored as they are. Coded bytes are checked as a whole before they are decoded. This takes
    scratch memory, which should be small compared to RAM.
    """
    return min(max(arena_bytes // 256, SCRATCH_KEPT_BYTES), SCRATCH_BYTES_MAX)


class PeerLink(Protocol):
    """A connection to a peer (`peer_client.Peer`)."""

    @property
    def lane(self) -> str: ...

    def use(self, settings: PeerSettings) -> None: ...

    def lends(self) -> bool: ...

    def ask(self, question: Question) -> Reply: ...

    def give_back(self) -> bool: ...

    def receive(self, buffer: memoryview) -> None: ...

    def close(self) -> None: ...


class NixlLink(Protocol):
    """What reads over NIXL (`nixl_agent.ReadingAgent`)."""

    @property
    def why_not(self) -> str: ...

    def read(self, lender: Lender, here: Sequence[Extent], there: Sequence[Extent]) -> None: ...


class Context:
    """What one thread of a worker works with: its directory, the arena it maps, its open files, its scratch memory."""

    def __init__(
        self,
        directory: str,
        arena: memoryview | None = None,
        present: Callable[[int, int], None] = lambda offset, length: None,  # noqa: ARG005
        bucket: Bucket | None = None,
        peer: PeerLink | None = None,
        nixl: NixlLink | None = None,
    ) -> None:
        """Prepare, without open files. `arena`: all of it, writable; None if no job has extents.

        `bucket`: what the files of jobs are objects of, instead of the directory. `peer`: as `bucket`. `nixl`: of
        a peer's objects, where it can be used.

        Extents are offsets in the arena. `present` is called with each extent before it is read or written: see
        `arena_pages`.
        """
        self.files = DirectFiles(directory)
        self.bucket = bucket
        self.peer = peer
        self.nixl = nixl
        self.header = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.tail = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self.coded_bytes_max = coded_limit(len(arena or b""))
        self._arena = arena
        self._present = present
        self._scratch: list[memoryview] = []

    def views(self, extents: Sequence[Extent], raw_bytes: int) -> list[memoryview]:
        """Return a view of each extent, rounded up to pages: the tail of an extent's last page belongs to the extent.

        Raise ValueError if there is no arena, or if the extents do not fit it or `raw_bytes`.
        """
        arena = self._arena
        if arena is None or sum(length for _, length in extents) != raw_bytes:
            raise ValueError(f"extents {extents[:4]} of together {raw_bytes} bytes, in {'an' if arena else 'no'} arena")
        views = []
        for index, (offset, length) in enumerate(extents):
            end = offset + padded(length)
            if offset % PAGE_BYTES or end > len(arena) or (length % PAGE_BYTES and index < len(extents) - 1):
                raise ValueError(f"extent {index} of {len(extents)} is {length} bytes at {offset}")
            self._present(offset, end - offset)
            views.append(arena[offset:end])
        return views

    def scratch(self, number: int, length: int) -> memoryview:
        """Return page-aligned private memory with any content. Raise ValueError for more than SCRATCH_BYTES_MAX."""
        if length > SCRATCH_BYTES_MAX:
            raise ValueError(f"{length} bytes of scratch memory; the limit is {SCRATCH_BYTES_MAX}")
        while len(self._scratch) <= number:
            self._scratch.append(memoryview(b""))
        if len(self._scratch[number]) < length:
            self._scratch[number] = memoryview(mmap.mmap(-1, padded(length)))
        return self._scratch[number][:length]

    def trim(self) -> None:
        """Give large scratch memory back."""
        self._scratch = [kept if len(kept) <= SCRATCH_KEPT_BYTES else memoryview(b"") for kept in self._scratch]

    def close(self) -> None:
        """Close the files, and the connection; whatever comes next opens them again."""
        self.files.close()
        if self.peer is not None:
            self.peer.close()
