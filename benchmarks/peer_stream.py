"""Speed of loads from a peer, as a share of a bare transfer between the same two network namespaces. As root.

Two daemons in namespaces that a pair of interfaces joins, at 10 Gbit/s, with 0.5 ms if the kernel has netem. The source
has fresh objects of 4 MiB with checksums. The reader looks them up, then one acquire loads all of them: from the call
until it is granted. So the checksum of each object is verified, and every byte is compared afterwards, in no time that
counts.

The bare socket sends as many bytes of one buffer over 1, 2 and 4 connections, and nothing is checked. The fastest of
the three counts. Rounds alternate: bare, peer, bare.

With `--lane nixl` objects come over NIXL, by TCP. A bare read over NIXL takes the place of the socket.

`cpu_ratio` compares CPU time: those of the processes that send or lend and of the workers, against that of the two
processes of the fastest bare transfer. On a machine that does other things as well it says more than speeds.
`daemons_cpu_s_gb` is what both daemons take beside them, for a lookup's answer, leases and grants.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.core.calls import AcquireOutcome

from benchmarks.paths import environment
from benchmarks.report import Report, arguments, median
from tests.rigs.cable import Cable, CableError
from tests.rigs.certificates import Authority
from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import BORROWING, LENDING, LENT, PEER
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of, payload_of, status_of

SOURCE, READER = 0, 1
OBJECT_BYTES: Final = 4 << 20
CONNECTIONS: Final = (1, 2, 4)
AIMS: Final = {"stream": 0.85, "nixl": 0.9}
_FULL: Final = 0.85
_ROOM: Final = 1.3
"""RAM of the source by what it has to hold: for the high watermark, and what its processes take."""
_PORT: Final = 7448
_SOURCES: Final = (b"kvdepot.server.io.peer_server", b"kvdepot.server.io.nixl_lender")
_WORKER: Final = b"kvdepot.server.io.worker"


@dataclass(frozen=True, slots=True)
class Speed:
    bytes_per_second: float
    cpu_seconds: float
    daemons_cpu_seconds: float = 0.0


class Bare:
    """The socket alone."""

    def __init__(self, cable: Cable, *files: Path) -> None:
        self._cable = cable
        self._files = files

    def measure(self, length: int, connections: int) -> Speed:
        sender = self._started(SOURCE, "send", length, connections)
        with sender:
            assert sender.stdout is not None
            if sender.stdout.readline() != b"ready\n":
                raise SystemExit("the sender did not start")
            with self._started(READER, "receive", length, connections) as receiver:
                seconds, cpu_seconds = map(float, receiver.communicate()[0].split())
            cpu_seconds += float(sender.stdout.readline())
        return Speed(length * connections / seconds, cpu_seconds)

    def _started(self, node: int, role: str, length: int, connections: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.tls_probe", self._cable.namespace(node), role]
        command += [self._cable.address(SOURCE), *map(str, self._files), str(length), str(connections)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())


class BareNixl:
    """A read over NIXL alone. It has one connection, whatever is asked for."""

    def __init__(self, cable: Cable) -> None:
        self._cable = cable

    def measure(self, length: int, connections: int) -> Speed:
        total = length * connections
        with self._started(SOURCE, "lend", total) as lender:
            assert lender.stdin is not None
            assert lender.stdout is not None
            told = lender.stdout.readline()
            with self._started(READER, "read", total) as reader:
                seconds, cpu_seconds = map(float, reader.communicate(told)[0].split())
            cpu_seconds += float(lender.communicate(b"")[0])
        return Speed(total / seconds, cpu_seconds)

    def _started(self, node: int, role: str, length: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.nixl_probe", self._cable.namespace(node), role, str(length)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())


class Peers:
    """A source, a reader, and an engine of each."""

    def __init__(self, source: DaemonProcess, reader: DaemonProcess, objects: int) -> None:
        spec = dense_spec(object_bytes=OBJECT_BYTES)
        self._source, self._reader, self._objects = source, reader, objects
        self._owner = RawEngine(source.socket, spec=spec)
        self._engine = RawEngine(reader.socket, spec=spec)
        self._rounds = 0

    def measure(self) -> Speed:
        """Load objects that nobody has loaded before."""
        self._rounds += 1
        keys = keys_of(f"round{self._rounds}", self._objects)
        for first in range(0, len(keys), 8):
            lease_id, _, extents = self._owner.reserve(keys[: first + 8], first=first)
            self._owner.write(keys[first : first + 8], extents, lambda key: payload_of(key, OBJECT_BYTES))
            self._owner.commit(lease_id, len(keys[first : first + 8]))
        wait_until(lambda: not status_of(self._source.socket).tiers[0].pending_checksums, "all have checksums")
        wait_until(lambda: self._engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all are found")
        movers, daemons = self._movers(), (self._source.pid, self._reader.pid)
        before = time.perf_counter(), _cpu_seconds(movers), _cpu_seconds(daemons)
        lease_id, outcome, extents = self._engine.acquire(keys)
        after = time.perf_counter(), _cpu_seconds(movers), _cpu_seconds(daemons)
        if outcome is not AcquireOutcome.GRANTED:
            raise SystemExit(f"the objects were not loaded: {outcome.name}")
        for key, data in zip(keys, self._engine.read(extents, len(keys)), strict=True):
            if data != payload_of(key, OBJECT_BYTES):
                raise SystemExit(f"wrong bytes in {key!r}")
        self._engine.release(lease_id)
        seconds, *cpu_seconds = (end - begin for begin, end in zip(before, after, strict=True))
        return Speed(len(keys) * OBJECT_BYTES / seconds, *cpu_seconds)

    def wrapped(self) -> bool:
        """Return whether the reader's RAM is full, so that the next objects lie where others lay."""
        ram = status_of(self._reader.socket).tiers[0]
        return ram.used_bytes > _FULL * ram.ready_bytes

    def _movers(self) -> list[int]:
        """Return the pids of the processes that move bytes."""
        pids = [pid for module in _SOURCES for pid in children(self._source.pid, module)]
        return pids + children(self._reader.pid, _WORKER)

    def close(self) -> None:
        self._owner.close()
        self._engine.close()


def _cpu_seconds(pids: Iterable[int]) -> float:
    """Return what the processes have taken until now."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def peers(cable: Cable, tls: str, objects: int, rounds: int, workers: int, *, nixl: bool) -> Iterator[Peers]:
    """Start both daemons.

    The source has room for all that the reader has until its RAM is full, and for the rounds. Otherwise it would evict
    what nobody has read yet, and a load would miss.
    """
    with ExitStack() as stack:
        round_bytes = objects * OBJECT_BYTES
        ram_bytes = 2 * round_bytes + (512 << 20)
        source_bytes = int((ram_bytes + (rounds + 1) * round_bytes) * _ROOM)
        listen = f'[daemon]\nlisten_peers = "tcp://{cable.address(SOURCE)}:{_PORT}"\n{LENDING if nixl else ""}{tls}'
        tier = (
            f'{tls}[[tier]]\nname = "peer"\nkind = "peer"\nurl = "tcp://{cable.address(SOURCE)}:{_PORT}"\n'
            f'capacity = "1GiB"\ndeadline = "60s"\nio_workers = {workers}\n{BORROWING if nixl else ""}'
        )
        source = stack.enter_context(
            DaemonProcess(ram=f"{source_bytes}B", config=listen, program=cable.program(SOURCE))
        )
        reader = stack.enter_context(DaemonProcess(ram=f"{ram_bytes}B", config=tier, program=cable.program(READER)))
        wait_until(lambda: status_of(reader.socket).tiers[1].state == "ready", "the peer is ready")
        if nixl:
            source.wait_for_log(LENT)
        both = Peers(source, reader, objects)
        stack.callback(both.close)
        yield both
        lane = "nixl" if nixl else "stream"
        if not status_of(reader.socket).counters.get(f"peer_loaded_bytes.peer/{lane}"):
            raise SystemExit(f"nothing came over {lane}:\n{reader.log[-2000:]}")


def measure(cable: Cable, folder: Path, objects: int, rounds: int, workers: int, report: Report, *, nixl: bool) -> None:
    authority = Authority(folder)
    files = authority.issue("peer", PEER)
    tls = (
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\nclient_ca = "{authority.pem}"\nallow_peers = ["{PEER}"]\n'
    )
    bare = BareNixl(cable) if nixl else Bare(cable, files.cert, files.key, authority.pem)
    lane, bare_lane = ("nixl", "bare_nixl") if nixl else ("stream", "tls")
    total = objects * OBJECT_BYTES
    speeds: dict[int, list[Speed]] = {count: [] for count in ((1,) if nixl else CONNECTIONS)}
    peer, ratios, cpu_ratios = list[Speed](), list[float](), list[float]()

    def bare_round() -> Speed:
        found = {count: bare.measure(total // count, count) for count in speeds}
        for count, speed in found.items():
            speeds[count].append(speed)
        return max(found.values(), key=lambda one: one.bytes_per_second)

    with peers(cable, tls, objects, rounds, workers, nixl=nixl) as both:
        while not both.wrapped():
            both.measure()  # so that workers have touched all of the arena: the first time costs a fault for each page
        before = bare_round()
        for _ in range(rounds):
            peer.append(both.measure())
            after = bare_round()
            ratios.append(2 * peer[-1].bytes_per_second / (before.bytes_per_second + after.bytes_per_second))
            cpu_ratios.append((before.cpu_seconds + after.cpu_seconds) / 2 / peer[-1].cpu_seconds)
            before = after
    report.figure(f"{lane}_ratio", median(ratios), "", at_least=AIMS[lane])
    report.figure("cpu_ratio", median(cpu_ratios), "")
    report.figure(f"{lane}_gb_s", _gb_s(peer), "GB/s")
    for count, found in speeds.items():
        report.figure(f"{bare_lane}_{count}_gb_s", _gb_s(found), "GB/s")
    report.figure(f"{lane}_cpu_s_gb", median([one.cpu_seconds for one in peer]) / total * 1e9, "s/GB")
    report.figure("daemons_cpu_s_gb", median([one.daemons_cpu_seconds for one in peer]) / total * 1e9, "s/GB")
    for count, found in speeds.items():
        report.figure(f"{bare_lane}_{count}_cpu_s_gb", median([one.cpu_seconds for one in found]) / total * 1e9, "s/GB")
    report.note("ratios", [round(one, 3) for one in ratios])
    report.note("between the namespaces", cable.shaping)
    report.note("load", round(os.getloadavg()[0], 1))


def _gb_s(speeds: list[Speed]) -> float:
    return median([one.bytes_per_second for one in speeds]) / 1e9


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--objects", type=int, default=64, help="of 4 MiB, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="io_workers of the tier")
    parser.add_argument("--lane", choices=AIMS, default="stream")
    options = parser.parse_args()
    nixl = options.lane == "nixl"
    if nixl:
        os.environ["UCX_TLS"] = "tcp"  # UCX would find out that both ends are on one host
    report = Report("peer_stream")
    try:
        cable = Cable()
    except CableError as error:
        raise SystemExit(f"no network namespaces: {error}") from error
    with cable, tempfile.TemporaryDirectory(prefix="kvd") as folder:
        measure(cable, Path(folder), options.objects, options.rounds, options.workers, report, nixl=nixl)
    report.finish(options.json)


if __name__ == "__main__":
    main()
