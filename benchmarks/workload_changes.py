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
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from kvdepot.core.eviction import DEFAULT_POLICY, policy_names

from benchmarks.policy import GEOMETRIES, OBJECT_BYTES, Geometry, Request, hits_of
from benchmarks.report import machine, now
from benchmarks.workloads.families import batch_jobs, family_names, prompts_of
from benchmarks.workloads.trace import BLOCK_TOKENS, Blocks, Prompt

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


def request_of(prompt: Prompt, blocks: Blocks, at_seconds: float) -> Request:
    return Request(at_seconds, tuple(blocks.of(prompt.segments)), prompt.tokens // BLOCK_TOKENS)


def family_of(name: str, seed: int, requests: int, blocks: Blocks, start: float = 0.0) -> list[Request]:
    return [request_of(prompt, blocks, start + prompt.at_seconds) for prompt in prompts_of(name, seed, requests)]


def changed(pair: tuple[str, str], seed: int, requests: int) -> Marked:
    """Return the requests of two families, one after the other. Those of the second one count."""
    blocks = Blocks()
    before = family_of(pair[0], seed, requests, blocks)
    after = family_of(pair[1], seed, requests, blocks, before[-1].at_seconds)
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


def over_best(rates: dict[str, float]) -> float:
    best = max(value for name, value in rates.items() if name != DEFAULT_POLICY)
    return round(rates[DEFAULT_POLICY] / best, 3) if best else 1.0


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
            family = family_of(name, seed, options.requests, Blocks())
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", choices=("change", "scan"))
    parser.add_argument("--pairs", type=_pair, nargs="+", default=PAIRS)
    parser.add_argument("--families", choices=family_names(), nargs="+", default=SCANNED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    rows = []
    for row in (change_rows if options.measured == "change" else scan_rows)(options):
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": f"workload_changes {options.measured}",
            "rows": rows,
            "machine": machine(),
            "date": now(),
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
