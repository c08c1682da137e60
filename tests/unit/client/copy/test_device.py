"""Copies by way of a device that does its work late: what may overlap does, and nothing is believed too early."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import indexed, pinning
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, CopyError, Direction
from kvdepot.client.copy.cuda import CudaDevice
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base.guard import Failures
from kvdepot.client.vllm.base.operations import LoadOp, ObjectCopy, StoreOp
from kvdepot.client.vllm.base.settings import parse_settings
from kvdepot.client.vllm.base.stats import KVDepotStats
from kvdepot.client.vllm.worker import rank
from kvdepot.client.vllm.worker.copy_thread import CopyThread
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.worker import WorkerSide

from benchmarks.day_one.copies import block_bytes_of, filled
from tests.fakes.late_device import EngineWork, LateDevice
from tests.rigs.memory_arena import granted
from tests.rigs.patience import patient, wait_until

BLOCK_BYTES = 2048


def batch_of(arena: ArenaMap, blocks: list[int], at: int = 0) -> CopyBatch:
    """Blocks of layer 0, end to end in the arena from `at` on."""
    count = len(blocks)
    offsets = at + np.arange(count, dtype=np.int64) * BLOCK_BYTES
    zeros = np.zeros(count, dtype=np.int64)
    return CopyBatch(zeros, np.array(blocks, dtype=np.int64), zeros, offsets, zeros + BLOCK_BYTES)


def stored(arena: ArenaMap, count: int, at: int = 0) -> bytes:
    begin = at
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
    arena.buffer[:BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
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
    numbers = indexed.as_numbers(layer)
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
    copier = DeviceCopier([layer], LateDevice())
    copier.copy(arena, CopyBatch(np.zeros(4, dtype=np.int64), blocks, skips, offsets, lengths), Direction.STORE)
    copier.wait()
    assert stored(arena, 2, 16384) == block_bytes_of(layer, 3) + block_bytes_of(layer, 4)
    assert stored(arena, 1, 65536)[:half] + stored(arena, 1, 8192)[:half] == block_bytes_of(layer, 3)


def test_transfers_are_as_long_as_pinned_pieces_let_them_be(arena: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "PIECE_BYTES", 8192)
    copies = DeviceCopier([filled((64, BLOCK_BYTES), torch.uint8)], LateDevice())._indexed
    _, transfers, size_bytes = copies._plan(batch_of(arena, list(range(10)), at=2048))
    assert size_bytes == 10 * BLOCK_BYTES
    assert sum(one.length for one in transfers) == size_bytes
    begin = 2048
    assert [one.offset for one in transfers] == [begin, *range(-(-begin // 8192) * 8192, begin + size_bytes, 8192)]
    assert all(one.offset // 8192 == (one.offset + one.length - 1) // 8192 for one in transfers)


def usable(layers: list[torch.Tensor], device: LateDevice, arena: ArenaMap, way: Way | None = None) -> DeviceCopier:
    """A copier that may pin all of the arena."""
    copier = DeviceCopier(layers, device, way=way, pin_in_background=False)
    arena.populated(arena.size_bytes)
    copier.enter()
    copier.prepare(arena)
    return copier


@pytest.mark.parametrize("direction", Direction)
def test_long_runs_go_straight_in_one_call(arena: ArenaMap, direction: Direction) -> None:
    device = LateDevice()
    layer = filled((8, device_module.BATCH_RUN_BYTES), torch.uint8)
    copier = usable([layer], device, arena)
    blocks = np.array([6, 1, 3], dtype=np.int64)
    zeros = np.zeros(3, dtype=np.int64)
    lengths = zeros + device_module.BATCH_RUN_BYTES
    offsets = np.arange(3) * 2 * device_module.BATCH_RUN_BYTES
    copier.copy(arena, CopyBatch(zeros, blocks, zeros, offsets, lengths), direction)
    assert device.transfers == [(True, 3)] and not device.shuffles


@pytest.mark.parametrize("direction", Direction)
def test_short_runs_are_gathered_by_one_launch_and_travel_as_long_ones(arena: ArenaMap, direction: Direction) -> None:
    device = LateDevice()
    copier = usable([filled((64, BLOCK_BYTES), torch.uint8)], device, arena)
    copier.copy(arena, batch_of(arena, [9, 4, 5, 30]), direction)
    assert (device.transfers, device.shuffles) == ([(True, 1)], [3]), "blocks 4 and 5 lie together on both sides"


@pytest.mark.parametrize("ways", [{Way.TORCH}, {Way.TORCH, Way.BATCH}])
def test_a_device_that_has_neither_way_copies_by_torch(arena: ArenaMap, ways: set[Way]) -> None:
    device = LateDevice(ways=frozenset(ways))
    layer = filled((64, BLOCK_BYTES), torch.uint8)
    copier = usable([layer], device, arena)
    copier.copy(arena, batch_of(arena, [9, 4]), Direction.STORE)
    copier.move([0], np.array([3]), np.array([6]))
    copier.wait()
    assert not device.transfers and not device.shuffles
    assert stored(arena, 2) == block_bytes_of(layer, 9) + block_bytes_of(layer, 4)


@pytest.mark.parametrize("way", [None, Way.BATCH])
def test_what_is_not_pinned_never_goes_by_a_batch_call(arena: ArenaMap, way: Way | None) -> None:
    """A driver's batch call takes pinned memory only: other memory might be read when the caller has moved on."""
    device = LateDevice(pins_refused=True)
    layer = filled((8, device_module.BATCH_RUN_BYTES), torch.uint8)
    copier = usable([layer], device, arena, way)
    batch = replace(batch_of(arena, [5]), lengths=np.array([device_module.BATCH_RUN_BYTES]))
    copier.copy(arena, batch, Direction.STORE)
    copier.wait()
    assert device.transfers == [(False, 1)] and device.shuffles == [1]
    assert stored(arena, device_module.BATCH_RUN_BYTES // BLOCK_BYTES) == block_bytes_of(layer, 5)


def test_a_load_waits_for_no_store(arena: ArenaMap) -> None:
    layer, device = filled((8, BLOCK_BYTES), torch.uint8), LateDevice()
    copier = usable([layer], device, arena)
    arena.buffer[:BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
    copier.copy(arena, batch_of(arena, [1, 2], at=8192), Direction.STORE)
    copier.copy(arena, batch_of(arena, [3]), Direction.LOAD)
    copier.wait(Direction.LOAD)
    assert (layer[3] == 0x55).all() and device.in_flight == 1
    assert stored(arena, 1, at=8192) != block_bytes_of(layer, 1)
    copier.wait(Direction.STORE)
    assert stored(arena, 1, at=8192) == block_bytes_of(layer, 1)


@pytest.mark.requirement("I1")
def test_what_was_queued_before_a_batch_failed_is_waited_for(arena: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, device = filled((64, BLOCK_BYTES), torch.uint8), LateDevice()
    copier = usable([layer], device, arena, Way.GATHER)

    def refused(*_: Any) -> None:
        raise RuntimeError("launch failed")

    arena.buffer[:BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
    monkeypatch.setattr(device, "shuffle", refused)
    with pytest.raises(RuntimeError, match="launch failed"):
        copier.copy(arena, batch_of(arena, [3]), Direction.LOAD)
    assert device.queues[Direction.LOAD].work, "its transfer is on its way"
    copier.wait(Direction.LOAD)
    assert not device.queues[Direction.LOAD].work


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
    words = [0, 5, 0, 2 * BLOCK_BYTES, 4]
    extents = np.array(words, dtype="<u8").tobytes()
    objects = (ObjectCopy(index=0, kind=0, key=b"k" * 16, boundary_tokens=0, spans=()),)
    if kind is StoreOp:
        return StoreOp(1, arena.arena_id, extents, objects)
    return LoadOp(1, "r", time.monotonic() + 3600, arena.arena_id, extents, objects)


def grant(arena: ArenaMap) -> None:
    granted(arena)[5] = 4


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
    arena.buffer[:BLOCK_BYTES] = b"\x55" * BLOCK_BYTES
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


@pytest.mark.requirement("I1a", "I3")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_a_lost_device_is_given_nothing_more_and_is_counted_and_named(
    arena: ArenaMap, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    grant(arena)
    device = LateDevice(lost=True)
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), device, Places(arena))
    side = WorkerSide(0, thread._attachment, thread, RankLayers((), ()))
    thread._do(op_of(LoadOp, arena), device.engine_mark())
    started, op = device.started, replace(op_of(kind, arena), op_id=2)
    device.lost = False
    thread._do(op, device.engine_mark())
    ((outcome),) = thread.take_done()
    assert outcome.op is op and outcome.failed == {0} and device.started == started
    assert "wait failed (RuntimeError: the device is lost)" in caplog.text
    assert caplog.text.count("copies nothing more") == 1
    for counted in (1, None):
        stats = KVDepotStats()
        side.add_stats(stats)
        assert stats.data["counters"].get("lost_devices", {}).get("") == counted


def test_an_object_without_extents_fails_alone(arena: ArenaMap) -> None:
    grant(arena)
    device = LateDevice()
    layer = filled((8, BLOCK_BYTES), torch.uint8)
    thread = thread_on(arena, layer, device, Places(arena))
    store: Any = op_of(StoreOp, arena)
    store = replace(store, objects=(*store.objects, replace(store.objects[0], index=1)))
    thread._do(store, device.engine_mark())
    ((outcome),) = thread.take_done()
    assert outcome.failed == {1}
    assert stored(arena, 1) == block_bytes_of(layer, 1)


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
    copying.join(patient(60))


@pytest.mark.requirement("I3")
@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_on_a_device_that_cannot_be_used_every_copy_fails_at_once(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    grant(arena)

    def no_driver(_: LateDevice) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(LateDevice, "enter", no_driver)
    device = LateDevice()
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), device, Places(arena))
    thread.start(thread._places)  # type: ignore[arg-type]
    op: Any = op_of(kind, arena)
    thread.submit([op] if kind is LoadOp else [], [op] if kind is StoreOp else [])
    wait_until(lambda: thread._done, "the copy is over")
    (outcome,) = thread.take_done()
    assert outcome.failed == {0}
    assert thread._failures.counts == {"enter:OSError": 1}
    assert not device.started, "it was given nothing"
    thread.close()


@pytest.mark.parametrize("over", [False, True], ids=["arena there", "arena gone"])
def test_close_does_not_wait_until_the_arena_is_unpinned(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """16,384 pieces of 3 ms each at a tenth of the time are minutes."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4096)
    unpinning, may_go_on = threading.Event(), threading.Event()

    def slow(self: LateDevice, host: memoryview) -> None:
        unpinning.set()
        assert may_go_on.wait(patient(20))

    monkeypatch.setattr(LateDevice, "unpin", slow)
    device = LateDevice()
    arena.populated(arena.size_bytes)
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), device, Places(arena))
    thread.start(thread._places)  # type: ignore[arg-type]
    wait_until(lambda: device.pinned, "a piece is pinned")
    if over:
        arena.close()
    thread.close()
    assert unpinning.wait(patient(20)) and thread.over and not device.left
    may_go_on.set()


@pytest.mark.requirement("I3")
def test_a_start_that_begins_to_wait_while_preparing_fails_does_not_wait_for_ever(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = thread_on(arena, filled((8, BLOCK_BYTES), torch.uint8), LateDevice(), Places(arena))
    calls: list[bool] = []

    def prepare(_: DeviceCopier, __: object, *, at_once: bool = False) -> None:
        calls.append(at_once)
        if len(calls) == 1:
            thread._at_once = True  # as `prepare_at_once` does meanwhile
        if not at_once:
            raise RuntimeError("the driver says no")

    monkeypatch.setattr(DeviceCopier, "prepare", prepare)
    running = threading.Thread(target=thread._next, daemon=True)
    running.start()
    assert thread._prepared.wait(patient(20))
    assert calls[:2] == [False, True]
    thread.close()
    running.join(patient(20))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"way": None, "pin_in_background": True}),
        ({"cuda_copies": "auto", "pin": "background"}, {"way": None, "pin_in_background": True}),
        ({"cuda_copies": "batch", "pin": "start"}, {"way": Way.BATCH, "pin_in_background": True}),
        ({"cuda_copies": "gather", "pin": "off"}, {"way": Way.GATHER, "pin_in_background": False}),
        ({"cuda_copies": "torch"}, {"way": Way.TORCH, "pin_in_background": True}),
    ],
    ids=lambda value: ", ".join(map(str, value.values())) or "none",
)
def test_gpus_need_no_setting_and_have_what_is_set(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], wanted: dict[str, Any]
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank, "DeviceCopier", lambda *arguments, **options: made.append((*arguments, options)))
    views: Any = [SimpleNamespace(device=torch.device("cuda", 1))]
    parsed = parse_settings({"endpoint": "unix:///run/kvdepot/kvdepot.sock", **settings})
    rank._copier(views, parsed, logging.getLogger())
    ((copied, device, _, options),) = made
    assert copied is views and isinstance(device, CudaDevice)
    assert options == wanted


@pytest.mark.requirement("I3")
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["xpu:0"], "copies to and from xpu devices are not supported"),
        (["mps"], "copies to and from mps devices are not supported"),
        (["cuda:1", "cuda:0"], r"several devices \(cuda:0, cuda:1\)"),
        (["cpu", "xpu:0"], r"several devices \(cpu, xpu:0\)"),
    ],
)
def test_devices_that_nobody_has_tried_are_refused_by_name(devices: list[str], message: str) -> None:
    """A CopyError is the reason for which a rank is served without kvdepot."""
    views: Any = [SimpleNamespace(device=torch.device(device)) for device in devices]
    settings = parse_settings({"endpoint": "unix:///run/kvdepot/kvdepot.sock"})
    with pytest.raises(CopyError, match=message):
        rank._copier(views, settings, logging.getLogger())


@pytest.mark.requirement("I3")
def test_a_cpu_rank_on_which_numba_is_not_to_be_had_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CopyError is the reason for which a rank is served without kvdepot."""
    monkeypatch.setitem(sys.modules, "kvdepot.client.copy.cpu", None)  # its import fails
    settings = parse_settings({"endpoint": "unix:///run/kvdepot/kvdepot.sock"})
    with pytest.raises(CopyError, match="numba"):
        rank._copier([torch.empty(4, 4)], settings, logging.getLogger())
