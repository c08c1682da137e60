"""The command line: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import benchmarks.workloads
from benchmarks.workloads.families import family_names, prompts_of
from benchmarks.workloads.trace import lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description=benchmarks.workloads.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", choices=family_names())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=600)
    options = parser.parse_args(arguments)
    sys.stdout.writelines(f"{line}\n" for line in lines(prompts_of(options.family, options.seed, options.requests)))


if __name__ == "__main__":
    main()
