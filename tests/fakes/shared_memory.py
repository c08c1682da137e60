"""Another /dev/shm for the default arena: `python -m tests.fakes.shared_memory DIRECTORY MODULE ARGUMENTS`.

Runs MODULE in this process with DIRECTORY in its place, so that tests meet neither each other nor daemons of this user.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from kvdepot.server.config import arena_directory

if __name__ == "__main__":
    vars(arena_directory)["BASE"] = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
