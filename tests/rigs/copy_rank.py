"""A rank's copying thread on a stand-in for its device, without a connector and without a daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.base.operations import LoadOp, ObjectCopy, StoreOp
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import CopyThread

from benchmarks.day_one.copies import block_bytes_of
from tests.fakes.late_device import LateDevice
from tests.rigs.memory_arena import granted

Clock = Callable[[], float]
BLOCK_BYTES = 4096
BLOCKS = 64
GENERATION = 4
LOAD_SECONDS = 3600.0


def usable(
    device: LateDevice,
    arena: ArenaMap,
    layer: torch.Tensor,
    way: Way | None = None,
    *,
    in_background: bool = False,
    clock: Clock = lambda: 0.0,
) -> DeviceCopier:
    """Return a copier of an arena that has its pages. It pins the first piece `in_background` here."""
    copier = DeviceCopier([layer], device, way=way, pin_in_background=in_background, clock=clock)
    arena.populated(arena.size_bytes)
    copier.enter()
    copier.prepare(arena)
    return copier


def batch_of(blocks: list[int], offset: int) -> CopyBatch:
    """Blocks of layer 0, end to end in the arena from `offset` on."""
    zeros = np.zeros(len(blocks), dtype=np.int64)
    offsets = offset + np.arange(len(blocks), dtype=np.int64) * BLOCK_BYTES
    return CopyBatch(zeros, np.array(blocks, dtype=np.int64), zeros, offsets, zeros + BLOCK_BYTES)


def stored(arena: ArenaMap, offset: int, blocks: int) -> bytes:
    return bytes(arena.buffer[offset : offset + blocks * BLOCK_BYTES])


def expected(layer: torch.Tensor, blocks: list[int]) -> bytes:
    return b"".join(block_bytes_of(layer, block) for block in blocks)


class Places:
    """Instead of ObjectPlaces: object `i` is block `i` and the one after it, at its extent."""

    def moves(self, _: Any) -> Any:
        return ()

    def pieces(self, objects: Any, extents: Any, *, writing: bool) -> Any:
        (copied,) = objects
        return batch_of([copied.boundary_tokens, copied.boundary_tokens + 1], int(extents.offsets[0]))


class Rank:
    """A copying thread. The test itself runs it by `do`, or starts it. `clock` is that of its pinning."""

    def __init__(
        self,
        device: LateDevice,
        arena: ArenaMap,
        layer: torch.Tensor,
        way: Way | None = None,
        *,
        in_background: bool = False,
        clock: Clock = lambda: 0.0,
        read_back: int = 0,
    ) -> None:
        self.device = device
        self.attachment: Any = SimpleNamespace(arena=arena)
        self.copier = usable(device, arena, layer, way, in_background=in_background, clock=clock)
        self.failures = Failures(logging.getLogger("test.faults"))
        self.now = 0.0
        self.thread = CopyThread(
            self.attachment, self.copier, self.failures, clock=lambda: self.now, read_back=read_back
        )
        self.thread._places = Places()  # type: ignore[assignment] # not `start`, which begins a thread
        self.ops = 0

    def submit(self, kind: type[LoadOp | StoreOp], block: int, offset: int) -> None:
        """Queue a copy of two blocks."""
        arena = self.attachment.arena
        granted(arena)[0] = GENERATION
        self.ops += 1
        extents = np.array([0, 0, offset, 2 * BLOCK_BYTES, GENERATION], dtype="<u8").tobytes()
        objects = (ObjectCopy(0, 0, b"k" * 16, block, ()),)
        op: Any = StoreOp(self.ops, arena.arena_id, extents, objects)
        if kind is LoadOp:
            op = LoadOp(self.ops, "r", self.now + LOAD_SECONDS, arena.arena_id, extents, objects)
        self.thread.submit([op] if kind is LoadOp else [], [op] if kind is StoreOp else [])

    def run_next(self) -> None:
        """Do what the thread does next."""
        queued = self.thread._next()
        assert queued is not None
        self.thread._do(*queued)

    def do(self, kind: type[LoadOp | StoreOp], block: int, offset: int) -> list[CopyOutcome]:
        """Copy two blocks, and return what is reported."""
        self.submit(kind, block, offset)
        self.run_next()
        return self.thread.take_done()
