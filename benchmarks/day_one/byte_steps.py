"""Steps 1, 2 and 10: every byte of copies by every way."""

from __future__ import annotations

import random
import sys
from itertools import product

import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one.copies import backward_cut, check_group, check_layers, copier_on, layer_sets
from benchmarks.day_one.golden import Case, case_name, golden_cases, layers_in, storages_of
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.steps import Context, NotRunError, WrongByteError

CUTS = (0, 4096, 1000)
_LAYER_SETS_ARENA_BYTES = 16 << 20
_GOLDEN_ARENA_BYTES = 48 << 20
_STAND_IN_ROUNDS = 20


def ways_of(machine: Machine) -> list[Way]:
    """Return what the device has: the batch call needs CUDA 12.8, the gather Triton."""
    device = machine.copies()
    device.enter()
    try:
        return [way for way in Way if way in device.ways]
    finally:
        device.leave()


def note_ways(context: Context) -> list[Way]:
    """Return the ways, and report those that this machine does not have."""
    ways = ways_of(context.machine)
    for way in set(Way) - set(ways):
        context.note(f"{way}, not run", "this driver or this Python does not have it")
    return ways


def copy_layers(context: Context) -> None:
    """Step 1: layers of every shape, objects in every cut."""
    arena = make_arena(_LAYER_SETS_ARENA_BYTES)
    chance = random.Random(context.seed)
    cases = context.drawn(list(product(note_ways(context), layer_sets(torch.device("cpu")), CUTS)))
    for done, (way, name, cut_bytes) in enumerate(cases):
        context.case(done, len(cases))
        layers = layer_sets(context.machine.device)[name]
        context.machine.synchronize()
        with copier_on(context.machine, layers, arena, way) as copier:
            total = 4 * sum(copier.block_bytes(number) for number in range(len(layers)))
            try:
                check_layers(copier, arena, layers, backward_cut(total, cut_bytes), chance)
            except WrongByteError as error:
                raise WrongByteError(f"{way}, {name}, fragments of {cut_bytes} bytes: {error}") from error
    context.figure("cases", len(cases), "")


def copy_golden(context: Context) -> None:
    """Step 2: vLLM's layouts, objects cut at random, both directions, whole storages compared."""
    arena = make_arena(_GOLDEN_ARENA_BYTES)
    chance = random.Random(context.seed)
    ways, cases = note_ways(context), context.drawn(golden_cases())
    copied = 0
    for done, case in enumerate(cases):
        context.case(done, len(cases))
        copied += _copy_case(context.machine, case, ways, arena, chance)
    context.figure("cases", len(cases) * len(ways), "")
    context.figure("copied", copied / 2**30, "GiB")


def _copy_case(machine: Machine, case: Case, ways: list[Way], arena: ArenaMap, chance: random.Random) -> int:
    """Copy each group of a case by these ways, in turn. Return the bytes of the objects."""
    storages = storages_of(case, machine.device)
    for storage in storages:
        storage.random_()
    expected = [storage.clone() for storage in storages]
    layers, wanted = layers_in(case, storages), layers_in(case, expected)
    machine.synchronize()
    copied = 0
    for way in ways:
        with copier_on(machine, layers.views, arena, way) as copier:
            for group in range(len(case["groups"])):
                try:
                    copied += check_group(copier, arena, layers, group, storages, wanted, expected, chance)
                except WrongByteError as error:
                    raise WrongByteError(f"{way}, {case_name(case)}: {error}") from error
    return copied


def soak(context: Context) -> None:
    """Step 10: vLLM's layouts, ways, groups, fragments and blocks drawn at random, to the end of the time."""
    arena = make_arena(_GOLDEN_ARENA_BYTES)
    chance = random.Random(context.seed)
    ways, cases = note_ways(context), golden_cases()
    copied = rounds = 0
    most = (context.cases or _STAND_IN_ROUNDS) if context.machine.stands_in else sys.maxsize
    while context.left() > 0 and rounds < most:
        rounds += 1
        copied += _copy_case(context.machine, chance.choice(cases), [chance.choice(ways)], arena, chance)
    if not rounds:
        raise NotRunError("there was no time left")
    context.figure("rounds", rounds, "")
    context.figure("copied", copied / 2**30, "GiB")
