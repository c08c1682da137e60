"""Step 7: copies as a share of one pinned copy, by way, size of blocks, layout, direction, and what Python does."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.worker.layers import rank_layers

from benchmarks.background import in_background
from benchmarks.copy_ratio import RatioBench, ratio_bench
from benchmarks.day_one.byte_steps import note_ways
from benchmarks.day_one.steps import Context, WrongByteError
from benchmarks.report import median

BLOCKS_KIB = (64, 16, 2048, 256, 28, 4)
"""The sizes with the aims of most engines first: the time may end before the last one."""
LAYOUTS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3)}
"""Of [blocks, heads, tokens, channels]: the dimension that lies outermost first."""
AIM, SMALL_AIM = 0.9, 0.8
AIM_FROM_KIB = 64
_HEADS, _TOKENS = 8, 16
_BUSY_SHARE, _BUSY_PERIOD_SECONDS = 0.3, 0.01


def ratios(context: Context) -> None:
    """Measure the matrix, as much of it as there is time for. What `auto` takes has the aim, forced ways have none."""
    size_bytes = (16 << 20) if context.machine.stands_in else (512 << 20)
    ways: list[Way | None] = [None, *note_ways(context)]
    sizes = BLOCKS_KIB[:2] if context.machine.stands_in else BLOCKS_KIB
    cases = context.drawn(list(product(sizes, LAYOUTS, ways)))
    for done, (block_kib, layout, way) in enumerate(cases):
        context.case(done, len(cases))
        layers = layers_of(block_kib << 10, layout, size_bytes, context.machine.device)
        context.machine.synchronize()
        name = f"{way or 'auto'} {block_kib} KiB {layout}"
        with ratio_bench(layers, context.machine.copies(), way, size_bytes) as bench:
            bench.copier.prepare(bench.arena)
            _measure(context, bench, name, _aim(block_kib) if way is None else None)
            if wrong := bench.wrong_layers():
                raise WrongByteError(f"{name}: layers {wrong} were not loaded as they were stored")


def _aim(block_kib: int) -> float:
    return AIM if block_kib >= AIM_FROM_KIB else SMALL_AIM


def layers_of(block_bytes: int, layout: str, size_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Return a rank's views of layers in one of vLLM's layouts, twice `size_bytes` in all."""
    channels = block_bytes // 2 // _HEADS // _TOKENS
    count = max(1, min(32, size_bytes // (16 * block_bytes)))
    blocks = max(32, 2 * size_bytes // (count * block_bytes))
    order = LAYOUTS[layout]
    shape = (blocks, _HEADS, _TOKENS, channels)
    caches = {
        f"layer.{number}": torch.zeros([shape[place] for place in order], dtype=torch.int16, device=device).permute(
            *(order.index(place) for place in range(4))
        )
        for number in range(count)
    }
    groups = [SimpleNamespace(layer_names=list(caches), kv_cache_spec=None)]
    return list(rank_layers(caches, SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups), [0]).views)


def _measure(context: Context, bench: RatioBench, name: str, aim: float | None) -> None:
    rounds = 1 if context.machine.stands_in else 7
    for direction in Direction:
        bench.round(direction)  # memory is taken, and the arena pinned
    for busy, direction in product((False, True), Direction):
        with in_background(run_python) if busy else nullcontext():
            taken = [bench.round(direction) for _ in range(rounds)]
        key = f"{direction.value} {name}{', busy' * busy}"
        ratio = median([one.pinned / one.ours for one in taken])
        context.figure(key, ratio, "", at_least=None if busy else aim)
        if aim is not None and not busy:
            context.figure(f"{key}, ours", bench.size_bytes / median([one.ours for one in taken]) / 1e9, "GB/s")


def run_python(over: threading.Event) -> None:
    """Run Python for 30 % of the time, as an engine does."""
    while not over.wait(_BUSY_PERIOD_SECONDS * (1 - _BUSY_SHARE)):
        until = time.perf_counter() + _BUSY_PERIOD_SECONDS * _BUSY_SHARE
        while time.perf_counter() < until:
            pass
