"""The checksum worker: a process that reads committed objects and answers their XXH3-128, or compares two.

Started by the daemon as `python -m kvdepot.server.io.checksum_worker DATA SOCKET_FD PARENT_PID`, DATA of `pack_parts`.
It reads nothing but what it is asked, writes nothing, and ends with its parent.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

import xxhash
from kvdepot.core.allocator import Extent
from kvdepot.core.data_mapping import map_parts, unpack_parts
from kvdepot.server.io.checksum_wire import ANSWERS, JOBS, Compare, Compared, Sum, Summed
from kvdepot.server.io.lifeline import check_code, die_with, exit_code

if TYPE_CHECKING:
    from kvdepot.server.io.comparing import Comparison

_SLICE_BYTES = 4 << 20
"""XXH3 runs without the GIL, but a signal is only handled between slices."""
_ANSWERED_BYTES = 1 << 20
"""What is read before the answers about it are sent, 0.1 ms: each receipt costs the loop as much as an answer."""
_RECEIVE_BYTES = 1 << 16


def main(arguments: list[str]) -> int:
    data, socket_fd, parent = arguments[0], int(arguments[1]), int(arguments[2])
    die_with(parent)
    arena = map_parts(unpack_parts(data), writable=False)
    daemon = socket.socket(fileno=socket_fd)
    received = bytearray()
    while frames := daemon.recv(_RECEIVE_BYTES):
        received += frames
        answers, read_bytes = b"", 0
        for row, job in JOBS.take(received):
            answers += ANSWERS.pack(_answer(arena, job), row)
            read_bytes += sum(length for _, length in (job.extents if isinstance(job, Sum) else job.stored))
            if read_bytes >= _ANSWERED_BYTES:
                daemon.sendall(answers)
                answers, read_bytes = b"", 0
        daemon.sendall(answers)
    return 0


def _answer(arena: memoryview, job: Sum | Compare) -> Summed | Compared:
    if isinstance(job, Compare):
        return _compared(arena, job)
    total = checksum(arena, job.extents)
    return Summed(job.generation, total & (1 << 64) - 1, total >> 64)


@cache
def _comparison() -> Callable[..., Comparison]:
    from kvdepot.server.io.comparing import compare  # numpy, which most workers never need

    check_code()
    return compare


def _compared(arena: memoryview, job: Compare) -> Compared:
    result = _comparison()(arena, job.stored, job.recomputed, job.runs)
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
