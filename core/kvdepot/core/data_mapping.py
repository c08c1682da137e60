"""How every process maps the arena's data. Without numpy: I/O workers are small."""

from __future__ import annotations

import contextlib
import mmap


def map_data(fd: int, size_bytes: int, *, writable: bool = True) -> mmap.mmap:
    """Return a shared mapping of the data. Raises OSError or ValueError, as mmap.mmap does.

    Core dumps leave it out: memory without a name would be in them (core(5)), and the arena is most of the memory. It
    may have huge pages, where the host gives them to those that ask (shmem_enabled=advise).
    """
    mapped = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # a kernel without this advice
            mapped.madvise(advice)
    return mapped
