"""Waits of a peer tier that suit tests: `python -m tests.fakes.peer_waits MODULE ARGUMENTS` runs MODULE with them.

Lookups wait long for the scout and for guests: on a busy machine the usual waits may be over before a process gets its
turn. NIXL is tried again soon after a read that hung, so that a run with many faults stays a run over NIXL.
"""

from __future__ import annotations

import runpy
import sys
from typing import Final

from kvdepot.server.tiers.peer import group, scout, source

LOOKUP_SECONDS: Final = 30.0
NIXL_SECONDS: Final = 0.5


if __name__ == "__main__":
    scout.FIND_SECONDS = group.GUEST_SECONDS = LOOKUP_SECONDS  # type: ignore[misc]
    source.NIXL_SECONDS_MIN = source.NIXL_SECONDS_MAX = NIXL_SECONDS  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
