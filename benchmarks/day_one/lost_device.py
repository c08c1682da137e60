"""A rank whose device fails while a store waits for it: prints what is reported of the store, which is nothing."""

from __future__ import annotations

import os
import sys

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one.child import say
from benchmarks.day_one.machine import machine_of
from benchmarks.day_one.rank import OBJECT_BYTES, MappedArena, Rank
from benchmarks.day_one.thread import fail_device

_LOOK_SECONDS = 3.0


def main() -> None:
    machine = machine_of(stand_in="--stand-in" in sys.argv)
    arena = make_arena(2 * OBJECT_BYTES)
    rank = Rank(machine, MappedArena(arena), 2)
    rank.fill()
    machine.synchronize()
    fail_device(machine)
    rank.thread.submit([], [rank.store([0, 1], arena)])
    outcomes = rank.done(1, _LOOK_SECONDS)
    say(outcomes=[str(one)[:200] for one in outcomes], error=", ".join(rank.failures.counts))
    sys.stderr.flush()
    os._exit(0)  # what a broken device does at the end of a process is not of interest


if __name__ == "__main__":
    main()
