"""How far the what-if curve is from a full replay, for each workload family.

    python -m benchmarks.what_if [--families agents chat] [--requests 600] [--fractions 0.1 0.2] [--points 256]
    python -m benchmarks.what_if --requests 10000 --unsampled

A capacity is a fraction of what all distinct objects of a trace take, as in `benchmarks.policy`. The sketch of a tier
of that capacity reads the same requests, and its hit ratio at a factor of 1 is compared with a replay of the daemon's
own depot. `--points` is the limit of points in each cache: a small one makes the sample small. With
`--unsampled` the curve is compared with that of a sketch that samples everything, at all factors: a replay of a long
trace takes too long. `lru` is what a model of LRU, which is what SHARDS predicts, would have said of the same tier.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from kvdepot.core.eviction import DEFAULT_POLICY
from kvdepot.core.report import WhatIfStatus
from kvdepot.core.what_if import FACTORS, POINTS_MAX, WhatIf
from kvdepot.core.what_if import Geometry as Sizes

from benchmarks.policy import BLOCK_TOKENS, GEOMETRIES, OBJECT_BYTES, STATE_BLOCKS, Geometry, Request, hit_rate
from benchmarks.report import write_record
from benchmarks.workload_policies import FRACTIONS, family_parser, printed, requests_of
from benchmarks.workloads.families import family_names

AIM = 0.02
_ALL_POINTS = 1 << 30
_FOREVER = 1e12
_REQUESTS_MIN = 100
"""Fewer than a daemon needs, so that small samples are measured, too."""
_COMPARED = GEOMETRIES[:2]  # the sketch takes a state a prompt, as engines store them by default


def curve(
    requests: Sequence[Request], geometry: Geometry, capacity_bytes: int, *, policy: str = DEFAULT_POLICY,
    points_max: int = POINTS_MAX, requests_min: int = _REQUESTS_MIN,
) -> tuple[WhatIfStatus, float]:  # fmt: skip
    """Return the curve of a tier after these requests, and the seconds of processor time that it took."""
    began = time.process_time()
    clock = 0.0
    sketch = WhatIf(
        capacity_bytes, policy, lambda: clock, ghosts=capacity_bytes // OBJECT_BYTES,
        window_seconds=_FOREVER, points_max=points_max, requests_min=requests_min,
    )  # fmt: skip
    sizes = Sizes(BLOCK_TOKENS, OBJECT_BYTES, STATE_BLOCKS * OBJECT_BYTES if geometry.states else 0)
    for request in requests:
        clock = request.at_seconds
        keys = b"".join(
            blake2b(block.to_bytes(8, "little"), digest_size=16).digest() for block in geometry.path(request)
        )
        sketch.asked(0, sizes, keys, len(request.blocks) * BLOCK_TOKENS, 0)
        while not sketch.idle:
            sketch.work(1.0)
    return sketch.status(), time.process_time() - began


def _expected(found: WhatIfStatus, factor: float) -> float | None:
    return next((point.hit_ratio for point in found.points if point.factor == factor), None)


def _rate(found: WhatIfStatus, factor: float) -> float:
    return next(point.sample_ratio for point in found.points if point.factor == factor)


def replayed_rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the difference to a full replay, for each family, geometry and capacity."""
    for seed, family, geometry in _cells(options):
        requests = requests_of(family, seed, options.requests)
        for fraction in options.fractions:
            capacity_bytes = max(int(fraction * geometry.unique_bytes(requests)), OBJECT_BYTES)
            found, seconds = curve(requests, geometry, capacity_bytes, points_max=options.points)
            lru, _ = curve(requests, geometry, capacity_bytes, policy="lru", points_max=options.points)
            full = hit_rate(requests, geometry, DEFAULT_POLICY, fraction)
            yield _row(family, seed, geometry, fraction, full, _expected(found, 1.0)) | {
                "lru": _rounded(_expected(lru, 1.0)), "rate": _rate(found, 1.0), "seconds": round(seconds, 1),
            }  # fmt: skip


def unsampled_rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the difference to a sketch that samples everything, for each family, geometry and factor."""
    for seed, family, geometry in _cells(options):
        requests = requests_of(family, seed, options.requests)
        for fraction in options.fractions:
            capacity_bytes = int(fraction * geometry.unique_bytes(requests))
            found, seconds = curve(requests, geometry, capacity_bytes, points_max=options.points)
            everything, _ = curve(requests, geometry, capacity_bytes, points_max=_ALL_POINTS)
            for factor in FACTORS:
                whole = _expected(everything, factor)
                assert whole is not None, "there are enough requests"
                yield _row(family, seed, geometry, fraction * factor, whole, _expected(found, factor)) | {
                    "rate": _rate(found, factor), "seconds": round(seconds, 1),
                }  # fmt: skip


def _cells(options: argparse.Namespace) -> Iterator[tuple[int, str, Geometry]]:
    for seed in options.seeds:
        for family in options.families:
            for geometry in _COMPARED:
                yield seed, family, geometry


def _row(
    family: str, seed: int, geometry: Geometry, fraction: float, full: float, expected: float | None
) -> dict[str, object]:  # fmt: skip
    difference = None if expected is None else round(expected - full, 4)
    return {"family": family, "seed": seed, "geometry": geometry.name, "fraction": round(fraction, 4),
            "full": round(full, 4), "expected": _rounded(expected), "difference": difference}  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = family_parser(__doc__, family_names(), FRACTIONS)
    parser.add_argument("--points", type=int, default=POINTS_MAX, help="in each cache")
    parser.add_argument("--unsampled", action="store_true", help="compare with a sketch that samples everything")
    options = parser.parse_args(arguments)
    rows = printed((unsampled_rows if options.unsampled else replayed_rows)(options))
    differences = [abs(row["difference"]) for row in rows if isinstance(row["difference"], float)]
    missed = sum(one > AIM for one in differences)
    print(f"largest difference {max(differences, default=0.0):.4f}; above {AIM}: {missed} of {len(rows)}")
    if options.json:
        write_record(options.json, "what_if", {"rows": rows})


if __name__ == "__main__":
    main()
