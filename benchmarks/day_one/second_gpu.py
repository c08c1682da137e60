"""Copies on the second GPU must make no context on the first one, which would take half a GiB there.

A part of step 5. As a program this is the process that copies.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one import child
from benchmarks.day_one.machine import machine_of
from benchmarks.day_one.rank import OBJECT_BYTES, MappedArena, Rank
from benchmarks.day_one.steps import Context


def second_gpu(context: Context) -> None:
    """Copy on the second GPU, and report whether there is a context on the first one."""
    if context.machine.stands_in or torch.cuda.device_count() < 2:
        context.note("a second GPU, not run", "there is none")
        return
    said = child.answer(context, "second_gpu")
    if said is None:
        raise RuntimeError("the process on the second GPU ended without an answer")
    context.figure("contexts on another GPU", float(said["active"]), "", at_most=0.0)


def has_context(number: int) -> bool:
    """Return whether this process has a primary context on a device. Asking makes none."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active))
    if error:
        raise RuntimeError(f"cuDevicePrimaryCtxGetState: error {error}")
    return bool(active.value)


def main() -> None:
    machine = machine_of(stand_in="--stand-in" in sys.argv, number=1)
    arena = make_arena(2 * OBJECT_BYTES)
    rank = Rank(machine, MappedArena(arena), 2)
    rank.fill()
    rank.thread.submit([], [rank.store([0, 1], arena)])
    rank.done(1)
    rank.thread.submit([rank.load([0, 1], arena)], [])
    rank.done(1)
    child.say(active=has_context(0))
    rank.close()


if __name__ == "__main__":
    main()
