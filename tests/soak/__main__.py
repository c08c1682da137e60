"""`python -m tests.soak [--seconds N] [--seed S]`: real engines on one daemon, disturbed at random.

Exits with 1 at the first request, token, byte, lease or MiB that is not as it must be. docs/soak.md.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from demo.daemon import DaemonProcessError
from demo.engine import EngineProcessError
from tests.soak.engines import SOAKED, soak_fleet
from tests.soak.soak import Soak, Violation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of load, after the engines' start")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="and until so many have been judged")
    parser.add_argument("--seed", type=int, help="of prompts, faults and their order")
    parser.add_argument("--engines", nargs="+", choices=SOAKED, default=list(SOAKED), metavar="NAME")
    parser.add_argument("--plant", action="store_true", help="change bytes in the daemon's memory: the run must fail")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"soak: seed {seed}, {options.seconds:.0f} s", flush=True)
    signal.signal(signal.SIGTERM, _end)
    directory = Path(tempfile.mkdtemp(prefix="kvdepot-soak-"))
    with soak_fleet(directory) as fleet:
        soak = Soak(fleet, seed, engines=options.engines, plant=options.plant, say=lambda line: print(line, flush=True))
        try:
            soak.prepare()
            soak.run(options.seconds, requests_min=options.requests)
        except (Violation, EngineProcessError, DaemonProcessError) as error:
            print(f"\nVIOLATED, seed {seed}: {error}\nlogs and audits: {directory}")
            return 1
        finally:
            soak.close()
            print("\n".join(soak.outcome.lines()), flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _end(number: int, _: object) -> None:
    """As an interrupt does: whatever was started goes first. Once."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
