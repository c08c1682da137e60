"""`python -m tests.peer_faults [--faults N] [--seed S] [--seconds N] [--lane L] [--listed] [--disk] [--json FILE]`.

Exits with 1 at the first promise that does not hold. docs/testing.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

from tests.peer_faults.runner import Outcome, Run
from tests.rigs.network import why_no_network


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peer_faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--seed", type=int, help="of the plan of faults, and of their points in time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was counted")
    parser.add_argument("--lane", choices=("stream", "nixl"), default="stream", help="what objects come over")
    parser.add_argument("--listed", action="store_true", help="one tier has both sources, which have the same objects")
    parser.add_argument("--disk", action="store_true", help="the sources have all on their disks alone, which fail too")
    parser.add_argument("--plant", action="store_true", help="write a late byte: the run must fail")
    options = parser.parse_args()
    if reason := why_no_network():
        print(reason)
        return 2
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"peer faults: seed {seed}, {options.faults} faults, over {options.lane}", flush=True)
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="kvd") as folder:
        run = Run(
            Path(folder),
            seed,
            plant=options.plant,
            nixl=options.lane == "nixl",
            listed=options.listed,
            disk=options.disk,
            say=lambda line: print(line, flush=True),
        )
        try:
            outcome = run.run(options.faults, options.seconds)
            print(table(outcome))
            if outcome.finding:
                for daemon in run.world.fleet.daemons:
                    print(f"\na daemon's log ends:\n{daemon.log[-3000:]}")
                print(f"\nVIOLATED, seed {seed}:\n{outcome.finding}")
        finally:
            run.close()
    if options.json is not None:
        options.json.write_text(json.dumps(outcome.record(), indent=2) + "\n")
    return 1 if outcome.finding else 0


def _end(number: int, _: object) -> None:
    """As an interrupt does: whatever was started goes first. Once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def table(outcome: Outcome) -> str:
    """Return what a run has come to, for people."""
    rows = [("fault", "times"), *sorted((name, str(count)) for name, count in outcome.faults.items())]
    rows += [("all faults", str(outcome.faults.total())), ("within a request", str(outcome.under_way))]
    rows += [("", ""), ("requests with a fault", "times")]
    rows += sorted((name, str(count)) for name, count in outcome.requests.items())
    rows += [("", ""), ("requests without a fault", "times")]
    rows += sorted((name, str(count)) for name, count in outcome.quiet.items())
    rows += [
        ("", ""),
        ("bytes written late", str(outcome.late_bytes)),
        ("pieces of 64 KiB compared", str(outcome.compared_pieces)),
        ("own objects compared", str(outcome.own_objects)),
        ("objects read from disks", str(outcome.disk_reads)),
        ("requests beyond the limit", str(outcome.over)),
        ("longest request, s", f"{outcome.request_seconds_max:.2f}"),
    ]
    for kind, times in outcome.acquires.items():
        rows.append((f"RAM acquires, {kind}", str(times)))
        rows.append(("  p50 / p99, ms", f"{_of(outcome.acquire_p50_ms, kind)} / {_of(outcome.acquire_p99_ms, kind)}"))
    rows.append(("p99 with by without faults", f"{outcome.acquire_p99_ratio:.2f}"))
    rows += [(f"packets {name}", str(count)) for name, count in sorted(outcome.packets.items())]
    rows.append(("load of the machine", f"{outcome.load:.1f}"))
    rows.append(("seconds", f"{outcome.seconds:.0f}"))
    return "\n".join(f"{name:<32}{value:>16}".rstrip() for name, value in rows)


def _of(figures: dict[str, float], kind: str) -> str:
    return f"{figures[kind]:.2f}" if kind in figures else "-"


if __name__ == "__main__":
    sys.exit(main())
