"""How every process maps the arena's data. Without numpy: I/O workers are small."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Sequence
from typing import Any, Final

DataParts = Sequence[tuple[int, int]]
"""Files that the data consists of, one following the other: (descriptor, bytes) of each."""
_ALIGN_BYTES: Final = 2 << 20
"""So each part can have huge pages. hugetlbfs demands it."""
_MAP_FIXED: Final = 0x10
_NAME: Final = b"kvdepot-addresses"
_MFD_CLOEXEC: Final = 0x01
_MFD_NOEXEC_SEAL: Final = 0x08
"""Linux 6.3; demanded where vm.memfd_noexec is 2."""


def map_data(fd: int, size_bytes: int, *, writable: bool = True) -> mmap.mmap:
    """Return a shared mapping of one file. Raises OSError or ValueError, as mmap.mmap does.

    Core dumps leave it out: memory without a name would be in them (core(5)), and the arena is most of the memory. It
    may have huge pages, where the host gives them to those that ask (shmem_enabled=advise).
    """
    mapped = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # a kernel without this advice
            mapped.madvise(advice)
    return mapped


def map_parts(parts: DataParts, *, writable: bool = True) -> memoryview:
    """Return one shared mapping of all parts in a row. Raises OSError or ValueError, as `map_data` does.

    An address range is reserved, and each part is mapped over its place in it. All parts but the last have whole pages.
    The range is reserved by a file without pages: private memory would count for RLIMIT_DATA and strict overcommit.
    """
    if len(parts) == 1:
        return memoryview(map_data(*parts[0], writable=writable))
    total = sum(size_bytes for _, size_bytes in parts)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    reserved = _reserved(total + _ALIGN_BYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    start = at = -base % _ALIGN_BYTES
    for fd, size_bytes in parts:
        mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ).close()  # which raises if the file is shorter
        _map_over(base + at, fd, size_bytes, protection if writable else mmap.PROT_READ)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):
                reserved.madvise(advice, at, size_bytes)
        at += size_bytes
    view = memoryview(reserved)[start:at]
    return view if writable else view.toreadonly()


def _reserved(size_bytes: int) -> mmap.mmap:
    """Return a mapping of a file that has this size and no pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = memory_file(libc)
    try:
        if fd < 0 or libc.ftruncate(fd, ctypes.c_long(size_bytes)):
            raise OSError(ctypes.get_errno(), "the addresses of the data cannot be reserved")
        return mmap.mmap(fd, size_bytes)
    finally:
        libc.close(fd)


def memory_file(libc: Any) -> int:
    """Return a memfd that no child inherits and nobody can execute, as far as the kernel knows that; -1 for none."""
    fd: int = libc.memfd_create(_NAME, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    if fd < 0 and ctypes.get_errno() == errno.EINVAL:
        fd = libc.memfd_create(_NAME, _MFD_CLOEXEC)
    return fd


def _map_over(address: int, fd: int, size_bytes: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    found = libc.mmap(address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if found != address:
        raise OSError(ctypes.get_errno(), "a part of the data cannot be mapped")


def pack_parts(parts: DataParts) -> str:
    """Return the parts as an argument of a child process."""
    return ",".join(f"{fd}:{size_bytes}" for fd, size_bytes in parts)


def unpack_parts(text: str) -> DataParts:
    """Return the parts of `pack_parts`."""
    pairs = [part.partition(":") for part in text.split(",") if part]
    return [(int(fd), int(size_bytes)) for fd, _, size_bytes in pairs]
