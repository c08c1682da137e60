"""A wall clock stepped apart from the machine's: `python -m tests.chaos.stepped_clock FILE SECONDS MODULE ARGUMENTS`.

Runs MODULE with `time.time` ahead by what FILE says, live. Of this process alone: its children, and what the kernel
stamps, keep the machine's clock. And with nodes of shared directories that are taken for gone as much sooner as a run's
machines are rebooted more often than any: after twice SECONDS, not ten minutes.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

ALLOWED_SECONDS: Final = 10.0
"""Longer than a fault holds anybody up. A janitor has to see the silence itself, and rarely lives for a minute here.

All daemons of a run have to have the same, so a busy machine makes it longer once, when the run begins.
"""
_SECONDS: Final = struct.Struct("<d")


class WallClock:
    """The harness's hand on it. The file is kept over restarts, as a machine's clock is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step_to(0.0)

    def step_to(self, ahead_seconds: float) -> None:
        """Ahead of the machine's, from now on."""
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(_SECONDS.pack(ahead_seconds))


def stepped(path: Path, clock: Callable[[], float] = time.time) -> Callable[[], float]:
    """`clock`, ahead by what the file says at each call."""
    with path.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), _SECONDS.size, prot=mmap.PROT_READ)
    return lambda: clock() + float(_SECONDS.unpack_from(ahead)[0])


if __name__ == "__main__":
    time.time = stepped(Path(sys.argv[1]))  # before anything binds it
    from kvdepot.server.tiers.shared import factory

    vars(factory)["CoordinatorSettings"] = partial(
        vars(factory)["CoordinatorSettings"], allowed_seconds=float(sys.argv[2])
    )
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
