"""What each write policy of a disk writes, and what it hits, on the workload families (benchmarks/workloads).

    python -m benchmarks.write_policies [--families chat ...] [--seeds 1] [--requests 1500] [--fractions 0.2]
                                        [--ram 0.2] [--targets 1] [--json PATH]

The daemon's own depot replays each family over RAM and a disk, without payload. The disk has a fraction of what all
distinct objects take (`--fractions`), and RAM has a part of the disk (`--ram`). A trace stands for one day: its times
are stretched. So "writes" are drive writes of that day. "hits" are what the disk supplied, in capacities of the disk.
`--targets`: drive writes a day, for `auto`. Equal arguments give equal rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from kvdepot.core.eviction import DEFAULT_POLICY
from kvdepot.core.trace_file import Request as TraceRequest
from kvdepot.core.trace_file import Trace
from kvdepot.core.write_admission import DAY_SECONDS
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.offline.replay import Disk, Hits, Replay

from benchmarks.policy import GEOMETRIES, OBJECT_BYTES, Geometry, Request
from benchmarks.report import write_record
from benchmarks.workload_policies import family_parser, printed, requests_of
from benchmarks.workloads.families import family_names

_COMPARED = GEOMETRIES[:2]  # an engine keeps one state a prompt by default
_ALWAYS = (WritePolicy.COMMIT, WritePolicy.EVICT, WritePolicy.SECOND_USE)
_NAMESPACE = "one"


def day_of(requests: Sequence[Request], geometry: Geometry) -> Trace:
    """Return a trace of one day with these requests."""
    first, last = requests[0].at_seconds, requests[-1].at_seconds
    scale = DAY_SECONDS / (last - first) if last > first else 1.0
    return Trace(
        {_NAMESPACE: geometry.spec()},
        tuple(TraceRequest((one.at_seconds - first) * scale, _NAMESPACE, geometry.path(one), 0) for one in requests),
    )


def written(trace: Trace, ram_bytes: int, disk_bytes: int, write: WritePolicy, target: float) -> Hits:
    """Return what a replay writes and hits. `target`: drive writes a day; 0: without a limit."""
    config = TierConfig(write, write_bytes_per_day=target * disk_bytes)
    return Replay(trace, ram_bytes, DEFAULT_POLICY, disk=Disk(disk_bytes, config)).run()


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    ways = [(write, 0.0) for write in _ALWAYS] + [(WritePolicy.AUTO, target) for target in options.targets]
    for seed in options.seeds:
        for family in options.families:
            requests = requests_of(family, seed, options.requests)
            for geometry in _COMPARED:
                trace = day_of(requests, geometry)
                for fraction in options.fractions:
                    disk_bytes = int(fraction * geometry.unique_bytes(requests)) // OBJECT_BYTES * OBJECT_BYTES
                    ram_bytes = int(options.ram * disk_bytes) // OBJECT_BYTES * OBJECT_BYTES
                    for write, target in ways:
                        hits = written(trace, ram_bytes, disk_bytes, write, target)
                        yield {
                            "family": family, "seed": seed, "geometry": geometry.name, "fraction": fraction,
                            "write": write.value, "target": target, "hit_rate": round(hits.rate, 4),
                            "writes": round(hits.written_bytes / disk_bytes, 3),
                            "hits": round(hits.disk_hit_bytes / disk_bytes, 3),
                            "written_per_hit_byte": _rounded(hits.written_per_hit_byte),
                        }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _line(row: dict[str, object]) -> str:
    way = f"{row['write']} {row['target']:g}" if row["target"] else f"{row['write']}"
    cost = "-" if row["written_per_hit_byte"] is None else f"{row['written_per_hit_byte']:.2f}"
    return (
        f"{row['family']:<10} {row['seed']:>3} {row['geometry']:<10} {row['fraction']:>4.0%}  {way:<11}"
        f" hit rate {row['hit_rate']:.3f}  writes {row['writes']:>6.2f}  hits {row['hits']:>6.2f}"
        f"  written per hit byte {cost:>6}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = family_parser(__doc__, family_names(), [0.2])
    parser.set_defaults(requests=1500)
    parser.add_argument("--ram", type=float, default=0.2, help="as a part of the disk")
    parser.add_argument("--targets", type=float, nargs="+", default=[1.0], help="drive writes a day, for auto")
    options = parser.parse_args(arguments)
    rows = printed(rows_of(options), _line)
    if options.json:
        write_record(options.json, "write_policies", {"rows": rows})


if __name__ == "__main__":
    main()
