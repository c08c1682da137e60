"""The checksum worker: a process that reads committed objects and answers their XXH3-128.

Started by the daemon as `python -m kvdepot.server.io.checksum_worker ARENA_FD SOCKET_FD SIZE PARENT_PID`.
It reads nothing but what it is asked, writes nothing, and ends with its parent.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys

import xxhash
from kvdepot.server.io.checksum_wire import ANSWER, EXTENT, JOB_BYTES_MAX, JOB_HEADER
from kvdepot.server.io.lifeline import die_with, exit_code

_SLICE_BYTES = 4 << 20
"""XXH3 runs without the GIL, but a signal is only handled between slices."""


def main(arguments: list[str]) -> int:
    arena_fd, socket_fd, size_bytes, parent = (int(argument) for argument in arguments)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the daemon, which drains first
    arena = memoryview(mmap.mmap(arena_fd, size_bytes, access=mmap.ACCESS_READ))
    jobs = socket.socket(fileno=socket_fd)
    while True:
        header = _read(jobs, JOB_HEADER.size)
        if not header:
            return 0
        length, row, generation = JOB_HEADER.unpack(header)
        if not JOB_HEADER.size <= length <= JOB_BYTES_MAX:
            return 2
        body = _read(jobs, length - JOB_HEADER.size)
        total = checksum(arena, body)
        jobs.sendall(ANSWER.pack(row, generation, total & (1 << 64) - 1, total >> 64))


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
