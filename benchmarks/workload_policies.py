"""Token hit rates of the eviction policies on the workload families (benchmarks/workloads), beside each other.

    python -m benchmarks.workload_policies [--families chat ...] [--seeds 1 2] [--requests 600]
                                           [--fractions 0.02 0.05 0.1 0.2 0.5] [--json PATH]

One row for each seed, family, geometry and capacity: the rates of all policies and of `belady` (benchmarks.policy says
what these mean), and the default policy's rate over the better of `lru` and `gdsf`. It uses one processor.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kvdepot.core.eviction import DEFAULT_POLICY, policy_names

from benchmarks.policy import BELADY, GEOMETRIES, Request, hit_rate
from benchmarks.report import write_record
from benchmarks.workloads.families import family_names, prompts_of
from benchmarks.workloads.trace import BLOCK_TOKENS, Blocks, Prompt

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.5)
Rows = list[dict[str, object]]


def request_of(prompt: Prompt, blocks: Blocks, at_seconds: float) -> Request:
    return Request(at_seconds, tuple(blocks.of(prompt.segments)), prompt.tokens // BLOCK_TOKENS)


def requests_of(
    family: str, seed: int, requests: int, blocks: Blocks | None = None, start: float = 0.0
) -> list[Request]:  # fmt: skip
    """Return what `benchmarks.policy.read_trace` reads from the family's lines.

    `blocks`: with the blocks of other requests, from which these may have some. `start`: in seconds.
    """
    blocks = blocks or Blocks()
    return [request_of(prompt, blocks, start + prompt.at_seconds) for prompt in prompts_of(family, seed, requests)]


def over_best(rates: Mapping[str, float]) -> float:
    """Return the default policy's rate over the best one of the other policies."""
    best = max(rates[name] for name in policy_names() if name != DEFAULT_POLICY)
    return round(rates[DEFAULT_POLICY] / best, 3) if best else 1.0


def family_parser(description: str | None, families: Sequence[str], fractions: Sequence[float]) -> ArgumentParser:
    """Return the options of a benchmark of workload families, with these defaults."""
    parser = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", choices=family_names(), nargs="+", default=families)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--fractions", type=float, nargs="+", default=fractions)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    return parser


def printed(rows: Iterable[dict[str, object]], line: Callable[[dict[str, object]], str] | None = None) -> Rows:
    """Print each row as soon as it is there, and return all of them. `line`: of a row, else names and values."""
    found = []
    for row in rows:
        found.append(row)
        print(line(row) if line else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return found


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for seed in options.seeds:
        for family in options.families:
            requests = requests_of(family, seed, options.requests)
            for geometry in GEOMETRIES:
                for fraction in options.fractions:
                    names = (*policy_names(), BELADY)
                    rates = {name: round(hit_rate(requests, geometry, name, fraction), 4) for name in names}
                    yield {"family": family, "seed": seed, "geometry": geometry.name, "fraction": fraction,
                           "default": DEFAULT_POLICY, **rates, "default_over_best": over_best(rates)}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = family_parser(__doc__, family_names(), FRACTIONS).parse_args(arguments)
    rows = printed(rows_of(options), _line)
    if options.json:
        write_record(options.json, "workload_policies", {"rows": rows})


def _line(row: dict[str, object]) -> str:
    rates = "  ".join(f"{name} {row[name]:.4f}" for name in (*policy_names(), BELADY))
    return (
        f"{row['family']:<10} {row['seed']:>3} {row['geometry']:<12} {row['fraction']:>4.0%}  {rates}"
        f"  {row['default']}/best {row['default_over_best']:.3f}"
    )


if __name__ == "__main__":
    main()
