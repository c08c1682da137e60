"""The copying thread while it pins: copies go between two pieces, and no process waits for memory to be unpinned."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import indexed, pinning
from kvdepot.client.vllm.base.operations import LoadOp, StoreOp

from benchmarks.day_one.copies import filled
from tests.fakes.late_device import LateDevice
from tests.rigs.copy_rank import BLOCK_BYTES, BLOCKS, Rank
from tests.rigs.patience import patient, wait_until
from tests.rigs.pinned_process import PIECES, UNPIN_SECONDS

PIECE = 1 << 20


class GatedDevice(LateDevice):
    """The driver pins a piece when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_through = threading.Semaphore(1)
        self.asked = 0

    def pin(self, host: memoryview) -> bool:
        self.asked += 1
        assert self.let_through.acquire(timeout=patient(20))
        return super().pin(host)


@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_a_copy_that_comes_while_the_arena_is_pinned_begins_after_one_piece(
    arena: ArenaMap, kind: type[LoadOp | StoreOp], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device_module, indexed, pinning):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    device = GatedDevice()
    rank = Rank(device, arena, filled((BLOCKS, BLOCK_BYTES), torch.uint8), in_background=True)
    rank.thread._thread.start()
    wait_until(lambda: device.asked == 2, "the second piece")
    rank.submit(kind, 8, 0)  # into the first piece, which is pinned
    device.let_through.release()
    wait_until(lambda: device.ran == 1, "the copy")
    assert device.pinned == [PIECE, PIECE]
    device.let_through.release(PIECES)
    rank.thread.close()


class TimedDevice(LateDevice):
    """To pin a piece takes time, by a clock of its own."""

    now = busy = 0.0

    def pin(self, host: memoryview) -> bool:
        self.now += 0.003
        self.busy += 0.003
        return super().pin(host)


@pytest.mark.requirement("G2")
def test_a_thread_that_always_has_a_store_to_do_pins_the_rest_of_the_arena_at_its_leisure(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device_module, indexed, pinning):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    device, layer = TimedDevice(), filled((BLOCKS, BLOCK_BYTES), torch.uint8)
    rank = Rank(device, arena, layer, in_background=True, clock=lambda: device.now)
    pieces = arena.size_bytes // PIECE
    rank.submit(StoreOp, 8, 0)
    for _ in range(4 * pieces):
        rank.submit(StoreOp, 8, 0)  # so the next one is there when this one is done
        rank.run_next()
        device.now += 0.010
        assert device.busy <= 0.1 * device.now + 0.003
    assert device.pinned == [PIECE] * pieces
    assert len(rank.thread.take_done()) == 4 * pieces


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "not closed"])
def test_a_process_that_has_pinned_much_ends_at_once(closed: bool) -> None:
    """What it has pinned goes with it. To unpin it piece by piece would take much longer than the test allows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rigs.pinned_process", *["close"] * closed],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{PIECES} pieces are pinned\n"
        began = time.monotonic()
        _, errors = process.communicate(timeout=patient(20))
        took = time.monotonic() - began
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert took < PIECES * UNPIN_SECONDS / 4
