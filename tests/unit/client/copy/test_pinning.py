"""What a copy touches is pinned first, the rest at a tenth of the time, and a former arena is let go as slowly."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from kvdepot.client.arena_map import Population
from kvdepot.client.copy import pinning
from kvdepot.client.copy.pinning import PREPARE_AGAIN_SECONDS, Pins

from tests.fakes.late_device import LateDevice
from tests.rigs.memory_arena import ARENA_BYTES, make_arena

PIECE = ARENA_BYTES // 16
TOOK_SECONDS = 0.003  # what pinning or unpinning a piece takes here


class SlowDevice(LateDevice):
    """Each call to the driver takes time."""

    now = 100.0
    busy = 0.0

    def pin(self, host: memoryview) -> bool:
        self._work()
        return super().pin(host)

    def unpin(self, host: memoryview) -> None:
        self._work()
        super().unpin(host)

    def _work(self) -> None:
        self.now += TOOK_SECONDS
        self.busy += TOOK_SECONDS


class PinnedArena:
    """Pins, and an arena whose pages come one after the other."""

    def __init__(self, arena_id: int, device: SlowDevice, pins: Pins | None = None, *, background: bool = True) -> None:
        self.device = device
        self.arena, self.descriptor = make_arena(arena_id=arena_id)
        self.arena.buffer[:] = bytes(self.arena.size_bytes)  # so that it has its pages
        self.population = Population(self.arena, os.dup(self.descriptor))
        self.pins = pins or Pins(device, logging.getLogger("test.pins"), lambda: device.now, background=background)

    def populate(self, size_bytes: int = ARENA_BYTES) -> None:
        self.population.step(size_bytes)

    def touch(self, *pieces: int) -> bool:
        return self.pins.touch(self.arena.buffer, np.array(pieces, dtype=np.int64) * PIECE + 100)

    def run(self, seconds: float) -> None:
        """The copying thread has nothing to do but this."""
        until = self.device.now + seconds
        while self.device.now < until:
            pause = self.pins.prepare(self.arena)
            self.device.now = min(until, self.device.now + (until if pause is None else pause))

    def close(self) -> None:
        self.population.close()
        self.arena.close()
        os.close(self.descriptor)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedArena]:
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    made = PinnedArena(7, SlowDevice())
    yield made
    made.close()


def test_the_arena_is_pinned_piece_by_piece_as_it_is_populated(one: PinnedArena) -> None:
    assert one.pins.prepare(None) == one.pins.prepare(one.arena) == PREPARE_AGAIN_SECONDS
    one.populate(ARENA_BYTES // 2)
    one.run(10)
    assert one.device.pinned == [PIECE] * 8
    one.populate(ARENA_BYTES // 2)
    one.run(10)
    assert one.device.pinned == [PIECE] * 16
    assert one.pins.pinned_bytes == ARENA_BYTES


def test_the_background_takes_a_tenth_of_the_time(one: PinnedArena) -> None:
    one.populate()
    began = one.device.now
    while len(one.device.pinned) < 16:
        pause = one.pins.prepare(one.arena)
        assert pause is not None
        one.device.now += min(pause, 0.001)  # somebody wakes the thread early, each time
    assert one.device.busy <= 0.11 * (one.device.now - began)


def test_what_a_batch_touches_is_pinned_before_it_travels_wherever_it_lies(one: PinnedArena) -> None:
    one.populate()
    one.pins.prepare(one.arena)
    one.device.pinned.clear()
    assert one.touch(9, 3, 9)
    assert len(one.device.pinned) == 2
    assert one.touch(3, 9)
    assert len(one.device.pinned) == 2, "once"
    one.run(10)
    assert len(one.device.pinned) == 15, "the rest, and nothing twice"


def test_a_store_every_ten_milliseconds_does_not_keep_the_rest_from_being_pinned(one: PinnedArena) -> None:
    """The thread prepares between operations too, when it is time."""
    one.populate()
    for number in range(100):
        one.pins.prepare(one.arena)
        assert one.touch(number % 2)
        one.device.now += 0.010
    assert len(one.device.pinned) == 16


def test_nothing_is_pinned_in_the_background_when_it_is_off(one: PinnedArena) -> None:
    off = PinnedArena(8, one.device, background=False)
    off.populate()
    assert off.pins.prepare(off.arena) is None
    assert off.touch(4) and len(one.device.pinned) == 1
    off.close()


def test_pieces_without_pages_are_not_pinned(one: PinnedArena) -> None:
    """Pinning would make the pages here, charged to the engine."""
    one.populate(ARENA_BYTES // 2)
    one.pins.prepare(one.arena)
    assert one.touch(7) and not one.touch(7, 8)


def test_memory_that_is_not_the_arena_is_never_taken_for_pinned(one: PinnedArena) -> None:
    other = memoryview(bytearray(ARENA_BYTES))
    assert not one.pins.touch(other, np.array([0])), "no arena yet"
    one.populate()
    one.pins.prepare(one.arena)
    assert not one.pins.touch(other, np.array([0]))
    assert not one.pins.touch(memoryview(b""), np.array([0]))


def test_a_former_arena_is_unpinned_at_half_of_the_time_and_copies_to_the_next_one_go_between(one: PinnedArena) -> None:
    one.populate()
    one.run(10)
    assert len(one.device.pinned) == 16
    other = PinnedArena(8, one.device, one.pins)
    other.populate()
    one.device.busy, began = 0.0, one.device.now
    other.pins.prepare(other.arena)
    assert len(one.device.pinned) == 15 and one.pins.pinned_bytes == 0
    assert other.touch(5), "a copy waits for its own piece alone"
    assert one.pins.has_former
    other.run(10)
    assert (one.pins.has_former, one.device.pinned) == (False, [PIECE] * 16)
    assert other.pins.pinned_bytes == ARENA_BYTES
    assert one.device.busy <= 0.51 * (one.device.now - began)
    other.close()


def test_another_mapping_of_the_same_arena_is_pinned_anew(one: PinnedArena) -> None:
    """The connection to the daemon was lost and is back: a driver pins addresses, and these are others."""
    one.populate()
    one.run(10)
    again = PinnedArena(7, one.device, one.pins)
    again.populate()
    again.run(10)
    assert not one.pins.has_former
    assert again.pins.pinned_bytes == ARENA_BYTES
    assert again.touch(3)
    assert not one.touch(3)
    again.close()


def test_where_pinning_is_refused_it_is_not_tried_again_before_another_arena(
    one: PinnedArena, caplog: pytest.LogCaptureFixture
) -> None:
    one.populate()
    one.pins.prepare(one.arena)
    one.device.pins_refused = True
    one.run(1)
    one.device.pins_refused = False
    one.run(10)
    assert one.device.pinned == [PIECE], "what is pinned stays of use"
    assert one.touch(0) and not one.touch(1)
    (told,) = caplog.messages
    assert f"{PIECE} of the arena's" in told
    other = PinnedArena(8, one.device, one.pins)
    other.populate()
    other.run(10)
    assert one.device.pinned == [PIECE] * 16
    other.close()


def start(one: PinnedArena, *, until: float = 60.0, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """An engine's start waits for this. Return whether it goes on."""
    began = one.device.now
    while one.device.now < began + until:
        pause = one.pins.pin_at_once(one.arena)
        if pause is None:
            return True
        one.device.now += pause
        meanwhile()
    return False


def test_a_start_pins_the_whole_arena_without_pauses_and_says_so_once(
    one: PinnedArena, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one.populate()
    began = one.device.now
    assert start(one)
    assert one.device.pinned == [PIECE] * 16, "cut where a transfer is"
    assert one.device.now == pytest.approx(began + 16 * TOOK_SECONDS)
    assert caplog.messages == [f"kvdepot: pinned {ARENA_BYTES} of the arena's {ARENA_BYTES} bytes at start, in 0.0 s"]
    assert one.touch(0, 15) and len(one.device.pinned) == 16


def test_a_start_waits_for_pages_that_still_come(one: PinnedArena) -> None:
    pieces = iter(range(16))

    def populate() -> None:
        one.device.now += pinning.START_PATIENCE_SECONDS / 2
        if next(pieces, None) is not None:
            one.populate(PIECE)

    assert start(one, meanwhile=populate)
    assert one.pins.pinned_bytes == ARENA_BYTES


@pytest.mark.parametrize("there", [0, 4])
def test_a_start_does_not_wait_for_pages_that_never_come_and_the_background_pins_them_later(
    one: PinnedArena, caplog: pytest.LogCaptureFixture, there: int
) -> None:
    caplog.set_level(logging.INFO)
    one.populate(there * PIECE)
    assert start(one, until=2 * pinning.START_PATIENCE_SECONDS)
    assert caplog.messages[0].startswith(f"kvdepot: pinned {there * PIECE} of the arena's {ARENA_BYTES} bytes")
    one.populate()
    one.run(10)
    assert one.pins.pinned_bytes == ARENA_BYTES


def test_a_start_without_a_daemon_goes_on(one: PinnedArena) -> None:
    began = one.device.now
    while (pause := one.pins.pin_at_once(None)) is not None:
        one.device.now += pause
    assert one.device.now <= began + pinning.START_PATIENCE_SECONDS + pinning.START_AGAIN_SECONDS


def test_a_start_ends_where_pinning_is_refused(one: PinnedArena, caplog: pytest.LogCaptureFixture) -> None:
    one.populate()
    one.device.pins_refused = True
    began = one.device.now
    assert start(one) and one.device.now == began + TOOK_SECONDS, "one try"
    assert "can be pinned; copies are slower" in caplog.text
    one.device.pins_refused = False
    one.run(10)
    assert not one.device.pinned
