"""Speed of loads of what only a disk of a peer has, as a share of the peer's own loads from that disk.

Two daemons on this host, over the loopback device. The source stores objects of 4 MiB with checksums, which its disk
takes at once. Then it restarts with an empty RAM. A round loads fresh objects once through the reader, and others once
at the source itself, by one acquire each, in turns. Every byte is compared, in no time that counts. The disk is a
directory below `--directory`, read with O_DIRECT if the file system has it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from kvdepot.core.calls import AcquireOutcome

from benchmarks.report import Report, arguments, median
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.disk_node import config, reboot
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import Fleet, port_of
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of, payload_of, status_of

OBJECT_BYTES: Final = 4 << 20
_OVERHEAD_BYTES: Final = 512 << 20
SPEC: Final = dense_spec(object_bytes=OBJECT_BYTES)


def stored(source: DaemonProcess, prompts: list[list[bytes]]) -> None:
    """Store these objects, and forget them in RAM once they are on the disk."""
    with RawEngine(source.socket, spec=SPEC) as engine:
        for keys in prompts:
            lease_id, _, extents = engine.reserve(keys)
            engine.write(keys, extents, lambda key: payload_of(key, OBJECT_BYTES))
            engine.commit(lease_id, len(keys))
        total = sum(map(len, prompts))
        wait_until(lambda: status_of(source.socket).tiers[1].objects == total, "the disk has all")
    reboot(source)
    wait_until(lambda: status_of(source.socket).tiers[1].objects == total, "the disk has opened")


def loaded(engine: RawEngine, keys: list[bytes]) -> float:
    """Load objects. Return the bytes per second."""
    wait_until(lambda: engine.locate(keys) == len(keys) * CHUNK_TOKENS, "all are found")
    began = time.perf_counter()
    lease_id, outcome, extents = engine.acquire(keys)
    seconds = time.perf_counter() - began
    if outcome is not AcquireOutcome.GRANTED:
        raise SystemExit(f"the objects were not loaded: {outcome.name}")
    for key, data in zip(keys, engine.read(extents, len(keys)), strict=True):
        if data != payload_of(key, OBJECT_BYTES):
            raise SystemExit(f"wrong bytes in {key!r}")
    engine.release(lease_id)
    return len(keys) * OBJECT_BYTES / seconds


def measure(folder: Path, objects: int, rounds: int, report: Report) -> None:
    prompts = {way: [keys_of(f"{way}{number}", objects) for number in range(rounds)] for way in ("peer", "own")}
    total_bytes = 2 * rounds * objects * OBJECT_BYTES
    ram = f"{2 * total_bytes + _OVERHEAD_BYTES}B"
    fleet = Fleet(folder)
    try:
        disk = config(folder / "disk", capacity=f'"{2 * total_bytes}B"')
        source = fleet.source(port=fleet.port(), more=disk, ram=ram)
        stored(source, [*prompts["peer"], *prompts["own"]])
        reader = fleet.reader(port_of(source), ram=ram, of_tier="io_workers = 2\n", deadline="60s")
        speeds: dict[str, list[float]] = {"peer": [], "own": []}
        with RawEngine(source.socket, spec=SPEC) as own, RawEngine(reader.socket, spec=SPEC) as peer:
            for number in range(rounds):
                for way, engine in (("peer", peer), ("own", own)):
                    speeds[way].append(loaded(engine, prompts[way][number]))
        counters = status_of(source.socket).counters
    finally:
        fleet.close()
    report.figure("peer_ratio", median([a / b for a, b in zip(speeds["peer"], speeds["own"], strict=True)]), "")
    for way, found in speeds.items():
        report.figure(f"{way}_gb_s", median(found) / 1e9, "GB/s")
    report.note("read for the peer", counters["peer_disk_reads.read"])
    report.note("load", round(os.getloadavg()[0], 1))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--objects", type=int, default=32, help="of 4 MiB, in each load")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = Report("peer_disk")
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir=options.directory))
    try:
        (folder / "disk").mkdir()
        measure(folder, options.objects, options.rounds, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()
