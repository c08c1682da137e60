"""Copies by way of a device that does its work late: what may overlap does, and nothing is believed too early."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap, Population
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy.base import CopyBatch, CopyError, Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm import rank
from kvdepot.client.vllm.guard import Failures
from kvdepot.client.vllm.metadata import LoadOp, ObjectCopy, StoreOp
from kvdepot.client.vllm.settings import parse_settings
from kvdepot.client.vllm.worker import CopyThread
from kvdepot.core.arena import PAGE_BYTES

from tests.fakes.late_device import EngineWork, LateDevice
from tests.rigs.memory_arena import ARENA_BYTES, make_arena
from tests.unit.client.copy.test_copiers import block_bytes_of, filled

BLOCK_BYTES = 2048


def batch_of(arena: ArenaMap, blocks: list[int], at: int = 0) -> CopyBatch:
    """Blocks of layer 0, end to end in the arena from `at` on."""
    count = len(blocks)
    offsets = arena.layout.data_offset + at + np.arange(count, dtype=np.int64) * BLOCK_BYTES
    zeros = np.zeros(count, dtype=np.int64)
    return CopyBatch(zeros, np.array(blocks, dtype=np.int64), zeros, offsets, zeros + BLOCK_BYTES)


def stored(arena: ArenaMap, count: int, at: int = 0) -> bytes:
    begin = arena.layout.data_offset + at
    return bytes(arena.buffer[begin : begin + count * BLOCK_BYTES])


def test_two_batches_are_on_their_way_and_no_more(arena: ArenaMap) -> None:
    layer, device = filled((64, BLOCK_BYTES), torch.uint8), LateDevice()
    copier = DeviceCopier([layer], device)
    for number in range(6):
        copier.copy(arena, batch_of(arena, [number, number + 20], number * 8192), Direction.STORE)
        assert device.in_flight <= 2
    assert device.ran == 4
    copier.wait()
    for number in range(6):
        expected = block_bytes_of(layer, number) + block_bytes_of(layer, number + 20)
        assert stored(arena, 2, number * 8192) == expected
    waits = device.waits
    copier.wait()
    assert device.waits == waits, "nothing was started since"


def test_a_store_begins_behind_what_the_engine_had_queued(arena: ArenaMap) -> None:
    layer = filled((8, BLOCK_BYTES), torch.uint8)
    device = LateDevice(EngineWork(lambda: layer[3].fill_(0x77)))
    copier = DeviceCopier([layer], device)
    mark = copier.mark()
    copier.after(mark)
    copier.copy(arena, batch_of(arena, [3]), Direction.STORE)
    copier.wait()
    assert stored(arena, 1) == b"\x77" * BLOCK_BYTES


@pytest.mark.requirement("A1")
def test_a_move_begins_behind_the_engine_s_work_and_ends_before_the_wait_does() -> None:
    layer = filled((8, BLOCK_BYTES), torch.uint8)
    device = LateDevice(EngineWork(lambda: layer[3].fill_(0x77)))
    copier = DeviceCopier([layer], device)
    copier.after(copier.mark())
    copier.move([0], np.array([3]), np.array([6]))
    copier.wait()
    assert not device.in_flight
    assert (layer[6] == 0x77).all()


@pytest.mark.requirement("A1")
def test_a_load_is_reported_when_its_moves_are_done(arena: ArenaMap) -> None:
    grant(arena)
    layer, device = filled((8, BLOCK_BYTES), torch.uint8), LateDevice()
    expected = block_bytes_of(layer, 3)
    thread = thread_on(arena, layer, device, Places(arena, moves=[([0], np.array([3]), np.array([6]))]))
    thread._do(op_of(LoadOp, arena), device.engine_mark())
    ((outcome),) = thread.take_done()
    assert not outcome.failed
    assert block_bytes_of(layer, 6) == expected


def test_engines_tensors_made_in_inference_mode_are_written(arena: ArenaMap) -> None:
    with torch.inference_mode():
        layer = torch.zeros((8, BLOCK_BYTES), dtype=torch.uint8)
    arena.buffer[arena.layout.data_offset : arena.layout.data_offset + BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
    copier = DeviceCopier([layer], LateDevice())
    copier.copy(arena, batch_of(arena, [2]), Direction.LOAD)
    copier.move([0], np.array([2]), np.array([4]))
    copier.wait()
    assert (layer[2] == 0x55).all() and (layer[4] == 0x55).all()


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (filled((8, 16, 64), torch.bfloat16), torch.int64),
        (filled((8, 6), torch.bfloat16), torch.int32),
        (filled((8, 7), torch.bfloat16), torch.int16),
        (filled((8, 64), torch.uint8)[:, 4:60], torch.int32),  # where they begin
        (filled((8, 16, 64), torch.bfloat16).permute(0, 2, 1), torch.int16),  # nothing lies together
        (filled((64,), torch.bfloat16), torch.int16),  # blocks of one element each
    ],
)
def test_blocks_move_as_the_largest_numbers_that_fit(layer: torch.Tensor, dtype: torch.dtype) -> None:
    numbers = device_module._as_numbers(layer)
    assert numbers.dtype is dtype
    assert len(numbers) == len(layer)
    assert block_bytes_of(numbers, 5) == block_bytes_of(layer, 5)


@pytest.mark.requirement("I1")
def test_a_block_stored_in_parts_and_whole_again_in_one_batch_is_right_in_both_places(arena: ArenaMap) -> None:
    layer = filled((8, BLOCK_BYTES), torch.uint8)
    half = BLOCK_BYTES // 2
    rows = [
        (3, 0, 65536, half),
        (3, half, 8192, half),
        (3, 0, 16384, BLOCK_BYTES),
        (4, 0, 16384 + BLOCK_BYTES, BLOCK_BYTES),
    ]
    blocks, skips, offsets, lengths = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    offsets += arena.layout.data_offset
    copier = DeviceCopier([layer], LateDevice())
    copier.copy(arena, CopyBatch(np.zeros(4, dtype=np.int64), blocks, skips, offsets, lengths), Direction.STORE)
    copier.wait()
    assert stored(arena, 2, 16384) == block_bytes_of(layer, 3) + block_bytes_of(layer, 4)
    assert stored(arena, 1, 65536)[:half] + stored(arena, 1, 8192)[:half] == block_bytes_of(layer, 3)


def test_transfers_are_as_long_as_pinned_pieces_let_them_be(arena: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "PIN_PIECE_BYTES", 8192)
    copier = DeviceCopier([filled((64, BLOCK_BYTES), torch.uint8)], LateDevice())
    _, transfers, size_bytes = copier._plan(batch_of(arena, list(range(10)), at=2048))
    assert size_bytes == 10 * BLOCK_BYTES
    assert sum(one.length for one in transfers) == size_bytes
    begin = arena.layout.data_offset + 2048
    assert [one.offset for one in transfers] == [begin, *range(-(-begin // 8192) * 8192, begin + size_bytes, 8192)]
    assert all(one.offset // 8192 == (one.offset + one.length - 1) // 8192 for one in transfers)


class Pinning:
    """A copier and an arena of four pieces whose pages come one after the other."""

    def __init__(self, arena_id: int, device: LateDevice, copier: DeviceCopier | None = None) -> None:
        self.device = device
        self.arena, self.descriptor = make_arena(arena_id=arena_id)
        self.arena.buffer[PAGE_BYTES:] = bytes(self.arena.size_bytes - PAGE_BYTES)  # so that it has its pages
        self.population = Population(self.arena, os.dup(self.descriptor))
        self.copier = copier or DeviceCopier([filled((8, BLOCK_BYTES), torch.uint8)], device)

    def close(self) -> None:
        self.population.close()
        self.arena.close()
        os.close(self.descriptor)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pinning]:
    monkeypatch.setattr(device_module, "PIN_PIECE_BYTES", ARENA_BYTES // 4)
    made = Pinning(7, LateDevice())
    yield made
    made.close()


def test_the_arena_is_pinned_piece_by_piece_as_it_is_populated(pinning: Pinning) -> None:
    copier, device, one = pinning.copier, pinning.device, pinning.arena
    assert copier.prepare(None) == copier.prepare(one) == device_module.PREPARE_AGAIN_SECONDS
    pinning.population.step(ARENA_BYTES // 2)
    assert [copier.prepare(one) for _ in range(3)] == [0.0, 0.0, device_module.PREPARE_AGAIN_SECONDS]
    pinning.population.step(ARENA_BYTES // 2)
    assert [copier.prepare(one) for _ in range(3)] == [0.0, 0.0, device_module.PREPARE_AGAIN_SECONDS]
    assert device.pinned == [ARENA_BYTES // 4] * 4


def test_another_arena_is_pinned_after_the_one_before_was_let_go(pinning: Pinning) -> None:
    copier, device = pinning.copier, pinning.device
    pinning.population.step(ARENA_BYTES)
    while copier.prepare(pinning.arena) == 0.0:
        pass
    copier.copy(pinning.arena, batch_of(pinning.arena, [1]), Direction.STORE)
    other = Pinning(8, device, copier)
    assert copier.prepare(other.arena) != 0.0
    assert not device.pinned and not device.in_flight, "waited first"
    other.population.step(ARENA_BYTES)
    assert copier.prepare(other.arena) == 0.0
    copier.prepare(None)
    assert not device.pinned
    other.close()


def test_where_pinning_is_refused_it_is_not_tried_again_before_another_arena(
    pinning: Pinning, caplog: pytest.LogCaptureFixture
) -> None:
    copier, device = pinning.copier, pinning.device
    pinning.population.step(ARENA_BYTES)
    assert copier.prepare(pinning.arena) == 0.0
    device.pins_refused = True
    assert copier.prepare(pinning.arena) == 0.0
    device.pins_refused = False
    assert copier.prepare(pinning.arena) == device_module.PREPARE_AGAIN_SECONDS
    assert device.pinned == [ARENA_BYTES // 4], "what is pinned stays of use"
    (told,) = caplog.messages
    assert f"{ARENA_BYTES // 4} of the arena's" in told
    other = Pinning(8, device, copier)
    assert copier.prepare(other.arena) != 0.0
    assert not device.pinned
    other.population.step(ARENA_BYTES)
    assert copier.prepare(other.arena) == 0.0
    assert device.pinned == [ARENA_BYTES // 4]
    other.close()


class Places:
    """Instead of ObjectPlaces: one block an object."""

    def __init__(self, arena: ArenaMap, second_fails: bool = False, moves: Any = ()) -> None:
        self._arena = arena
        self._second_fails = second_fails
        self._moves = moves

    def moves(self, moves: Any) -> Any:
        return self._moves

    def pieces(self, objects: Any, extents: Any, *, writing: bool) -> Any:
        batch = batch_of(self._arena, [1, 2])
        if not self._second_fails:
            return batch
        broken = batch_of(self._arena, [100])
        return SimpleNamespace(split=lambda: iter([batch, broken]))


def thread_on(arena: ArenaMap, layer: torch.Tensor, device: LateDevice, places: Any) -> CopyThread:
    attachment: Any = SimpleNamespace(arena=arena)
    made = CopyThread(attachment, DeviceCopier([layer], device), Failures(logging.getLogger("test.device")))
    made._places = places  # not `start`: the test is the copying thread
    return made


def op_of(kind: type[LoadOp | StoreOp], arena: ArenaMap) -> LoadOp | StoreOp:
    words = [0, 5, arena.layout.data_offset, 2 * BLOCK_BYTES, 4]
    extents = np.array(words, dtype="<u8").tobytes()
    objects = (ObjectCopy(index=0, kind=0, key=b"k" * 16, boundary_tokens=0, spans=()),)
    if kind is StoreOp:
        return StoreOp(1, arena.arena_id, extents, objects)
    return LoadOp(1, "r", time.monotonic() + 3600, arena.arena_id, extents, objects)


def grant(arena: ArenaMap) -> None:
    np.frombuffer(arena.buffer, dtype="<u8", count=1024, offset=4096)[5] = 4


@pytest.mark.requirement("I1", "P5")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_a_copy_that_fails_half_way_is_reported_when_nothing_moves_any_more(arena: ArenaMap, kind: Any) -> None:
    grant(arena)
    device = LateDevice()
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), device, Places(arena, second_fails=True))
    thread._do(op_of(kind, arena), device.engine_mark())
    ((outcome),) = thread.take_done()
    assert outcome.failed == {0}
    assert not device.in_flight


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_what_is_submitted_begins_behind_what_the_engine_had_queued_then(arena: ArenaMap, kind: Any) -> None:
    grant(arena)
    layer, device = filled((8, BLOCK_BYTES), torch.uint8), LateDevice()
    arena.buffer[arena.layout.data_offset : arena.layout.data_offset + BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
    thread = thread_on(arena, layer, device, Places(arena))
    device.engine = EngineWork(lambda: layer[1].fill_(0x77))
    op: Any = op_of(kind, arena)
    thread.submit([op] if kind is LoadOp else [], [op] if kind is StoreOp else [])
    submitted, device.engine = device.engine, EngineWork(lambda: layer[1].fill_(0x99))  # the next step's
    queued = thread._next()
    assert queued is not None
    thread._do(*queued)
    assert submitted.done and not device.engine.done
    expected = b"\x77" if kind is StoreOp else b"\x55"
    assert stored(arena, 1) == block_bytes_of(layer, 1) == expected * BLOCK_BYTES


@pytest.mark.requirement("I1a")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_what_a_lost_device_was_given_is_never_acknowledged(arena: ArenaMap, kind: Any) -> None:
    grant(arena)
    device = LateDevice(lost=True)
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), device, Places(arena))
    thread._do(op_of(kind, arena), device.engine_mark())
    for _ in range(3):
        assert thread.take_done() == []


def test_a_load_is_waited_for_until_it_is_over_and_no_longer_than_said(arena: ArenaMap) -> None:
    grant(arena)
    layer, device = filled((8, BLOCK_BYTES), torch.uint8), LateDevice()
    thread = thread_on(arena, layer, device, Places(arena))
    load: Any = op_of(LoadOp, arena)
    store: Any = op_of(StoreOp, arena)
    thread.wait_for_loads(3600)
    thread.submit([], [store])
    thread.wait_for_loads(3600)  # for no store
    thread.submit([load], [])
    thread.wait_for_loads(0.001)
    assert thread.take_done() == [], "nobody copies yet"
    copying = threading.Thread(target=thread._run, daemon=True)
    copying.start()
    thread.wait_for_loads(3600)
    assert next(outcome.op for outcome in thread.take_done()) is load
    thread.close()
    copying.join(60)


def test_gpus_are_refused_until_asked_for() -> None:
    views: Any = [SimpleNamespace(device=torch.device("cuda", 0))]
    with pytest.raises(ValueError, match="experimental_cuda = true"):
        rank._copier(views, parse_settings({"endpoint": "unix:///run/kvdepot/kvdepot.sock"}), logging.getLogger())


@pytest.mark.requirement("I3")
def test_a_cpu_rank_on_which_numba_is_not_to_be_had_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CopyError is the reason for which a rank is served without kvdepot."""
    monkeypatch.setitem(sys.modules, "kvdepot.client.copy.cpu", None)  # its import fails
    settings = parse_settings({"endpoint": "unix:///run/kvdepot/kvdepot.sock"})
    with pytest.raises(CopyError, match="numba"):
        rank._copier([torch.empty(4, 4)], settings, logging.getLogger())
