"""What a batch costs the copying thread, which shares the interpreter with the engine: no more for more blocks.

The product's own calls of a GPU are run, on models of CUDA and of its driver.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, Direction
from kvdepot.client.copy.cuda import CudaDevice
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.driver import Driver
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.day_one.copies import filled
from tests.fakes.cuda_model import Cuda
from tests.fakes.driver_library import DriverLibrary

LAYERS, BLOCK_BYTES, BLOCKS_MAX = 16, 64, 4096
_TESTS = str(Path(__file__).parents[3])


class Kernel:
    """Instead of the compiled one."""

    launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            self.launches += 1

        return launch


class Gpu:
    """A copier of `CudaDevice`, of an arena that is pinned. Its memory is the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arena: ArenaMap, way: Way) -> None:
        pytest.importorskip("triton", reason="the launch needs Triton, as vLLM brings it")
        from kvdepot.client.copy import gather

        self.arena, self.library, self.kernel = arena, DriverLibrary(), Kernel()
        with Dispatches():
            torch.zeros(1)  # torch imports what this needs now, and not with the model's events
        self.cuda = Cuda(monkeypatch)
        monkeypatch.setattr(gather, "_move", self.kernel)
        layers = [filled((300, BLOCK_BYTES), torch.uint8, seed) for seed in range(LAYERS)]
        layers[1] = filled((300, 2, BLOCK_BYTES), torch.uint8)[:, :, : BLOCK_BYTES // 2]  # two runs a block
        device = CudaDevice(torch.device("cuda", 1), Driver(self.library))
        self.copier = DeviceCopier(layers, device, way=way, pin_in_background=False)
        arena.populated(arena.size_bytes)
        self.copier.enter()
        self.copier.prepare(arena)
        for direction in [*Direction, *Direction]:  # takes scratch memory
            self.copies(BLOCKS_MAX, direction)()
        self.copier.wait()
        self.library.calls.clear()
        self.kernel.launches = 0

    def copies(self, count: int, direction: Direction) -> Callable[[], None]:
        """Return what queues a batch of so many blocks: scattered pairs of each layer, together in the arena."""
        numbers = np.arange(count, dtype=np.int64)
        in_layer = count // LAYERS
        blocks = numbers // 2 * 37 % 128 * 2 + numbers % 2
        lengths = np.full(count, BLOCK_BYTES, dtype=np.int64)
        batch = CopyBatch(numbers // in_layer, blocks, np.zeros_like(numbers), numbers * BLOCK_BYTES, lengths)
        return lambda: self.copier.copy(self.arena, batch, direction)

    def moves(self, count: int) -> Callable[[], None]:
        """Return what queues the moves of so many blocks of all layers."""
        sources = np.arange(count // LAYERS, dtype=np.int64) * 2
        return lambda: self.copier.move(range(LAYERS), sources, sources + 1)


class Opcodes:
    """Counts what the interpreter does in a `with` block, without what the models of a GPU do."""

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.startswith(_TESTS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self.count += event == "opcode"
        return self._trace

    def __enter__(self) -> Self:
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)


class Dispatches(TorchDispatchMode):
    """Counts torch's operations: each one gives the GIL away and has to get it back."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def opcodes_of(gpu: Gpu, work: Callable[[], None]) -> int:
    work()  # Python imports and caches at the first time
    gpu.copier.wait()
    gc.disable()  # its finalizers are no work of the batch
    try:
        with Opcodes() as opcodes:
            work()
    finally:
        gc.enable()
    gpu.copier.wait()
    assert opcodes.count
    return opcodes.count


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("way", [Way.BATCH, Way.GATHER])
@pytest.mark.parametrize("direction", Direction)
def test_python_does_no_more_for_many_blocks_than_for_few(
    monkeypatch: pytest.MonkeyPatch, arena: ArenaMap, way: Way, direction: Direction
) -> None:
    gpu = Gpu(monkeypatch, arena, way)
    few, many = (opcodes_of(gpu, gpu.copies(count, direction)) for count in (256, BLOCKS_MAX))
    assert many == few


@pytest.mark.requirement("G2")
def test_python_does_no_more_for_moves_of_many_blocks_than_of_few(
    monkeypatch: pytest.MonkeyPatch, arena: ArenaMap
) -> None:
    gpu = Gpu(monkeypatch, arena, Way.GATHER)
    few, many = (opcodes_of(gpu, gpu.moves(count)) for count in (128, 2048))
    assert many == few


@pytest.mark.requirement("D6", "G2")
@pytest.mark.parametrize("way", [Way.BATCH, Way.GATHER])
@pytest.mark.parametrize("direction", Direction)
def test_a_batch_of_thousands_of_blocks_is_one_call_and_a_handful_of_torch_operations(
    monkeypatch: pytest.MonkeyPatch, arena: ArenaMap, way: Way, direction: Direction
) -> None:
    gpu = Gpu(monkeypatch, arena, way)
    work, entered = gpu.copies(BLOCKS_MAX, direction), gpu.cuda.entered
    with Dispatches() as dispatches:
        work()
    assert dispatches.count <= 8
    assert [name for name, _ in gpu.library.calls] == ["batch"]
    assert gpu.kernel.launches == gpu.cuda.entered - entered == (way is Way.GATHER)
