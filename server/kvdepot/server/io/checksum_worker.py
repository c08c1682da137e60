"""The checksum worker: a process that reads committed objects and answers their XXH3-128, or compares two.

Started by the daemon as `python -m kvdepot.server.io.checksum_worker ARENA_FD SOCKET_FD SIZE PARENT_PID`.
It reads nothing but what it is asked, writes nothing, and ends with its parent.
"""

from __future__ import annotations

import mmap
import socket
import sys

import xxhash
from kvdepot.server.io.checksum_wire import (
    ANSWER,
    DRIFTED,
    EXTENT,
    HALVES,
    JOB_BYTES_MAX,
    JOB_HEADER,
    MEASURED,
    SAME,
    SUM,
    unpack_comparison,
)
from kvdepot.server.io.lifeline import die_with, exit_code

_SLICE_BYTES = 4 << 20
"""XXH3 runs without the GIL, but a signal is only handled between slices."""


def main(arguments: list[str]) -> int:
    arena_fd, socket_fd, size_bytes, parent = (int(argument) for argument in arguments)
    die_with(parent)
    arena = memoryview(mmap.mmap(arena_fd, size_bytes, access=mmap.ACCESS_READ))
    jobs = socket.socket(fileno=socket_fd)
    while True:
        header = _read(jobs, JOB_HEADER.size)
        if not header:
            return 0
        length, row, generation, stored, runs = JOB_HEADER.unpack(header)
        if not JOB_HEADER.size <= length <= JOB_BYTES_MAX:
            return 2
        body = _read(jobs, length - JOB_HEADER.size)
        tag, answer = _compared(arena, body, stored, runs) if stored else (SUM, _summed(arena, body))
        jobs.sendall(ANSWER.pack(row, tag, generation, answer))


def _summed(arena: memoryview, body: bytes) -> bytes:
    total = checksum(arena, body)
    return HALVES.pack(total & (1 << 64) - 1, total >> 64)


def _compared(arena: memoryview, body: bytes, stored: int, runs: int) -> tuple[int, bytes]:
    from kvdepot.server.io.comparing import compare  # numpy, which most workers never need

    found = compare(arena, *unpack_comparison(body, stored, runs))
    return DRIFTED if found.drifted else SAME, MEASURED.pack(found.slices, found.beyond, found.worst)


def checksum(arena: memoryview, packed_extents: bytes) -> int:
    """XXH3-128 of an object's extents in order."""
    state = xxhash.xxh3_128()
    for offset, length in EXTENT.iter_unpack(packed_extents):
        for start in range(offset, offset + length, _SLICE_BYTES):
            state.update(arena[start : min(start + _SLICE_BYTES, offset + length)])
    return state.intdigest()


def _read(jobs: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes, or none at the end of the stream."""
    data = bytearray()
    while len(data) < length:
        part = jobs.recv(length - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(exit_code(main))
