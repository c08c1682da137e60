"""A rank without an engine: layers, an arena, and the product's own copying thread between them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.base.operations import LayerFacts, LoadOp, ObjectCopy, SpanCopy, StoreOp
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.copy_thread import Attached, CopyThread
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.places import ObjectPlaces
from kvdepot.core.calls import Kind
from kvdepot.core.groups import GroupSpec
from kvdepot.core.planner import Planner

from benchmarks.copy_ratio import BLOCKS_IN_OBJECT, packed_extents
from benchmarks.day_one.machine import Machine

LAYERS, BLOCK_BYTES, BLOCK_TOKENS = 4, 65536, 16
OBJECT_BYTES = LAYERS * BLOCKS_IN_OBJECT * BLOCK_BYTES
CHUNK_TOKENS = BLOCKS_IN_OBJECT * BLOCK_TOKENS
POLL_SECONDS = 0.001
_LEAVE_SECONDS = 20.0


@dataclass
class MappedArena:
    """See Attached: an arena that is always there."""

    arena: ArenaMap
    session: bytes | None = b"session"

    def close(self) -> None: ...


def group() -> GroupSpec:
    """Return the one group of such a rank."""
    names = tuple(f"layer.{number}" for number in range(LAYERS))
    return GroupSpec(Kind.ATTENTION, BLOCK_TOKENS, rank_block_bytes=(LAYERS * BLOCK_BYTES,), layers=names)


def rank_layers_of(layers: Sequence[torch.Tensor]) -> RankLayers:
    """Describe layers [blocks, BLOCK_BYTES] of uint8."""
    facts = tuple(
        LayerFacts(f"layer.{number}", 0, "uint8", (BLOCK_BYTES,), (0,), BLOCK_BYTES, "")
        for number in range(len(layers))
    )
    return RankLayers(tuple(layers), facts)


class Rank:
    """One whose copying thread runs. `objects` of its blocks can be stored, and as many loaded elsewhere."""

    def __init__(
        self, machine: Machine, attached: Attached, objects: int, *, way: Way | None = None, read_back: int = 0
    ) -> None:
        shape = (2 * objects * BLOCKS_IN_OBJECT, BLOCK_BYTES)
        self.machine = machine
        self.layers = [torch.zeros(shape, dtype=torch.uint8, device=machine.device) for _ in range(LAYERS)]
        machine.synchronize()
        copier = DeviceCopier(self.layers, machine.copies(), way=way)
        self.failures = Failures(logging.getLogger("benchmarks.day_one"))
        self._name = f"copies of {id(self)}"
        self.thread = CopyThread(attached, copier, self.failures, read_back=read_back, name=self._name)
        problem = self.thread.prove()
        if problem:
            raise RuntimeError(f"the rank refuses: {problem}")
        planner = Planner([group()], CHUNK_TOKENS)
        self.thread.start(ObjectPlaces(planner, rank_layers_of(self.layers), 0))
        self._numbers = itertools.count(1)
        self._objects = objects

    def fill(self, value: int | None = None) -> None:
        """Queue bytes for the blocks to store, random ones or all of one value; those to load into become zero."""
        half = self._objects * BLOCKS_IN_OBJECT

        def work() -> None:
            for layer in self.layers:
                layer[half:].zero_()
                layer[:half].random_() if value is None else layer[:half].fill_(value)

        self.machine.on_engine(work)

    def store(self, objects: Sequence[int], arena: ArenaMap) -> StoreOp:
        """Return the operation that stores these objects, each at its own place of an arena of this process."""
        return self.store_granted(objects, arena.arena_id, self._extents(objects))

    def store_granted(self, objects: Sequence[int], arena_id: int, extents: bytes) -> StoreOp:
        """Return the operation that stores them into extents that a daemon has granted."""
        return StoreOp(next(self._numbers), arena_id, extents, self._copies(objects, 0))

    def load(self, objects: Sequence[int], arena: ArenaMap, seconds: float = 60.0) -> LoadOp:
        """Return the operation that loads them into the other half of the blocks."""
        return self.load_granted(objects, arena.arena_id, self._extents(objects), seconds)

    def load_granted(self, objects: Sequence[int], arena_id: int, extents: bytes, seconds: float = 60.0) -> LoadOp:
        """Return the operation that loads them out of extents that a daemon has granted."""
        copies = self._copies(objects, self._objects)
        return LoadOp(next(self._numbers), "r", time.monotonic() + seconds, arena_id, extents, copies)

    def done(self, count: int, seconds: float = 60.0) -> list[CopyOutcome]:
        """Return the outcomes of `count` operations in their order. Fewer: the time is over."""
        outcomes: list[CopyOutcome] = []
        until = time.monotonic() + seconds
        while len(outcomes) < count and time.monotonic() < until:
            outcomes += self.thread.take_done()
            time.sleep(POLL_SECONDS)
        return outcomes

    def wrong_objects(self, objects: Sequence[int]) -> list[int]:
        """Return which of these are not loaded as they were stored."""
        self.machine.synchronize()
        return [
            number for number in objects if not all(map(torch.equal, self._blocks(number, 0), self._loaded(number)))
        ]

    def untouched(self, objects: Sequence[int]) -> bool:
        """Return whether the blocks that these would be loaded into are zero."""
        self.machine.synchronize()
        return not any(bool(blocks.any()) for number in objects for blocks in self._loaded(number))

    def digest(self, *, loaded: bool) -> str:
        """Return a digest of all bytes to store, or of those that were loaded."""
        self.machine.synchronize()
        half = self._objects * BLOCKS_IN_OBJECT
        part = slice(half, None) if loaded else slice(half)
        return hashlib.sha256(b"".join(layer[part].cpu().numpy().tobytes() for layer in self.layers)).hexdigest()

    def close(self) -> None:
        """End the thread, and wait until it has unpinned the arena."""
        self.thread.close()
        for thread in threading.enumerate():
            if thread.name == self._name:
                thread.join(_LEAVE_SECONDS)

    def _loaded(self, number: int) -> list[torch.Tensor]:
        return self._blocks(number, self._objects)

    def _blocks(self, number: int, first: int) -> list[torch.Tensor]:
        begin = (first + number) * BLOCKS_IN_OBJECT
        return [layer[begin : begin + BLOCKS_IN_OBJECT] for layer in self.layers]

    def _copies(self, objects: Sequence[int], first: int) -> tuple[ObjectCopy, ...]:
        return tuple(
            ObjectCopy(index, Kind.ATTENTION, bytes(16), CHUNK_TOKENS, (SpanCopy(0, 0, block_ids(first + number)),))
            for index, number in enumerate(objects)
        )

    def _extents(self, objects: Sequence[int]) -> bytes:
        return packed_extents(objects, OBJECT_BYTES)


def block_ids(number: int) -> tuple[int, ...]:
    """Return the blocks of one object."""
    return tuple(range(number * BLOCKS_IN_OBJECT, (number + 1) * BLOCKS_IN_OBJECT))
