"""Cost of the keys of a shared tier: stores and loads through a keyed directory, as a share of one without a key.

Two daemons with a directory each, one of them with a `key_file`. Rounds alternate, and which one comes first does, too.
Writes: from the first commit until the daemon has published all objects. Reads: from the first acquire to the last copy
into KV tensors, of what was used longest ago, so that RAM has lost it. The daemons' own counters say how many bytes
came from the directories, and every byte is compared. Keys are always fresh, so no object is there already.

The directories lie in memory by default: on a medium that is as fast as RAM a MAC costs the largest share.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file and with -m

from benchmarks.depot import SHM, Status, daemon, engine
from benchmarks.disk import BATCH, KV_BYTES, MIB, TIER, DiskDepot, HeldDepot, wait_ready
from benchmarks.ram import OBJECT_BYTES, Copies, spec
from benchmarks.report import Report, arguments, median

WORKERS = 2
CONFIG = """
[policy]
eviction = "lru"
[[tier]]
name = "{name}"
kind = "shared"
path = "{path}"
capacity = "{capacity}"
write = "commit"
io_workers = {workers}
on_root_filesystem = true
key_file = "{key_file}"
"""


@contextmanager
def depot_over(directory: Path, options: argparse.Namespace, rng: random.Random, *, keyed: bool) -> Iterator[DiskDepot]:
    """A daemon with a shared tier of its own."""
    directory.mkdir()
    key = directory / "key"
    key.touch(0o600)
    key.write_text(f"{rng.randbytes(32).hex()}\n")
    config = directory / "kvdepot.toml"
    config.write_text(
        CONFIG.format(
            name=TIER, path=directory / "tier", capacity=options.capacity, workers=WORKERS,
            key_file=key if keyed else "",
        )
    )  # fmt: skip
    (directory / "tier").mkdir()
    with daemon(options.ram, config=config, memory=options.memory) as started:
        status = Status(started.endpoint)
        status.wait_populated(started)
        wait_ready(status)
        with engine(started.endpoint, spec()) as (session, worker):
            assert worker.arena is not None
            held = HeldDepot(session, worker.arena, Copies(), rng, KV_BYTES, options.round_mib * MIB)
            yield DiskDepot(held, status)


def measure(depots: dict[str, DiskDepot], options: argparse.Namespace, report: Report) -> None:
    objects = options.round_mib * MIB // OBJECT_BYTES
    speeds: dict[str, list[float]] = {f"{kind}_{name}": [] for kind in ("write", "read") for name in depots}
    for one in depots.values():
        while len(one.depot.chains) * BATCH * OBJECT_BYTES < one.depot.arena.size_bytes + 2 * options.round_mib * MIB:
            one.put(objects)  # until RAM has lost what is read first
    for number in range(options.rounds):
        for name in sorted(depots, reverse=bool(number % 2)):
            speeds[f"write_{name}"].append(depots[name].put(objects))
            speeds[f"read_{name}"].append(depots[name].get(objects))
    for kind in ("write", "read"):
        pairs = zip(speeds[f"{kind}_keyed"], speeds[f"{kind}_plain"], strict=True)
        report.figure(f"{kind}_keyed_ratio", median([keyed / plain for keyed, plain in pairs]), "")
    for name, values in speeds.items():
        report.figure(f"{name}_gb_s", median(values) / 1e9, "GB/s")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=SHM, help="where the directories lie (default %(default)s)")
    parser.add_argument("--ram", default="1280MiB", help="capacity of each daemon's RAM tier (default %(default)s)")
    parser.add_argument("--memory", type=Path, default=SHM, help="where its arena lies (default %(default)s)")
    parser.add_argument("--capacity", default="3GiB", help="of each tier (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-mib", type=int, default=256, help="moved a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options: argparse.Namespace = parser.parse_args()
    report = Report("keyed: 4 MiB objects through a shared tier, with a key and without one")
    report.note("seed", options.seed)
    report.note("directories", str(options.path))
    directory = Path(tempfile.mkdtemp(prefix="kvdkeyed", dir=options.path))
    rng = random.Random(options.seed)
    try:
        with ExitStack() as stack:
            depots = {
                name: stack.enter_context(depot_over(directory / name, options, rng, keyed=name == "keyed"))
                for name in ("keyed", "plain")
            }
            measure(depots, options, report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()
