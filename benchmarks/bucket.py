"""Speed of the object tier through the real client, as a share of obstore alone at the same server.

The server is a process that keeps objects in memory (`benchmarks.s3_memory`), or the one of `--endpoint`. Objects of 4
MiB, checksums on, keys always fresh.

- Puts: all objects lie in RAM before the first is committed, and commits keep the tier's queue filled; from the first
  commit until all are stored.
- Gets: of what was used longest ago, so that RAM has lost it; from the first acquire to the last copy into KV tensors.
  Every byte is compared.
- obstore puts and gets as many objects, with as many in flight as the tier's workers have. It neither checks nor copies
  them. Its keys are fresh, too: a server that has room already for an object is faster. Rounds alternate: obstore,
  tier, obstore.
- Neither signs payloads, as is usual over https. With `--sign-payload` both do.

`acquire_p99_ratio`: what another engine's acquires of objects in RAM take while the server is stopped and objects are
committed, against idle, in alternating windows.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

import obstore
from obstore.store import S3Store

from benchmarks.acquire_probe import Probe
from benchmarks.background import in_background
from benchmarks.depot import Daemon, Status, daemon, engine
from benchmarks.disk import KV_BYTES, MIB, POLL_SECONDS, WINDOW_SECONDS, DiskDepot, HeldDepot, measure_speed, wait_ready
from benchmarks.ram import OBJECT_BYTES, Copies, spec
from benchmarks.report import Report, arguments, median

BUCKET: Final = "kvdepot"
WORKERS, DEPTH = 2, 4
START_SECONDS: Final = 30.0
HUNG_OBJECTS_PER_SECOND: Final = 8
CONFIG: Final = """
[policy]
eviction = "lru"
[[tier]]
name = "bucket"
kind = "object"
url = "s3://{bucket}"
prefix = "bench/{prefix}"
endpoint = "{endpoint}"
region = "us-east-1"
allow_http = true
sign_payload = "{sign}"
credentials_file = "{credentials}"
capacity = "64GiB"
write = "commit"
io_workers = {workers}
deadline = "2s"
"""


class Obstore:
    """The library alone."""

    def __init__(self, endpoint: str, *, sign: bool) -> None:
        self._store = S3Store(
            BUCKET, endpoint=endpoint, access_key_id="testing", secret_access_key="testing", region="us-east-1",
            virtual_hosted_style_request=False, client_options={"allow_http": True}, unsigned_payload=not sign,
        )  # fmt: skip
        self._payload = memoryview(os.urandom(OBJECT_BYTES))
        self._stored: list[str] = []
        self._rounds = 0

    def put(self, objects: int) -> float:
        """Bytes per second."""
        self._rounds += 1
        self._stored = [f"plain/{self._rounds}/{number}" for number in range(objects)]
        return self._all(self._stored, lambda key: obstore.put(self._store, key, self._payload, use_multipart=False))

    def get(self, objects: int) -> float:
        """Bytes per second, of what was put last."""
        return self._all(self._stored[:objects], lambda key: obstore.get(self._store, key).bytes())

    def _all(self, keys: list[str], request: Callable[[str], object]) -> float:
        with ThreadPoolExecutor(DEPTH) as threads:
            began = time.perf_counter()
            list(threads.map(request, keys))
            return len(keys) * OBJECT_BYTES / (time.perf_counter() - began)


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """The URL and the pid of a server in memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.s3_memory", str(port)])
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(POLL_SECONDS)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def measure_hung(depot: DiskDepot, started: Daemon, server_pid: int, rounds: int, report: Report) -> None:
    idle, hung, ratios = [], [], []
    with Probe.of(started.endpoint) as probe:
        for _ in range(rounds):
            idle.append(probe.p99_seconds(WINDOW_SECONDS))
            with _stopped(server_pid), in_background(lambda over: _stores(depot, over.wait)):
                hung.append(probe.p99_seconds(WINDOW_SECONDS))
            while (tier := depot.status().tiers[1]).breaker != "closed" or tier.queued_objects:
                time.sleep(POLL_SECONDS)
            ratios.append(hung[-1] / idle[-1])
    report.figure("acquire_p99_ratio", median(ratios), "", at_most=1.1)
    report.figure("acquire_p99_idle_ms", 1e3 * median(idle), "ms")
    report.figure("acquire_p99_hung_ms", 1e3 * median(hung), "ms")


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _stores(depot: DiskDepot, over: Callable[[float], bool]) -> None:
    while not over(1 / HUNG_OBJECTS_PER_SECOND):
        depot.depot.put(1, 1)
        depot.depot.commit()


@contextmanager
def bucket_daemon(directory: Path, endpoint: str, ram: str, *, sign: bool) -> Iterator[Daemon]:
    credentials = directory / "credentials"
    credentials.write_text("access_key_id = testing\nsecret_access_key = testing\n")
    credentials.chmod(0o600)
    config = directory / "kvdepot.toml"
    config.write_text(
        CONFIG.format(
            bucket=BUCKET,
            endpoint=endpoint,
            credentials=credentials,
            workers=WORKERS,
            prefix=os.urandom(4).hex(),
            sign="always" if sign else "never",
        )
    )
    with daemon(ram, config=config) as started:
        yield started


def measure(
    directory: Path, endpoint: str, server_pid: int | None, options: argparse.Namespace, report: Report
) -> None:
    with bucket_daemon(directory, endpoint, options.ram, sign=options.sign_payload) as started:
        status = Status(started.endpoint)
        status.wait_populated(started)
        wait_ready(status)
        with engine(started.endpoint, spec()) as (session, worker):
            assert worker.arena is not None
            rng = random.Random(options.seed)
            held = HeldDepot(session, worker.arena, Copies(), rng, KV_BYTES, options.round_mib * MIB)
            depot = DiskDepot(held, status, "bucket")
            filled = 0
            while filled < started.arena_bytes:  # so that RAM has lost what is got
                depot.put(64)
                filled += 64 * OBJECT_BYTES
            plain = Obstore(endpoint, sign=options.sign_payload)
            ways = {"put": (depot.put, plain.put), "get": (depot.get, plain.get)}
            measure_speed(ways, "obstore", options.rounds, options.round_mib * MIB // OBJECT_BYTES, 0.8, report)
            if server_pid is not None:
                measure_hung(depot, started, server_pid, options.rounds, report)
            report.note("counters", {k: v for k, v in status().counters.items() if ".bucket/" in k})


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--endpoint", help="of another server, which has a bucket named kvdepot")
    parser.add_argument("--ram", default="1536MiB", help="capacity of the daemon's RAM tier (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-mib", type=int, default=256, help="moved a round (default %(default)s)")
    parser.add_argument("--sign-payload", action="store_true", help="payloads are part of signatures")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options: Any = parser.parse_args()
    report = Report("bucket: 4 MiB objects, obstore beside it")
    report.note("seed", options.seed)
    directory = Path(tempfile.mkdtemp(prefix="kvdbucket"))
    try:
        if options.endpoint:
            measure(directory, options.endpoint, None, options, report)
        else:
            with served() as (endpoint, pid):
                measure(directory, endpoint, pid, options, report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()
