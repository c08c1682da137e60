"""All parts of the data are one range of addresses, each at its place, in every process that maps them."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from ctypes import addressof, c_char, set_errno
from pathlib import Path

import pytest
from kvdepot.core.data_mapping import DataParts, map_parts, memory_file, pack_parts, unpack_parts

SIZES = (2 << 20, 4 << 20, 2 << 20)


@pytest.fixture
def parts() -> Iterator[DataParts]:
    made = [(os.memfd_create("part"), size_bytes) for size_bytes in SIZES]
    for fd, size_bytes in made:
        os.ftruncate(fd, size_bytes)
    yield made
    for fd, _ in made:
        os.close(fd)


@pytest.mark.requirement("S2")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_part_is_mapped_at_its_place(parts: DataParts, count: int) -> None:
    parts = parts[:count]
    view, start = map_parts(parts), 0
    assert len(view) == sum(SIZES[:count])
    for number, (fd, size_bytes) in enumerate(parts, 1):
        view[start] = view[start + size_bytes - 1] = number
        assert os.pread(fd, 1, 0) == os.pread(fd, 1, size_bytes - 1) == bytes([number])
        os.pwrite(fd, b"xy", size_bytes - 2)
        assert bytes(view[start + size_bytes - 2 : start + size_bytes]) == b"xy"
        start += size_bytes
    assert not addressof(c_char.from_buffer(view)) % (2 << 20) or count == 1, "it can have huge pages"


def test_a_mapping_to_read_cannot_write(parts: DataParts) -> None:
    os.pwrite(parts[1][0], b"two", 0)
    view = map_parts(parts, writable=False)
    assert view.readonly and bytes(view[SIZES[0] : SIZES[0] + 3]) == b"two"


def test_what_is_mapped_ends_with_its_last_view(parts: DataParts) -> None:
    view = map_parts(parts)
    piece = view[SIZES[0] : SIZES[0] + 1]
    del view
    piece[0] = 7
    assert os.pread(parts[1][0], 1, 0) == b"\7"


def test_a_file_that_is_too_short_or_no_file_is_not_mapped(parts: DataParts) -> None:
    os.ftruncate(parts[1][0], SIZES[1] - 4096)
    with pytest.raises(ValueError, match="greater than file size"):
        map_parts(parts)
    other, end = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        map_parts([*parts[:1], (other, 4096)])
    os.close(other)
    os.close(end)


def test_parts_pass_to_a_child_process_as_one_argument(parts: DataParts) -> None:
    assert unpack_parts(pack_parts(parts)) == list(parts)
    assert unpack_parts(pack_parts([])) == []


@pytest.mark.parametrize("demands", [True, False], ids=["6.3 with vm.memfd_noexec = 2", "before 6.3"])
def test_addresses_are_reserved_whatever_a_kernel_says_of_execution(demands: bool) -> None:
    """The one refuses all files without the flag, the other one those with it."""

    class Kernel:
        def memfd_create(self, name: bytes, flags: int) -> int:
            if bool(flags & 0x08) is not demands:  # MFD_NOEXEC_SEAL
                set_errno(errno.EINVAL)
                return -1
            return os.memfd_create(name.decode(), flags & ~0x08)

    os.close(memory_file(Kernel()))


def test_what_cannot_be_reserved_leaves_no_descriptor(parts: DataParts) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"File too large|Invalid argument|allocate memory"):
        map_parts([(fd, 1 << 61) for fd, _ in parts])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_addresses_are_no_private_memory(parts: DataParts) -> None:
    """A host with strict overcommit, or a limit of private memory, would refuse a range as long as the data."""
    former = resource.getrlimit(resource.RLIMIT_DATA)
    for fd, _ in parts:
        os.ftruncate(fd, 1 << 40)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 38, former[1]))
    try:
        view = map_parts([(fd, 1 << 40) for fd, _ in parts])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)
    view[2 << 40] = 3
    assert os.pread(parts[2][0], 1, 0) == b"\3"
