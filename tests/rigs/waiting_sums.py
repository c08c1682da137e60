"""A daemon whose checksum workers stop themselves before they begin, until a test continues them (SIGCONT).

`python -m tests.rigs.waiting_sums MODULE ARGUMENTS` is the daemon; with `pack_parts` first it is such a worker.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from kvdepot.server.daemon import checksums

MODULE = "tests.rigs.waiting_sums"
_WORKER = "kvdepot.server.io.checksum_worker"


if __name__ == "__main__":
    if ":" in sys.argv[1]:
        os.kill(os.getpid(), signal.SIGSTOP)
        runpy.run_module(_WORKER, run_name="__main__", alter_sys=True)
    else:
        checksums._MODULE = MODULE
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # workers import nothing from the current directory
        checksums.ANSWER_SECONDS_MAX = 3600.0  # a test may take its time
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
