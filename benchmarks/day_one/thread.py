"""Step 4: the product's copying thread, by which a rank does all its copies."""

from __future__ import annotations

import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.vllm.base.operations import LoadOp

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one import child
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.rank import OBJECT_BYTES, MappedArena, Rank
from benchmarks.day_one.steps import Context, WrongByteError

OBJECTS = 18
"""72 MiB: three batches, of which two are on their way at once."""
_LATE_SECONDS = 0.1


def copying_thread(context: Context) -> None:
    """Run every case, and the lost device in a process of its own."""
    arena = make_arena(OBJECTS * OBJECT_BYTES)
    cases = (store_and_load, cancel, miss_a_deadline, load_before_stores)
    rank = Rank(context.machine, MappedArena(arena), OBJECTS, read_back=len(cases))
    try:
        for done, case in enumerate(cases):
            context.case(done, len(cases) + 1)
            case(rank, arena)
        if rank.failures.counts:
            raise WrongByteError(f"the copying thread caught {dict(rank.failures.counts)}")
    finally:
        rank.close()
    lose_the_device(context)
    context.figure("cases", len(cases) + 1, "")


def store_and_load(rank: Rank, arena: ArenaMap) -> None:
    """Several batches each way; the load is read back by the product too."""
    everything = range(OBJECTS)
    rank.fill()
    rank.thread.submit([], [rank.store(everything, arena)])
    stored = rank.done(1)
    rank.thread.submit([rank.load(everything, arena)], [])
    loaded = rank.done(1)
    if [one.failed for one in (*stored, *loaded)] != [frozenset()] * 2:
        raise WrongByteError(f"a store or a load failed: {[*stored, *loaded]}"[:300])
    if wrong := rank.wrong_objects(everything):
        raise WrongByteError(f"objects {wrong} were not loaded as they were stored")
    if loaded[0].verified is not True:
        raise WrongByteError("a load was not read back as it should have been")


def cancel(rank: Rank, arena: ArenaMap) -> None:
    """A cancelled load fails, and writes nothing after it was reported."""
    rank.fill()
    rank.machine.delay(_LATE_SECONDS)
    load = rank.load(range(OBJECTS), arena)
    rank.thread.submit([load], [], [load.op_id])
    _must_fail(rank, "a cancelled load")


def miss_a_deadline(rank: Rank, arena: ArenaMap) -> None:
    """So does one whose deadline is over."""
    rank.fill()
    rank.machine.delay(_LATE_SECONDS)
    rank.thread.submit([rank.load(range(OBJECTS), arena, seconds=-1.0)], [])
    _must_fail(rank, "a load after its deadline")


def _must_fail(rank: Rank, what: str) -> None:
    outcomes = rank.done(1)
    if len(outcomes) != 1 or outcomes[0].failed != frozenset(range(OBJECTS)):
        raise WrongByteError(f"{what} was reported as {outcomes}"[:300])
    if not rank.untouched(range(OBJECTS)):
        raise WrongByteError(f"{what} wrote into the engine's blocks")


def load_before_stores(rank: Rank, arena: ArenaMap) -> None:
    """A load that comes with stores goes first, and one that comes during a store does not wait for its end."""
    rank.fill()
    half = OBJECTS // 2
    rank.thread.submit([], [rank.store(range(OBJECTS), arena)])
    rank.done(1)
    stores = [rank.store([number], arena) for number in range(half, OBJECTS)]
    rank.thread.submit([rank.load(range(half), arena)], stores)
    outcomes = rank.done(1 + len(stores))
    if len(outcomes) != 1 + len(stores) or not isinstance(outcomes[0].op, LoadOp):
        raise WrongByteError("a load waited for the stores that came with it")
    if any(one.failed for one in outcomes):
        raise WrongByteError("a copy failed")
    if wrong := rank.wrong_objects(range(half)):
        raise WrongByteError(f"objects {wrong} were not loaded as they were stored")


def lose_the_device(context: Context) -> None:
    """The stores of a device that fails stay in doubt: nobody is told that their extents are free."""
    said = child.answer(context, "lost_device")
    if said is None:
        raise RuntimeError("the process whose device fails ended without an answer")
    if said["outcomes"]:
        raise WrongByteError(f"a store on a lost device was reported: {said['outcomes']}")
    if not said["error"]:
        raise RuntimeError("the device did not fail, so nothing was tried")
    context.note("a lost device", said["error"])


def fail_device(machine: Machine) -> None:
    """Queue work that the device fails at, late: an index out of bounds, as a broken kernel would have."""
    numbers = torch.zeros(4, device=machine.device)
    places = torch.tensor([1 << 20], device=machine.device)
    machine.synchronize()
    machine.delay(_LATE_SECONDS * 2)
    machine.on_engine(lambda: numbers[places])
