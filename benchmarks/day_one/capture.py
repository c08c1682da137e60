"""Step 5: the engine captures a graph while another thread does what the copying thread does.

In the default mode of capture that breaks the graph. kvdepot's thread captures in the relaxed mode, so it must not.
As a program this is the process that tries it: a broken capture may leave a process unusable.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from kvdepot.client.copy.backend import Device
from kvdepot.client.copy.base import Direction, object_pieces
from kvdepot.client.copy.cuda import CudaDevice
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.driver import Driver, load_driver
from kvdepot.client.copy.pinning import PIECE_BYTES

from benchmarks.copy_ratio import make_arena
from benchmarks.day_one import child
from benchmarks.day_one.copies import extents_of
from benchmarks.day_one.machine import Machine, machine_of
from benchmarks.day_one.second_gpu import second_gpu
from benchmarks.day_one.steps import Context

BLOCK_BYTES, BLOCKS = 65536, 64
_HELD, _BROKEN = "held", "broken"


def capture(context: Context) -> None:
    """Try every action with the thread as kvdepot has it, and with one that captures as by default."""
    tables = {}
    for mode in ("relaxed",) if context.machine.stands_in else ("relaxed", "default"):
        said = child.answer(context, "capture", "--mode", mode)
        tables[mode] = said or {}
        context.note(f"captured beside a thread in {mode} mode", said or "the process ended without an answer")
    if context.machine.stands_in:
        context.note("not tried", "a stand-in captures nothing: the actions were only done")
    second_gpu(context)
    held = sum(result == _HELD for result in tables["relaxed"].values())
    context.figure("captures_held", held / len(ACTIONS), "", at_least=1.0)


class _Side:
    """What the copying thread has."""

    def __init__(self, machine: Machine, device: Device) -> None:
        self.device = device
        self.layer = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=machine.device)
        machine.synchronize()
        self.arena = make_arena(2 * PIECE_BYTES)
        self.copier = DeviceCopier([self.layer], device)
        self.copier.enter()
        self.copier.prepare(self.arena)
        self.copy()  # kernels are loaded

    def copy(self) -> None:
        count = 16
        held = extents_of([(0, count * BLOCK_BYTES)], self.arena.size_bytes)
        for direction in Direction:
            pieces = object_pieces(held, [0], 0, [0], [BLOCK_BYTES], count, [range(count)])
            self.copier.copy(self.arena, pieces, direction)
        self.copier.wait()

    def wait(self) -> None:
        self.device.wait(self.device.mark(Direction.LOAD))

    def pin(self) -> None:
        piece = self.arena.buffer[PIECE_BYTES : 2 * PIECE_BYTES]
        if self.device.pin(piece):
            self.device.unpin(piece)

    def allocate(self) -> None:
        self.device.memory(Direction.LOAD, 40 << 20)


ACTIONS: dict[str, Callable[[_Side], None]] = {
    "copy": _Side.copy, "wait": _Side.wait, "pin": _Side.pin, "allocate": _Side.allocate,
}  # fmt: skip


@contextmanager
def _capturing(machine: Machine) -> Iterator[None]:
    """Capture a graph as vLLM does; replay it afterwards. Raise what breaks it."""
    if machine.stands_in:
        yield
        return
    numbers = torch.ones((1024, 1024), device=machine.device)
    numbers @ numbers  # what is loaded at a first use is no part of a graph
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        numbers @ numbers
        yield
        numbers @ numbers
    graph.replay()
    machine.synchronize()


def _device(machine: Machine, mode: str) -> Device:
    if machine.stands_in or mode == "relaxed":
        return machine.copies()
    driver: Driver = load_driver()
    driver.relax_capture = lambda: None  # type: ignore[method-assign]
    return CudaDevice(machine.device, driver)


class _Worker(threading.Thread):
    """Does one action when asked; ready when it has set up."""

    def __init__(self, machine: Machine, mode: str, action: Callable[[_Side], None]) -> None:
        super().__init__(daemon=True)
        self._machine, self._mode, self._action = machine, mode, action
        self.ready, self.go = threading.Event(), threading.Event()
        self.error = ""

    def run(self) -> None:
        try:
            side = _Side(self._machine, _device(self._machine, self._mode))
            self.ready.set()
            self.go.wait()
            self._action(side)
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            self.error = str(error)[:100] or repr(error)
        self.ready.set()


def _try(machine: Machine, mode: str, action: Callable[[_Side], None]) -> str:
    worker = _Worker(machine, mode, action)
    worker.start()
    worker.ready.wait()
    if worker.error:
        return f"no set-up: {worker.error}"
    try:
        with _capturing(machine):
            worker.go.set()
            worker.join()
    except Exception as error:  # noqa: BLE001
        return f"{_BROKEN}: {str(error)[:100]}"
    return f"{_BROKEN} in the thread: {worker.error}" if worker.error else _HELD


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    machine = machine_of(stand_in=options.stand_in)
    found: dict[str, str] = {}
    for name, action in ACTIONS.items():
        found[name] = _try(machine, options.mode, action)
        child.say(**found)  # so that what was found is known if the next one ends the process


if __name__ == "__main__":
    main()
