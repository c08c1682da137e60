"""What a device refuses or loses in the middle of its work: that copy fails or is slower, and the next one is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import indexed, pinning
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.base.operations import LoadOp, StoreOp

from benchmarks.day_one.copies import filled
from tests.fakes.late_device import LateDevice
from tests.rigs.copy_rank import BLOCK_BYTES, BLOCKS, Rank, batch_of, expected, stored, usable
from tests.rigs.memory_arena import make_arena

PIECE = 1 << 20


class FaultyDevice(LateDevice):
    """`pin`, `memory` and `wait` are refused when their turn comes: the numbers say which call, from 0 on."""

    refused_pins: frozenset[int] = frozenset()
    refused_memory: frozenset[int] = frozenset()
    refused_waits: frozenset[int] = frozenset()
    pins = memories = 0

    def pin(self, host: memoryview) -> bool:
        self.pins += 1
        return self.pins - 1 not in self.refused_pins and super().pin(host)

    def memory(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        self.memories += 1
        if self.memories - 1 in self.refused_memory:
            raise RuntimeError("CUDA out of memory")
        return super().memory(direction, size_bytes)

    def wait(self, mark: object) -> None:
        self.lost = self.waits in self.refused_waits
        super().wait(mark)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_module, indexed, pinning):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def other_arena() -> Iterator[ArenaMap]:
    made, descriptor = make_arena(arena_id=8)
    made.populated(made.size_bytes)
    yield made
    made.close()
    os.close(descriptor)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("direction", Direction)
def test_a_batch_that_touches_a_piece_which_is_refused_is_copied_unpinned_and_right(
    arena: ArenaMap, way: Way, direction: Direction
) -> None:
    """The second piece that a batch touches is refused. What lies in the first one stays pinned and fast."""
    device, layer = FaultyDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    device.refused_pins = frozenset({1})
    copier = usable(device, arena, layer, way)
    border = 2 * PIECE
    first, across = [3, 9], [20, 7, 21, 40]
    before = np.random.default_rng(1).bytes(4 * BLOCK_BYTES)
    arena.buffer[border - 2 * BLOCK_BYTES : border + 2 * BLOCK_BYTES] = before
    copier.copy(arena, batch_of(first, border - 16 * BLOCK_BYTES), direction)
    copier.copy(arena, batch_of(across, border - 2 * BLOCK_BYTES), direction)
    copier.copy(arena, batch_of(first, border - 8 * BLOCK_BYTES), direction)
    copier.wait()
    assert len(device.pinned) == 1
    if direction is Direction.STORE:
        assert stored(arena, border - 2 * BLOCK_BYTES, 4) == expected(layer, across)
        assert stored(arena, border - 8 * BLOCK_BYTES, 2) == expected(layer, first)
    else:
        assert expected(layer, across) == before
    if way is Way.BATCH:
        assert [pinned for pinned, _ in device.transfers] == [True, False, True]


@pytest.mark.requirement("I3", "P8")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
@pytest.mark.parametrize("way", [Way.GATHER, Way.TORCH])
@pytest.mark.parametrize("refused", [0, 1])
def test_memory_that_is_short_for_a_moment_costs_one_copy(arena: ArenaMap, kind: Any, way: Way, refused: int) -> None:
    device, layer = FaultyDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    device.refused_memory = frozenset({refused})
    rank = Rank(device, arena, layer, way)
    begin = 0
    failed = []
    for number in range(4):
        offset = begin + 4 * number * BLOCK_BYTES
        content = np.random.default_rng(number).bytes(2 * BLOCK_BYTES)
        if kind is LoadOp:
            arena.buffer[offset : offset + 2 * BLOCK_BYTES] = content
        (outcome,) = rank.do(kind, 8 * number, offset)
        failed.append(bool(outcome.failed))
        if not outcome.failed:
            assert stored(arena, offset, 2) == expected(layer, [8 * number, 8 * number + 1])
        assert not device.in_flight
    assert failed == [number == refused for number in range(4)]
    assert rank.failures.counts.total() == 1


@pytest.mark.requirement("I1a", "P5")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_an_event_that_raises_once_leaves_that_copy_without_a_report_and_ends_all_others(
    arena: ArenaMap, kind: Any
) -> None:
    """Nobody knows whether that copy has ended: its extents stay lent. The device is given nothing more."""
    device, layer = FaultyDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    rank = Rank(device, arena, layer)
    begin = 0
    assert len(rank.do(kind, 0, begin)) == 1
    device.refused_waits = frozenset({device.waits, device.waits + 1})  # that of the copy, and the one before a report
    assert rank.do(kind, 8, begin + 8 * BLOCK_BYTES) == []
    started = device.started
    (outcome,) = rank.do(kind, 16, begin + 16 * BLOCK_BYTES)
    assert outcome.failed == {0} and device.started == started
    assert rank.thread.take_done() == []
    rank.thread._stopping = True
    assert not rank.thread.over


def test_an_event_that_raises_between_batches_queues_no_more_of_that_copy(arena: ArenaMap) -> None:
    device, layer = FaultyDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    copier = usable(device, arena, layer)
    begin = 0
    device.refused_waits = frozenset({0})
    for number in range(2):
        copier.copy(arena, batch_of([number], begin + number * BLOCK_BYTES), Direction.STORE)
    started = device.started
    with pytest.raises(RuntimeError, match="lost"):
        copier.copy(arena, batch_of([5], begin + 2 * BLOCK_BYTES), Direction.STORE)
    assert device.started == started
    copier.wait()
    assert stored(arena, begin, 2) == expected(layer, [0, 1])
    assert not device.in_flight


class SwappingDevice(LateDevice):
    """While it pins its first piece, the rank's arena becomes another one, and the former mapping is closed."""

    attachment: Any = None
    following: ArenaMap | None = None

    def pin(self, host: memoryview) -> bool:
        if self.following is not None:
            self.attachment.arena.close()
            self.attachment.arena, self.following = self.following, None
        return super().pin(host)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("background", [False, True], ids=["touched", "in the background"])
def test_an_arena_that_changes_while_it_is_pinned_is_let_go_of_and_the_next_one_is_used(
    arena: ArenaMap, other_arena: ArenaMap, background: bool
) -> None:
    device, layer = SwappingDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    rank = Rank(device, arena, layer)
    device.attachment, device.following = rank.attachment, other_arena
    begin = 0
    if background:
        rank.copier._pins._background = True
        rank.copier.prepare(arena)
    else:
        rank.do(StoreOp, 0, begin)
    assert rank.attachment.arena is other_arena
    assert device.pinned == [PIECE], "of the former arena"
    assert rank.copier.prepare(other_arena) is not None
    assert device.pinned == [], "what was pinned meanwhile is unpinned first"
    (outcome,) = rank.do(StoreOp, 16, begin)
    assert not outcome.failed
    assert stored(other_arena, begin, 2) == expected(layer, [16, 17])
    assert PIECE in device.pinned and {True} == {pinned for pinned, _ in device.transfers[-1:]}
    rank.copier.release()
    assert not device.pinned
