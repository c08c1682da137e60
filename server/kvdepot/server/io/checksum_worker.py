"""The checksum worker: a process that reads committed objects and answers their XXH3-128, or compares two.

Started by the daemon as `python -m kvdepot.server.io.checksum_worker DATA SOCKET_FD PARENT_PID`, DATA of `pack_parts`.
It reads nothing but what it is asked, writes nothing, and ends with its parent.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable

import xxhash
from kvdepot.core.allocator import Extent
from kvdepot.core.data_mapping import map_parts, unpack_parts
from kvdepot.server.io.checksum_wire import ANSWERS, JOBS, Compare, Compared, Summed
from kvdepot.server.io.lifeline import die_with, exit_code

_SLICE_BYTES = 4 << 20
"""XXH3 runs without the GIL, but a signal is only handled between slices."""


def main(arguments: list[str]) -> int:
    data, socket_fd, parent = arguments[0], int(arguments[1]), int(arguments[2])
    die_with(parent)
    arena = map_parts(unpack_parts(data), writable=False)
    daemon = socket.socket(fileno=socket_fd)
    stream = daemon.makefile("rb")
    while (frame := JOBS.read(stream)) is not None:
        row, job = frame
        if isinstance(job, Compare):
            answer: Summed | Compared = _compared(arena, job)
        else:
            total = checksum(arena, job.extents)
            answer = Summed(job.generation, total & (1 << 64) - 1, total >> 64)
        daemon.sendall(ANSWERS.pack(answer, row))
    return 0


def _compared(arena: memoryview, job: Compare) -> Compared:
    from kvdepot.server.io.comparing import compare  # numpy, which most workers never need

    result = compare(arena, job.stored, job.recomputed, job.runs)
    return Compared(result.drifted, result.slices, result.beyond, result.worst)


def checksum(arena: memoryview, extents: Iterable[Extent]) -> int:
    """Return the XXH3-128 of an object's extents in order."""
    state = xxhash.xxh3_128()
    for offset, length in extents:
        for start in range(offset, offset + length, _SLICE_BYTES):
            state.update(arena[start : min(start + _SLICE_BYTES, offset + length)])
    return state.intdigest()


if __name__ == "__main__":
    sys.exit(exit_code(main))
