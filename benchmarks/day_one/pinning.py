"""Step 6: what it costs to pin host memory, by the kind of its pages and the size of a piece."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvdepot.client.copy.backend import Device
from kvdepot.client.copy.runs import address_of

from benchmarks.background import in_background
from benchmarks.copy_ratio import pieces_of, pin_pieces, seconds
from benchmarks.day_one import child
from benchmarks.day_one.decode import decode_step
from benchmarks.day_one.machine import Machine
from benchmarks.day_one.steps import Context, NotRunError

_PIECES_MIB = (4, 32, 256)
_REPLAY_SIZE = 512
_MFD_HUGETLB = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Pages:
    """Shared memory of one kind of page. `flags` of memfd_create, `advice` for the mapping."""

    name: str
    flags: int = 0
    advice: int = 0


KINDS = (
    Pages("4 KiB"),
    Pages("transparent huge pages", advice=_MADV_HUGEPAGE),
    Pages("hugetlbfs", flags=_MFD_HUGETLB),
)


def pinning(context: Context) -> None:
    """Pin and unpin by each kind and size, beside the steps of an engine; then the same pages by a second process."""
    machine = context.machine
    size_bytes = (64 << 20) if machine.stands_in else (2 << 30)
    device = machine.copies()
    device.enter()
    try:
        for kind in KINDS:
            try:
                memory = mapped(kind, size_bytes)
            except OSError as error:
                context.note(f"{kind.name}, not run", error)
                continue
            for piece_mib in _PIECES_MIB:
                context.case(_PIECES_MIB.index(piece_mib), len(_PIECES_MIB))
                _measure(context, device, memory, kind, piece_mib << 20)
        second_process(context, device)
    finally:
        device.leave()


def second_process(context: Context, device: Device) -> None:
    """Pin pages here, and again by a second process: what the second rank of a node pays."""
    size_bytes = (64 << 20) if context.machine.stands_in else (1 << 30)
    descriptor = os.memfd_create("pages", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
        memory = memoryview(mmap.mmap(descriptor, size_bytes))
        here = pin_all(device, memory)
        said = child.answer(context, "second_pin", "--path", f"/proc/{os.getpid()}/fd/{descriptor}")
        for piece in pieces_of(memory):
            device.unpin(piece)
    finally:
        os.close(descriptor)
    if said is None:
        raise RuntimeError("the second process ended without an answer")
    context.figure("one process: pin", here / size_bytes * 2**30, "s/GiB")
    context.figure("a second process: pin", said["seconds"] / size_bytes * 2**30, "s/GiB")


def pin_all(device: Device, memory: memoryview) -> float:
    """Pin memory as the product does, in its pieces. Return the seconds. Raise NotRunError."""
    pieces = pieces_of(memory)
    took = pin_pieces(device, pieces)
    if len(took) < len(pieces):
        raise NotRunError("the driver refuses to pin")
    return sum(took)


def mapped(kind: Pages, size_bytes: int) -> memoryview:
    """Map shared memory that has all its pages. Raise OSError if the machine has no such pages."""
    descriptor = os.memfd_create("pages", os.MFD_CLOEXEC | kind.flags)
    try:
        os.ftruncate(descriptor, size_bytes)
        memory = memoryview(mmap.mmap(descriptor, size_bytes))
    finally:
        os.close(descriptor)
    address = address_of(memory)
    for advice in (kind.advice, _MADV_POPULATE_WRITE):
        if advice and _madvise(address, size_bytes, advice):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}, advice {advice}")
    if kind.advice == _MADV_HUGEPAGE and not _huge_bytes(address):
        raise OSError(0, "the kernel gave none: see shmem_enabled in step 0")
    return memory


def _huge_bytes(address: int) -> int:
    """Return how much of the mapping at `address` has huge pages."""
    inside = False
    with open("/proc/self/smaps") as lines:  # noqa: PTH123 - line by line
        for line in lines:
            head = line.split(" ", 1)[0]
            if "-" in head:
                begin, end = (int(place, 16) for place in head.split("-"))
                inside = begin <= address < end
            elif inside and head == "ShmemPmdMapped:":
                return int(line.split()[1]) << 10
    return 0


def _measure(context: Context, device: Device, memory: memoryview, kind: Pages, piece_bytes: int) -> None:
    """Report seconds a GiB of pinning and unpinning, the longest piece, device memory, and the engine's steps."""
    piece_bytes = min(piece_bytes, len(memory))
    pieces = pieces_of(memory, piece_bytes)
    free = _free_bytes(context.machine)
    took: list[float] = []
    steps = steps_meanwhile(context.machine, lambda: took.extend(pin_pieces(device, pieces)))
    if len(took) < len(pieces):
        raise NotRunError(f"the driver refuses to pin {kind.name}")
    used = free - _free_bytes(context.machine)
    began = time.perf_counter()
    for piece in pieces:
        device.unpin(piece)
    unpinned = time.perf_counter() - began
    gib = len(memory) / 2**30
    name = f"{kind.name}, {piece_bytes >> 20} MiB"
    context.figure(f"{name}: pin", sum(took) / gib, "s/GiB")
    context.figure(f"{name}: longest", max(took) * 1e3, "ms")
    context.figure(f"{name}: unpin", unpinned / gib, "s/GiB")
    context.figure(f"{name}: replay p50", steps[len(steps) // 2] * 1e3, "ms")
    context.figure(f"{name}: replay p99", steps[len(steps) * 99 // 100] * 1e3, "ms")
    context.figure(f"{name}: device memory", used / gib / 2**20, "MiB/GiB")


def _free_bytes(machine: Machine) -> int:
    return 0 if machine.stands_in else int(torch.cuda.mem_get_info(machine.device)[0])


def steps_meanwhile(machine: Machine, work: Callable[[], None]) -> list[float]:
    """Run `work` on this thread, and replays of a small graph on another one. Return the replays' seconds, sorted."""
    ready = threading.Event()
    took: list[float] = []

    def replays(over: threading.Event) -> None:
        try:
            machine.enter()
            step = decode_step(machine, _REPLAY_SIZE, large=False)  # which makes a first one, that is not measured
        finally:
            ready.set()
        for number in itertools.count():
            took.append(seconds(step))
            if over.is_set() and number:
                break

    with in_background(replays):
        ready.wait()  # no memory is pinned while a graph is captured: that is step 5
        work()
    if not took:
        raise RuntimeError("no graph was replayed")
    return sorted(took)
