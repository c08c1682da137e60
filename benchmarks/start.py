"""How fast a daemon becomes useful: populating its arena, and the time to the first byte served.

The rate at which kvdepotd populates its arena, as a share of a bare MADV_POPULATE_WRITE of
a new file of the same size on the same file system, by as many threads, in alternating
rounds. The first byte: from the start of the process until an object has been stored,
acquired and copied back by a client that was waiting for the daemon.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from benchmarks.depot import Status, daemon, engine
from benchmarks.ram import Copies, Depot, spec
from benchmarks.report import Report, arguments, median

MADV_POPULATE_WRITE = 23
_SMALL_BYTES = 64 << 20
_ASK_SECONDS = 0.15


def bare(size_bytes: int, threads: int) -> float:
    """Seconds to populate a new tmpfs file of this size."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), size_bytes)
        mapped = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    step = size_bytes // threads // 4096 * 4096
    ranges = [(i * step, step if i < threads - 1 else size_bytes - i * step) for i in range(threads)]
    failed: list[int] = []

    def populate(offset: int, length: int) -> None:
        if libc.madvise(address + offset, length, MADV_POPULATE_WRITE):
            failed.append(ctypes.get_errno())

    workers = [threading.Thread(target=populate, args=one) for one in ranges]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    if failed:
        raise SystemExit(f"madvise: {os.strerror(failed[0])}")
    return seconds


def populating(ram: str) -> tuple[float, int]:
    """Bytes a second while a new daemon populates its arena, and the arena's size.

    Asked rarely, because each question takes a core from the populating threads, and
    between two answers of a daemon that is still at it, so that the end is not missed by a wait.
    """
    with daemon(ram) as started:
        status = Status(started.endpoint)
        size_bytes = 0
        seen: list[tuple[float, int]] = []
        while not seen or seen[-1][1] < size_bytes:
            time.sleep(_ASK_SECONDS)
            ready_bytes = status().tiers[0].ready_bytes
            seen.append((time.perf_counter(), ready_bytes))
            size_bytes = started.arena_bytes
        if len(seen) > 2:
            seen.pop()
        (began, first), (ended, last) = seen[0], seen[-1]
        return (last - first) / (ended - began), size_bytes


def first_byte(ram: str) -> float:
    """Seconds from the start of the daemon's process to the first byte served from its RAM."""
    with daemon(ram) as started, engine(started.endpoint, spec()) as (session, worker):
        assert worker.arena is not None
        depot = Depot(session, worker.arena, Copies(), random.Random(0), _SMALL_BYTES, _SMALL_BYTES)
        depot.put(1, 1)
        depot.get(1, 1)
        return time.monotonic() - started.started


def main() -> None:
    parser = arguments("How fast a daemon becomes useful.")
    parser.add_argument("--ram", default="4GiB", help="capacity of the daemon (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    ratios, rates, bare_rates, first = [], [], [], []
    for _ in range(options.rounds):
        rate, size_bytes = populating(options.ram)
        bare_rate = size_bytes / bare(size_bytes, threads)
        ratios.append(rate / bare_rate)
        rates.append(rate / 1e9)
        bare_rates.append(bare_rate / 1e9)
        first.append(first_byte(options.ram))
    report = Report("start: populating, and the first byte")
    report.note("threads", threads)
    report.figure("populate_ratio", median(ratios), "", at_least=0.8)
    report.figure("populate_gb_s", median(rates), "GB/s")
    report.figure("bare_populate_gb_s", median(bare_rates), "GB/s")
    report.figure("first_byte_seconds", median(first), "s")
    report.finish(options.json)


if __name__ == "__main__":
    main()
