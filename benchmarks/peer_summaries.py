"""What summaries of peers cost: the source's loop, the process that sends, and a reader's scout with 100 places.

Source: the extent table has random objects, and the words go to a process that takes them in. `hold_ms` is the longest
slice, in CPU time, with its frame and what the socket takes of it. Scout: the real process asks 100 places in this one,
which all send a summary of the largest size. A lookup names 256 chunks. A move: what one place alone has, which is no
peer, is looked up until it is found; the second one follows at once. `lookup` is the time until the first lookup is
answered, and `hits` the part of the names that it finds. `nobody` is the time of a lookup of 16 names that nobody has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from kvdepot.core.arena import ArenaLayout, tables_in_memory
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.daemon.peer_summaries import PeerSummaries
from kvdepot.server.depot.loads.peer_leases import PeerChunks
from kvdepot.server.depot.tree.index import Index
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.rows import COMMITTED, SUMMED, Rows
from kvdepot.server.io.child_stream import ChildStream
from kvdepot.server.io.jobs import FILES_PER_STAT
from kvdepot.server.io.peer_summary import summary_of
from kvdepot.server.io.peer_wire import FROM_DAEMON, TO_READER, Gathered, PeerSettings, SummaryWords
from kvdepot.server.platform.guard import Guard
from kvdepot.server.platform.paced import Paced
from kvdepot.server.storage.shared_layout import object_path
from kvdepot.server.tiers.peer import scout as scouts
from kvdepot.server.tiers.peer.places import PlacesFile

from benchmarks.report import Report, arguments
from tests.fakes.lying_source import LyingSource
from tests.rigs.certificates import Authority
from tests.rigs.patience import until
from tests.rigs.peer_fleet import PEER
from tests.rigs.peer_live import PeerLive
from tests.rigs.peer_sources import NAMES, Sources, found

DRAIN: Final = "--drain"
HOLD_MS_MAX: Final = 5.0
PLACES: Final = 100
LOOKUPS: Final = 200


def drain(fd: int) -> None:
    """Take in what comes, as the process that sends does."""
    connection = socket.socket(fileno=fd)
    while connection.recv(1 << 18):
        pass


class Leases:
    """Objects of one namespace, which may all be lent."""

    def __init__(self, objects: int) -> None:
        self._rows = rows = Rows(tables_in_memory(ArenaLayout.plan(objects * 8192, rows=objects)), run=1)
        rows.states[:objects], rows.runs[:objects], rows.flags[:objects] = COMMITTED, 1, SUMMED
        rows.keys.view(np.uint8)[: objects * 16] = np.frombuffer(random.randbytes(objects * 16), np.uint8)

    def chunks(self, tenant: str | None) -> PeerChunks:  # noqa: ARG002
        namespace = Namespace(0, bytes(16), "", 0.0)
        return PeerChunks(self._rows, Index(1, random.randbytes), (), [namespace], {0: namespace})


async def measure_source(report: Report, objects: int) -> bytes:
    """Gather for a summary, and make it. Return the frame that a reader gets."""
    loop = asyncio.get_running_loop()
    stream = ChildStream(loop, lambda _: None)
    stream.start("benchmarks.peer_summaries", lambda fd: (DRAIN, fd))
    words: list[bytes] = []
    gathered: list[Gathered] = []
    held: list[float] = []

    def send(message: SummaryWords) -> None:
        words.append(message.words)
        stream.send(FROM_DAEMON.pack(message))

    guard = Guard(lambda _: None, logging.getLogger("benchmark"))
    leases: Any = Leases(objects)
    summaries = PeerSummaries(
        leases,
        send,
        unsent=lambda: stream.unsent,
        arena_id=1,
        questions=Paced(0.2, loop),
        loop=loop,
        guard=guard,
        every_seconds=0.0,
    )
    gather = summaries._gather  # noqa: SLF001

    def timed(*values: Any) -> None:
        before = time.thread_time()
        gather(*values)
        held.append(time.thread_time() - before)

    summaries._gather = timed  # type: ignore[method-assign, assignment]  # noqa: SLF001
    for _ in range(5):
        words.clear()
        gathered.clear()
        summaries.ask(None, gathered.append)
        await until(lambda: gathered, "it is gathered")
    stream.end()
    report.figure("hold_ms", 1e3 * max(held), "ms", at_most=HOLD_MS_MAX)
    report.figure("hold_ms_p50", 1e3 * statistics.median(held), "ms")
    report.figure("gather_ms", 1e3 * sum(held) / 5, "ms")
    cpu = time.thread_time()
    summary = summary_of(words, 1)
    report.figure("filter_ms", 1e3 * (time.thread_time() - cpu), "ms")
    frame = TO_READER.pack(summary)
    report.figure("summary_bytes", len(frame), "bytes")
    return frame


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


async def measure_scout(report: Report, frame: bytes, places: int) -> None:
    """Have a scout ask that many places, and look up while it does."""
    loop = asyncio.get_running_loop()

    def summarized(_: Any, __: Any) -> Iterator[bytes]:
        yield frame

    counts: dict[str, float] = {}

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0.0) + amount

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        authority = Authority(Path(folder))
        files = authority.issue("peer", PEER)
        sources = [stack.enter_context(LyingSource(files, authority.pem, lambda _: b"")) for _ in range(places)]
        for source in sources:
            source.summaries = summarized
        scout = scouts.Scout(
            PeerSettings("", 0, f"{files.cert}", f"{files.key}", f"{authority.pem}", (PEER,), 60.0),
            name="fleet", arena_id=2, seats=4, every_seconds=600.0, bytes_max=128 << 20, loop=loop,
            log=logging.getLogger("benchmark"), count=count, ranked=lambda _: None,
        )  # fmt: skip
        stack.callback(scout.close)
        scout.watch([("127.0.0.1", source.port) for source in sources], [])
        await until(lambda: counts.get("peer_summaries.new") == places, lambda: f"all are known: {counts}")
        assert scout.pid is not None
        report.figure("scout_mib", _pss_mib(scout.pid), "MiB")
        took = []
        before = _cpu_seconds(scout.pid)
        for _ in range(LOOKUPS):
            names = [object_path(bytes(16), os.urandom(16), 1) for _ in range(FILES_PER_STAT)]
            await until(lambda: not scout._stream.unsent, "the scout has taken in the last one")  # noqa: SLF001
            cpu = time.thread_time()
            scout.want(names)
            took.append(time.thread_time() - cpu)
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
        report.figure("lookup_us", 1e6 * statistics.median(took), "us")
        report.figure("scout_cpu_ms", 1e3 * (_cpu_seconds(scout.pid) - before) / LOOKUPS, "ms")


async def looked_up(live: PeerLive, names: Sequence[ObjectName]) -> tuple[float, int]:
    """Look up once. Return the seconds until the answer, and how many of the names it has found."""
    answered = asyncio.get_running_loop().create_future()
    known = len(live.listener.found_objects)
    began = time.perf_counter()
    live.tier.look_up(names, lambda: answered.set_result(None))
    await answered
    return time.perf_counter() - began, len(live.listener.found_objects) - known


def nobodys(count: int) -> list[ObjectName]:
    return [replace(NAMES[0], key=os.urandom(16)) for _ in range(count)]


async def measure_moves(report: Report, places: int) -> None:
    """Look up what only one of many places has, which is no peer, and then what only another one has."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sources = Sources(Path(folder), stack, places)
        at_first, then = NAMES[:8], NAMES[8:16]
        for source in sources.each:
            source.keys.update(name.key for name in NAMES[16:])
        live = PeerLive(Path(folder), places=PlacesFile(sources.file), peers_max=4)
        try:
            await live.until(lambda: live.tier.readable, "it serves")
            peers = {one.address for one in live.tier.status().peers}
            others = [source for source in sources.each if f"127.0.0.1:{source.port}" not in peers]
            for source, names in zip(others, (at_first, then), strict=False):
                source.keys.update(name.key for name in names)
            await until(lambda: live.counts["peer_summaries.new"] >= places, lambda: f"all are known: {live.counts}")
            for figure, names in (("first_move", at_first), ("second_move", then)):
                began = time.monotonic()
                seconds, hits = await looked_up(live, names)
                report.figure(f"{figure}_lookup_ms", 1e3 * seconds, "ms")
                report.figure(f"{figure}_hits", hits / len(names), "")
                if hits < len(names):
                    await found(live, *names)
                report.figure(f"{figure}_s", time.monotonic() - began, "s")
            took = [(await looked_up(live, nobodys(16)))[0] for _ in range(LOOKUPS)]
            report.figure("nobody_ms", 1e3 * statistics.median(took), "ms")
            report.figure("nobody_ms_p99", 1e3 * sorted(took)[len(took) * 99 // 100], "ms")
        finally:
            await live.close()


def main() -> int:
    parser = arguments(str(__doc__))
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--places", type=int, default=PLACES)
    chosen = parser.parse_args()
    report = Report("peer_summaries")
    report.note("objects", chosen.objects)
    report.note("places", chosen.places)

    async def run() -> None:
        frame = await measure_source(report, chosen.objects)
        await measure_scout(report, frame, chosen.places)
        await measure_moves(report, chosen.places)

    asyncio.run(run())
    report.finish(chosen.json)
    return bool(report.missed())


if __name__ == "__main__":
    if sys.argv[1:2] == [DRAIN]:
        drain(int(sys.argv[2]))
    else:
        sys.exit(main())
