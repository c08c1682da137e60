"""Token hit rates of the eviction policies on the workload families (benchmarks/workloads), beside each other.

    python -m benchmarks.workload_policies [--families chat ...] [--seeds 1 2] [--requests 600]
                                           [--fractions 0.02 0.05 0.1 0.2 0.5] [--json PATH]

One row for each seed, family, geometry and capacity: the rates of all policies and of `belady` (benchmarks.policy says
what these mean), and the default policy's rate over the better of `lru` and `gdsf`. It uses one processor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdepot.core.eviction import DEFAULT_POLICY, policy_names

from benchmarks.policy import BELADY, GEOMETRIES, Request, hit_rate
from benchmarks.report import machine, now
from benchmarks.workloads.families import family_names, prompts_of
from benchmarks.workloads.trace import BLOCK_TOKENS, Blocks

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.5)


def requests_of(family: str, seed: int, requests: int) -> list[Request]:
    """Return what `benchmarks.policy.read_trace` reads from the family's lines."""
    blocks = Blocks()
    return [
        Request(prompt.at_seconds, tuple(blocks.of(prompt.segments)), prompt.tokens // BLOCK_TOKENS)
        for prompt in prompts_of(family, seed, requests)
    ]


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for seed in options.seeds:
        for family in options.families:
            requests = requests_of(family, seed, options.requests)
            for geometry in GEOMETRIES:
                for fraction in options.fractions:
                    names = (*policy_names(), BELADY)
                    rates = {name: round(hit_rate(requests, geometry, name, fraction), 4) for name in names}
                    best = max(rates["lru"], rates["gdsf"])
                    ratio = round(rates[DEFAULT_POLICY] / best, 3) if best else 1.0
                    yield {"family": family, "seed": seed, "geometry": geometry.name, "fraction": fraction,
                           "default": DEFAULT_POLICY, **rates, "default_over_best": ratio}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", choices=family_names(), nargs="+", default=family_names())
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    rows = []
    for row in rows_of(options):
        rows.append(row)
        rates = "  ".join(f"{name} {row[name]:.4f}" for name in (*policy_names(), BELADY))
        print(
            f"{row['family']:<10} {row['seed']:>3} {row['geometry']:<12} {row['fraction']:>4.0%}  {rates}"
            f"  {row['default']}/best {row['default_over_best']:.3f}",
            flush=True,
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": "workload_policies", "rows": rows, "machine": machine(),
                  "date": now()}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
