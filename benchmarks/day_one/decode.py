"""Step 8: how much longer an engine's steps take while copies run at full rate, and how long a prompt's load takes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import torch
from kvdepot.client.arena_map import ArenaMap

from benchmarks.background import in_background
from benchmarks.copy_ratio import make_arena
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.rank import OBJECT_BYTES, MappedArena, Rank
from benchmarks.day_one.steps import Context, WrongByteError
from benchmarks.report import median

AIM = 1.02
_OBJECTS, _BURST_OBJECTS = 16, 8
_LAYERS = 16


def step_time(context: Context) -> None:
    """Measure steps alone and beside stores and loads, in alternating rounds; then single loads."""
    machine = context.machine
    arena = make_arena(_OBJECTS * OBJECT_BYTES)
    rank = Rank(machine, MappedArena(arena), _OBJECTS)
    try:
        rank.fill()
        machine.synchronize()
        _copy(rank, arena, range(_OBJECTS), load=False)
        step = decode_step(machine, 128 if machine.stands_in else 4096, large=True)
        rounds, steps = (2, 3) if machine.stands_in else (6, 200)
        pairs = [(_steps(step, steps), _beside(rank, arena, lambda: _steps(step, steps))) for _ in range(rounds)]
        context.figure("step", median([alone for alone, _ in pairs]) * 1e3, "ms")
        context.figure("step beside copies", median([beside for _, beside in pairs]) * 1e3, "ms")
        ratio = median([beside / alone for alone, beside in pairs])
        context.figure("step time ratio", ratio, "", at_most=AIM)
        bursts = [_burst(rank, arena) for _ in range(1 if machine.stands_in else 10)]
        context.figure(f"load of {_BURST_OBJECTS * OBJECT_BYTES >> 20} MiB", median(bursts) * 1e3, "ms")
        _copy(rank, arena, range(_OBJECTS), load=True)
        if wrong := rank.wrong_objects(range(_OBJECTS)):
            raise WrongByteError(f"objects {wrong} were not loaded as they were stored")
    finally:
        rank.close()


def decode_step(machine: Machine, size: int, *, large: bool) -> Callable[[], None]:
    """Return a step: a graph of small multiplications, a large one if asked for, and the wait for a token."""
    dtype = torch.float32 if machine.stands_in else torch.bfloat16
    weights = torch.full((size, size), 1 / size, dtype=dtype, device=machine.device)
    token, product = torch.ones((16, size), dtype=dtype, device=machine.device), torch.empty_like(weights)
    token_out = torch.empty_like(token)
    machine.synchronize()

    def layers() -> None:
        found = token
        for _ in range(_LAYERS):
            found = found @ weights
        token_out.copy_(found)

    replay = machine.graph(layers)

    def step() -> None:
        replay()
        if large:
            machine.on_engine(lambda: torch.matmul(weights, weights, out=product))
        machine.wait()
        float(token_out[0, 0])

    step()
    return step


def _steps(step: Callable[[], None], count: int) -> float:
    """Seconds of a step, the median."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return median(took)


def _beside(rank: Rank, arena: ArenaMap, work: Callable[[], float]) -> float:
    """Do `work` while another thread keeps the copying thread busy with stores and loads."""
    problems: list[Exception] = []

    def copy(over: threading.Event) -> None:
        try:
            for number in itertools.count():
                _copy(rank, arena, range(_OBJECTS), load=number % 2 == 0)
                if over.is_set():
                    break
        except RuntimeError as error:
            problems.append(error)

    with in_background(copy):
        seconds = work()
    if problems:
        raise problems[0]
    return seconds


def _burst(rank: Rank, arena: ArenaMap) -> float:
    """Seconds from the submission of a prompt's load to its report."""
    began = time.perf_counter()
    _copy(rank, arena, range(_BURST_OBJECTS), load=True)
    return time.perf_counter() - began


def _copy(rank: Rank, arena: ArenaMap, objects: range, *, load: bool) -> None:
    """Load or store these objects, and wait for the report."""
    if load:
        rank.thread.submit([rank.load(objects, arena)], [])
    else:
        rank.thread.submit([], [rank.store(objects, arena)])
    if [outcome.failed for outcome in rank.done(1)] != [frozenset()]:
        raise RuntimeError("a copy failed, or took too long")
