"""The scrubber: reads what lies on the device and verifies it, slowly, before somebody needs it.

A pass goes through the objects in order of their sequence, so that a restart continues where the
last run was. Nothing of it is in the way: it reads with the lowest priority, one object at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

_BATCH: Final = 1024
"""Handles chosen at once: each choice looks at all sequences."""
_OBJECT_BYTES_MIN: Final = 256 << 10
"""What an object counts at least: the loop has as much work with a small one."""
_NOTE_EVERY: Final = 256
"""Objects between two notes of the position in the journal."""
_PASS_SECONDS_MIN: Final = 3600.0
"""From the start of one pass to the next: a small tier is not read all day."""


class Scrubbed(Protocol):
    """The objects that are scrubbed."""

    def after(self, sequence: int, count: int) -> list[int]:
        """Return the handles of the lowest sequences above this one, in order; at most `count`."""

    def sequence(self, handle: int) -> int:
        """Return the sequence of a handle; 0: the handle is no longer in use."""

    def stored_bytes(self, handle: int) -> int: ...


class Scrubber:
    """`run_once` starts what is due; the owner calls it on every tick. `verify(handle, done)` reads one object.

    `note(sequence)` writes the position down. The rate is an average over some seconds; 0: never.
    """

    def __init__(
        self, objects: Scrubbed, *, bytes_per_second: int, clock: Callable[[], float],
        verify: Callable[[int, Callable[[], None]], None], note: Callable[[int], None],
        usable: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._objects = objects
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._verify = verify
        self._note = note
        self._usable = usable
        self._chosen: list[tuple[int, int]] = []  # (sequence, handle), the next one last
        self._due_at = 0.0
        self._busy = False
        self._unnoted = 0
        self._pass_at = clock()
        self.position = 0
        self.passes = 0
        self.verified = 0

    def recover(self, position: int) -> None:
        self.position = position
        self._chosen.clear()

    def run_once(self) -> None:
        """Start the next read, if one is due and none is under way."""
        if not self._bytes_per_second or self._busy or self._clock() < self._due_at or not self._usable():
            return
        handle = self._next()
        if handle is None:
            return
        # From when it was due, not from now: ticks are coarse. But never to make up for more than a second.
        start = max(self._due_at, self._clock() - 1.0)
        self._due_at = start + max(self._objects.stored_bytes(handle), _OBJECT_BYTES_MIN) / self._bytes_per_second
        self._busy = True  # last: what raises before it is tried again at the next tick
        self._verify(handle, self._verified)

    def _verified(self) -> None:
        self._busy = False
        self.verified += 1
        self._unnoted += 1
        if self._unnoted >= _NOTE_EVERY:
            self._write_down()
        self.run_once()

    def _next(self) -> int | None:
        while True:
            if not self._chosen:
                chosen = self._objects.after(self.position, _BATCH)
                self._chosen = [(self._objects.sequence(handle), handle) for handle in reversed(chosen)]
            if not self._chosen:
                self._end_pass()
                return None
            sequence, handle = self._chosen.pop()
            self.position = sequence
            if self._objects.sequence(handle) == sequence:
                return handle

    def _end_pass(self) -> None:
        if self.position:
            self.passes += 1
            self.position = 0
            self._write_down()
            self._due_at = self._pass_at = max(self._pass_at + _PASS_SECONDS_MIN, self._clock())

    def _write_down(self) -> None:
        self._unnoted = 0
        self._note(self.position)
