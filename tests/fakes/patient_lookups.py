"""Lookups that wait long for the scout and for guests: `python -m tests.fakes.patient_lookups MODULE ARGUMENTS`.

Runs MODULE in this process. On a busy machine the usual waits may be over before a process gets its turn.
"""

from __future__ import annotations

import runpy
import sys
from typing import Final

from kvdepot.server.tiers.peer import group, scout

WAIT_SECONDS: Final = 30.0


if __name__ == "__main__":
    scout.FIND_SECONDS = group.GUEST_SECONDS = WAIT_SECONDS  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
