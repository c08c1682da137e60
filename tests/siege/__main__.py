"""`python -m tests.siege [--seconds N] [--seed S] [--tenants]`: hostile users at a daemon, next to an honest engine.

Needs root. Prints how long the honest engine waited before and during the attacks, and what the attackers' calls were
answered. Exits with 1 for a wrong byte, a failure, an internal error, a daemon that ended, or one that grew.
docs/security.md.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys

from tests.siege.siege import Siege


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.siege", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of all three parts together")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--tenants", action="store_true", help="the users are tenants with data of their own")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemon goes first
    print(f"siege: seed {seed}, {options.seconds:.0f} s", flush=True)
    print(f"{'':<24}{'prompts':>8}{'objects':>9}{'p50 ms':>10}{'p99 ms':>10}{'failures':>10}", flush=True)
    siege = Siege(seed, say=lambda line: print(line, flush=True), tenants=options.tenants)
    try:
        outcome = siege.run(options.seconds)
    finally:
        siege.close()
    for name, times in sorted(outcome.calls.items()):
        print(f"{name:<60}{times:>9}")
    for sample in outcome.samples:
        print(sample)
    print("\n".join(outcome.findings) or f"{outcome.calls.total()} hostile calls: nothing was found")
    return int(bool(outcome.findings))


if __name__ == "__main__":
    sys.exit(main())
