"""`python -m tests.chaos [--seconds N] [--faults N] [--seed S] [--json FILE]`: engines and a daemon under random
faults.

Exits with 1 at the first invariant that does not hold. docs/chaos.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from pathlib import Path

from tests.chaos.harness import Harness, Outcome
from tests.chaos.models import FLEETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="and until there were so many")
    parser.add_argument("--seed", type=int, help="of the plan of faults and of the engines' choices")
    parser.add_argument(
        "--nodes", type=int, choices=sorted(FLEETS), default=1, help="2: daemons that share a directory"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was counted, and the event log")
    parser.add_argument("--plant", action="store_true", help="have engines store wrong bytes: the run must fail")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"chaos: seed {seed}, {options.seconds:.0f} s", flush=True)
    signal.signal(signal.SIGTERM, _end)
    harness = Harness(seed, nodes=options.nodes, plant=options.plant, say=lambda line: print(line, flush=True))
    try:
        outcome = harness.run(options.seconds, faults_min=options.faults)
        print(table(outcome))
        if outcome.finding:
            for log in harness.logs:
                print(f"\na daemon's log ends:\n{log[-4000:]}")
            print(f"\nVIOLATED, seed {seed}:\n{outcome.finding}")  # last: what shows a part of this shows its end
    finally:
        harness.close()
    if options.json is not None:
        options.json.write_text(json.dumps(outcome.record(), indent=2) + "\n")
    return 1 if outcome.finding else 0


def _end(number: int, _: object) -> None:
    """As an interrupt does: whatever was started and mounted goes first. Once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def table(outcome: Outcome) -> str:
    counts = outcome.counts
    rows = [("fault", "times"), *sorted((name, str(count)) for name, count in outcome.faults.items())]
    mib = 1 << 20
    rows += [
        ("", ""),
        ("requests", str(counts["requests"])),
        ("hits", str(counts["hits"])),
        ("objects stored", str(counts["commit_committed"])),
        ("objects checked", str(counts["checked_objects"])),
        ("MiB checked", str(counts["checked_bytes"] // mib)),
        ("objects read from the disk", f"{outcome.daemon['promoted_objects']:.0f}"),
        ("damaged objects it found", f"{_family(outcome, 'tier_damaged_objects'):.0f}"),
        ("looks at the quiet depot", str(outcome.quiet_looks)),
        ("MiB on the medium, at most", f"{outcome.medium_bytes_max / mib:.1f}"),
        ("MiB of memory, at most", f"{outcome.memory_bytes_max / mib:.1f}"),
        ("seconds", f"{outcome.seconds:.0f}"),
    ]
    lines = [f"{name:<32}{value:>8}" for name, value in rows]
    return "\n".join([*lines, *(f"left out: {what}" for what in outcome.left_out)])


def _family(outcome: Outcome, name: str) -> float:
    """A counter's sum over its labels."""
    return sum(count for key, count in outcome.daemon.items() if key.partition(".")[0] == name)


if __name__ == "__main__":
    sys.exit(main())
