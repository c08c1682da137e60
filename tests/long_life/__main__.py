"""`python -m tests.long_life [--seconds N] [--engines N]`: one process makes and drops engines; a table of samples.

Exits with 1 when descriptors, threads, sessions, slots or memory of the daemon or of this process were not flat.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.long_life.life import LongLife, trouble


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long_life", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--engines", type=int, default=1 << 40, metavar="N", help="or until so many were made")
    parser.add_argument("--samples", type=int, default=24, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemon goes first
    with LongLife(options.seed, say=lambda line: print(line, flush=True)) as life:
        samples = life.run(engines=options.engines, seconds=options.seconds, samples=options.samples)
    found = trouble(samples)
    print(f"{life.engines} engines:", "flat" if not found else f"NOT FLAT: {'; '.join(found)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
