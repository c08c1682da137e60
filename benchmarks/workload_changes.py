"""What a change of the workload, and a scan, cost each eviction policy.

    python -m benchmarks.workload_changes change [--pairs chat:tenants ...] [--seeds 1] [--requests 600]
    python -m benchmarks.workload_changes scan [--families chat ...] [--seeds 1] [--requests 600]
                                          both: [--fractions 0.1 0.2] [--json PATH]

`change`: the requests of one family, then as many of another. Rates are those of the second family alone, and of its
first quarter. A capacity is a fraction of what all distinct objects of the second family take. `over_best`: the default
policy over the better of the others.

`scan`: the requests of a family, and in their middle one-shot prompts with ten times the capacity, which come for as
long as a quarter of the requests. `cost` is the share of the family's hits that the scan costs. A capacity is a
fraction of what all distinct objects of the family take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from random import Random

from kvdepot.core.eviction import policy_names

from benchmarks.policy import GEOMETRIES, OBJECT_BYTES, Geometry, Request, hits_of
from benchmarks.report import write_record
from benchmarks.workload_policies import family_parser, over_best, printed, request_of, requests_of
from benchmarks.workloads.families import batch_jobs, family_names
from benchmarks.workloads.trace import Blocks

PAIRS = (
    ("chat", "tenants"),
    ("tenants", "chat"),
    ("retrieval", "agents"),
    ("agents", "retrieval"),
    ("scans", "tenants"),
)
SCANNED = ("agents", "chat", "retrieval", "tenants")
SCAN_CAPACITIES = 10
Marked = list[tuple[bool, Request]]
"""Requests, with whether each is one of those that are counted."""


def changed(pair: tuple[str, str], seed: int, requests: int) -> Marked:
    """Return the requests of two families, one after the other. Those of the second one count."""
    blocks = Blocks()
    before = requests_of(pair[0], seed, requests, blocks)
    after = requests_of(pair[1], seed, requests, blocks, before[-1].at_seconds)
    return [(False, request) for request in before] + [(True, request) for request in after]


def scanned(family: Sequence[Request], geometry: Geometry, capacity_bytes: int, seed: int) -> Marked:
    """Return the requests of a family with a scan in their middle. Those of the family count."""
    blocks, first = Blocks(), 1 + max(block for request in family for block in request.blocks)
    scan: list[Request] = []
    size_bytes = 0
    for prompt in batch_jobs(Random(f"scan {seed}")):
        if size_bytes >= SCAN_CAPACITIES * capacity_bytes:
            break
        one = request_of(prompt, blocks, prompt.at_seconds)
        scan.append(Request(one.at_seconds, tuple(first + block for block in one.blocks), one.whole_blocks))
        size_bytes += geometry.unique_bytes(scan[-1:])
    begin = family[3 * len(family) // 8].at_seconds
    gap = (family[5 * len(family) // 8].at_seconds - begin) / len(scan)
    timed = [Request(begin + at * gap, one.blocks, one.whole_blocks) for at, one in enumerate(scan)]
    marked = [(True, request) for request in family] + [(False, request) for request in timed]
    return sorted(marked, key=lambda one: one[1].at_seconds)


def counted(marked: Marked, geometry: Geometry, policy: str, capacity_bytes: int) -> list[tuple[int, int]]:
    """Return the hits and the blocks of each request that counts."""
    hits = hits_of([request for _, request in marked], geometry, policy, capacity_bytes)
    return [(hit, len(request.blocks)) for hit, (counts, request) in zip(hits, marked, strict=True) if counts]


def rate(found: Sequence[tuple[int, int]]) -> float:
    return round(sum(hit for hit, _ in found) / sum(blocks for _, blocks in found), 4)


def change_rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for seed in options.seeds:
        for pair in options.pairs:
            marked = changed(pair, seed, options.requests)
            for geometry in GEOMETRIES:
                size_bytes = geometry.unique_bytes([request for counts, request in marked if counts])
                for fraction in options.fractions:
                    capacity_bytes = max(int(fraction * size_bytes), OBJECT_BYTES)
                    found = {name: counted(marked, geometry, name, capacity_bytes) for name in policy_names()}
                    rates = {name: rate(one) for name, one in found.items()}
                    early = {name: rate(one[: len(one) // 4]) for name, one in found.items()}
                    yield {"families": "->".join(pair), "seed": seed, "geometry": geometry.name, "fraction": fraction,
                           **rates, "over_best": over_best(rates), "early_over_best": over_best(early)}  # fmt: skip


def scan_rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for seed in options.seeds:
        for name in options.families:
            family = requests_of(name, seed, options.requests)
            for geometry in GEOMETRIES:
                for fraction in options.fractions:
                    capacity_bytes = max(int(fraction * geometry.unique_bytes(family)), OBJECT_BYTES)
                    marked = scanned(family, geometry, capacity_bytes, seed)
                    row: dict[str, object] = {
                        "family": name, "seed": seed, "geometry": geometry.name, "fraction": fraction,
                        "scan_requests": len(marked) - len(family),
                    }  # fmt: skip
                    for policy in policy_names():
                        without = rate(counted([(True, one) for one in family], geometry, policy, capacity_bytes))
                        beside = rate(counted(marked, geometry, policy, capacity_bytes))
                        row |= {policy: without, f"{policy}_cost": round(1 - beside / without, 3) if without else 0.0}
                    yield row


def _pair(text: str) -> tuple[str, str]:
    before, _, after = text.partition(":")
    if not {before, after} <= set(family_names()):
        raise argparse.ArgumentTypeError(f"expected two of {', '.join(family_names())} with a colon, got {text!r}")
    return before, after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = family_parser(__doc__, SCANNED, [0.1, 0.2])
    parser.add_argument("measured", choices=("change", "scan"))
    parser.add_argument("--pairs", type=_pair, nargs="+", default=PAIRS)
    options = parser.parse_args(arguments)
    rows = printed((change_rows if options.measured == "change" else scan_rows)(options))
    if options.json:
        write_record(options.json, f"workload_changes {options.measured}", {"rows": rows})


if __name__ == "__main__":
    main()
