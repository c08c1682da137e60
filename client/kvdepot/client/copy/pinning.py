"""Which pieces of the arena a device reaches directly.

What a batch touches is pinned first. The rest follows in the background, at a tenth of the time: while one piece is
pinned, the engine's own calls to the driver may wait. Or all of it is pinned at once, while the engine starts and
has nothing to wait for. A former arena's pieces are unpinned at half of the time: its memory is free only when all of
them are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from kvdepot.client.copy.runs import address_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdepot.client.copy.backend import Device
    from kvdepot.client.copy.base import Column

PIECE_BYTES: Final = 32 << 20
"""Pinned at once, some milliseconds in which the engine's thread may wait for the driver. No transfer crosses the end
of a piece: a driver refuses a transfer over memory that was pinned in two calls."""
PREPARE_AGAIN_SECONDS: Final = 0.5
START_PATIENCE_SECONDS: Final = 5.0
"""How long an engine's start waits for the daemon, and for each further piece to get its pages."""
START_AGAIN_SECONDS: Final = 0.05
_PIN_PAUSE_SHARE, _UNPIN_PAUSE_SHARE = 9, 1
"""After a piece the background sleeps so many times what it took. A former arena takes RAM until it is unpinned."""


class Pinnable(Protocol):
    """Memory to pin: the arena."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def pinnable(self) -> memoryview:
        """See Arena."""


class Pins:
    """Pieces of one arena, and of former ones that are not unpinned yet. One thread, which copies."""

    def __init__(self, device: Device, log: logging.Logger, clock: Callable[[], float], *, background: bool) -> None:
        self._device = device
        self._log = log
        self._clock = clock
        self._background = background
        self._arena: Pinnable | None = None
        self._pieces: dict[int, memoryview] = {}  # by number, from the arena's first byte on
        self._former: list[memoryview] = []
        self._next = 0  # the piece that the background pins next
        self._due = 0.0  # not before
        self._refused = False  # another piece of this arena
        self._start_began: float | None = None  # pinning at once
        self._start_moved = 0.0  # when that pinned its last piece

    @property
    def pinned_bytes(self) -> int:
        """Return how much of the arena the device reaches directly."""
        return sum(map(len, self._pieces.values()))

    @property
    def has_former(self) -> bool:
        """Return whether pieces of a former arena are still pinned."""
        return bool(self._former)

    def touch(self, host: memoryview, offsets: Column) -> bool:
        """Pin the pieces in which these runs lie. Return False if one cannot be pinned, or `host` is not the arena.

        No run crosses the end of a piece.
        """
        if self._arena is None or not _same_memory(self._arena.pinnable, host):
            return False
        numbers = np.unique(offsets // PIECE_BYTES).tolist()
        missing = [number for number in numbers if number not in self._pieces]
        return all(map(self._pin, missing))

    def prepare(self, arena: Pinnable | None) -> float | None:
        """Pin or unpin one piece if it is time. Return the seconds until there is more to do; None: never."""
        self._follow(arena)
        share = _UNPIN_PAUSE_SHARE if self._former else _PIN_PAUSE_SHARE
        now = self._clock()
        if now < self._due:
            return self._due - now
        if not self._step():
            return PREPARE_AGAIN_SECONDS if self._background or self._former else None
        took = self._clock() - now
        self._due = now + took * (1 + share)
        return took * share

    def pin_at_once(self, arena: Pinnable | None) -> float | None:
        """Pin the next piece without a pause. Return the seconds until there is more to do; None: this is over.

        It ends when the driver refuses a piece, and when none gets its pages for `START_PATIENCE_SECONDS`. The log
        says once how much was pinned.
        """
        self._follow(arena)
        now = self._clock()
        if self._start_began is None:
            self._start_began = self._start_moved = now
        if self._step():
            self._start_moved = self._clock()
            return 0.0
        size_bytes = arena.size_bytes if arena is not None else 0
        complete = arena is not None and self.pinned_bytes == size_bytes
        if not complete and not self._refused and now - self._start_moved < START_PATIENCE_SECONDS:
            return START_AGAIN_SECONDS
        self._log.info(
            "kvdepot: pinned %d of the arena's %d bytes at start, in %.1f s",
            self.pinned_bytes, size_bytes, self._clock() - self._start_began,
        )  # fmt: skip
        return None

    def _follow(self, arena: Pinnable | None) -> None:
        """Let go of what is pinned of another mapping, piece by piece: a driver pins addresses."""
        if arena is self._arena:
            return
        self._former += self._pieces.values()
        self._pieces = {}
        self._arena, self._next, self._refused = arena, 0, False

    def _step(self) -> bool:
        if self._former:
            self._device.unpin(self._former.pop())
            return True
        if self._arena is None or not self._background:
            return False
        while self._next in self._pieces:
            self._next += 1
        if not self._pin(self._next):
            return False
        self._next += 1
        return True

    def _pin(self, number: int) -> bool:
        """Pin a piece. Return False if it has not all its pages yet, or the driver has refused one before."""
        assert self._arena is not None
        there, begin = self._arena.pinnable, number * PIECE_BYTES
        end = min(begin + PIECE_BYTES, self._arena.size_bytes)
        if self._refused or begin >= end or len(there) < end:
            return False
        piece = there[begin:end]
        if self._device.pin(piece):
            self._pieces[number] = piece
            return True
        self._refused = True
        self._log.warning(
            "kvdepot: %d of the arena's %d bytes can be pinned; copies are slower",
            self.pinned_bytes, self._arena.size_bytes,
        )  # fmt: skip
        return False


def _same_memory(one: memoryview, other: memoryview) -> bool:
    """Return whether both begin at the same byte, and have one."""
    return bool(len(one) and len(other)) and address_of(one) == address_of(other)
