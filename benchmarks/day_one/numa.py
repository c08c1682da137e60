"""NUMA nodes: where pages of host memory lie, and how fast the device reaches each node. A part of step 0.

By system calls, because a machine for the kit may lack libnuma.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from kvdepot.client.copy.backend import Device
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.pinning import PIECE_BYTES
from kvdepot.client.copy.runs import Runs, address_of

from benchmarks.copy_ratio import make_arena, pieces_of, pin_pieces, seconds
from benchmarks.day_one.steps import Context
from benchmarks.report import median

_CALLS: Final = {"x86_64": (279, 237), "aarch64": (239, 235)}
"""Machine -> numbers of move_pages and mbind."""
_MPOL_BIND: Final = 2
_PAGES_ASKED: Final = 1024
_ROUNDS: Final = 5
_libc = ctypes.CDLL(None, use_errno=True)


def numa(context: Context) -> None:
    """Note where pages of an arena of this process lie, and copy to and from memory of each node."""
    size_bytes = (16 << 20) if context.machine.stands_in else (256 << 20)
    try:
        found, with_memory = nodes_of(make_arena(size_bytes).buffer), nodes()
    except OSError as error:
        context.note("numa nodes of an arena's pages", f"unknown: {error}")
        return
    pages = sum(found.values())
    said = ", ".join(f"node {node}: {count / pages:.0%}" for node, count in sorted(found.items()))
    context.note("numa nodes of an arena's pages", said)
    device = context.machine.copies()
    device.enter()
    try:
        for node in with_memory:
            _measure(context, device, node, size_bytes)
    finally:
        device.leave()


def nodes(said: str | None = None) -> list[int]:
    """Return the nodes that have memory. The kernel says them as `0-1,3`."""
    if said is None:
        said = Path("/sys/devices/system/node/has_memory").read_text()
    ends = [part.split("-") for part in said.strip().split(",")]
    return [node for end in ends for node in range(int(end[0]), int(end[-1]) + 1)]


def nodes_of(memory: memoryview) -> Counter[int]:
    """Return node -> how many of some pages lie there. Raise OSError if the kernel does not say it."""
    count = min(_PAGES_ASKED, len(memory) // mmap.PAGESIZE)
    step = len(memory) // mmap.PAGESIZE // count * mmap.PAGESIZE
    begin = address_of(memory)
    asked = (ctypes.c_void_p * count)(*(begin + number * step for number in range(count)))
    found = (ctypes.c_int * count)()
    _call(0, 0, ctypes.c_ulong(count), asked, None, found, 0)
    if (error := -min(found)) > 0:
        raise OSError(error, f"a page has no node: {os.strerror(error)}")
    return Counter(found)


def memory_on(node: int, size_bytes: int) -> memoryview:
    """Return shared memory with all its pages on a node. Raise OSError."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    place = ctypes.c_void_p(address_of(memory))
    _call(1, place, ctypes.c_ulong(size_bytes), _MPOL_BIND, mask, ctypes.c_ulong(len(mask) * bits + 1), 0)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


def _call(which: int, *args: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"the numbers of its system calls are not known for {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _measure(context: Context, device: Device, node: int, size_bytes: int) -> None:
    """Report the speed of pinned copies to and from a node's memory, and what of it lies elsewhere."""
    try:
        memory = memory_on(node, size_bytes)
        elsewhere = {other: count for other, count in nodes_of(memory).items() if other != node}
    except OSError as error:
        context.note(f"node {node}, not run", error)
        return
    if elsewhere:
        context.note(f"node {node}, not run", f"pages lie elsewhere: {elsewhere}")
        return
    pieces = pieces_of(memory)
    pinned = len(pin_pieces(device, pieces))
    if pinned == len(pieces):
        there = torch.empty(size_bytes, dtype=torch.uint8, device=context.machine.device)
        context.machine.synchronize()
        for direction in Direction:
            copy = partial(_copy, device, memory, there, direction)
            took = [seconds(copy) for _ in range(1 + _ROUNDS)]
            context.figure(f"node {node}: {direction.value}", size_bytes / median(took[1:]) / 1e9, "GB/s")
    else:
        context.note(f"node {node}, not run", "the driver refuses to pin")
    for piece in pieces[:pinned]:
        device.unpin(piece)


def _copy(device: Device, memory: memoryview, there: torch.Tensor, direction: Direction) -> None:
    offsets = np.arange(0, len(memory), PIECE_BYTES, dtype=np.int64)
    ends = [there.data_ptr() + offsets, address_of(memory) + offsets]
    source, target = ends if direction is Direction.STORE else reversed(ends)
    device.transfer(direction, Runs(source, target, np.minimum(len(memory) - offsets, PIECE_BYTES)), pinned=True)
    device.wait(device.mark(direction))
