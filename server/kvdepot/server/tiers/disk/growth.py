"""Segments are made when they are first needed, one in advance. Without room for more, the tier uses what is there.

A worker that dies or hangs over it says nothing about the room: that is tried again soon, some times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.server.io.jobs import Allocate, Answer, Priority
from kvdepot.server.platform.file_room import NOT_TRIED
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk.layout import DiskLayout, segment_name
from kvdepot.server.tiers.disk.space import Space
from kvdepot.server.tiers.workers import Hold, Workers

_RETRY_SECONDS: Final = 15.0
_RETRY_SECONDS_MAX: Final = 240.0
"""How rarely what had to be tried is tried again: a quota that the room does not show had its last byte taken."""
_RETRY_SECONDS_MIN: Final = 0.5
_FAILURES_MAX: Final = 4


class Growth:
    """The maker of a disk tier's segments.

    `grown` is called when there is more space, or when it is known that there is not.
    """

    def __init__(
        self, workers: Workers, space: Space, layout: DiskLayout, *,
        clock: Callable[[], float], grown: Callable[[], None],
    ) -> None:  # fmt: skip
        self._workers = workers
        self._space = space
        self._layout = layout
        self._clock = clock
        self._grown = grown
        self._under_way = False
        self._number = 0  # of the last segment that a worker was asked for
        self._hold = Hold(None)
        self._retry_at = 0.0
        self._failures = 0  # in a row
        self.segments = 0
        self.refused = ""
        """Why the last segment could not be made; empty while all is well."""

    @property
    def making(self) -> int:
        """Return the segment that a worker may be making; -1: none. It may find no room, and remove the file."""
        return self._number if self._under_way or self._hold.workers else -1

    @property
    def left_bytes(self) -> int:
        """Return the bytes that can still be made, as far as is known."""
        return 0 if self.refused else self._layout.data_bytes - self.ready_bytes

    @property
    def ready_bytes(self) -> int:
        return min(self.segments * self._layout.segment_bytes, self._layout.data_bytes)

    def start(self, layout: DiskLayout, segments: int) -> None:
        self._layout = layout
        self.segments = segments
        self._worked()

    def run_once(self, wanted_bytes: int = 0) -> None:
        """Make the next segment if less than one is free, or less than what is waited for.

        A segment that was refused is tried again in any case. Otherwise a tier that has freed much would never say that
        there is room again, nor take it.
        """
        if self.making >= 0 or self.segments >= self._layout.segments or not self._workers.usable:
            return
        if self._clock() < self._retry_at:
            return
        if not self.refused and self._space.free_bytes >= max(wanted_bytes, self._layout.segment_bytes):
            return
        number = self._number = self.segments
        job = Allocate(segment_name(number), self._layout.length_of(number), self._layout.beside_bytes)
        self._hold = Hold(None)
        self._workers.submit(
            job, priority=Priority.STORE, done=lambda answer: self._allocated(number, answer), loan=self._hold
        )
        self._under_way = True

    def _allocated(self, number: int, answer: Answer) -> None:
        self._under_way = False
        if answer.outcome is IoOutcome.CANCELLED:
            return
        if answer.outcome is IoOutcome.OK:
            self._worked()
            if number == self.segments:  # else an opening has counted what there is meanwhile
                self.segments += 1
            self._space.grow(self.ready_bytes)
        else:
            self._failed(answer)
        self._grown()

    def _worked(self) -> None:
        self._failures = 0
        self._retry_at = 0.0
        self.refused = ""

    def _failed(self, answer: Answer) -> None:
        """Note a failure. If there is no room, `refused` is set at once; otherwise only after some failures."""
        full = answer.outcome is IoOutcome.NO_SPACE
        if full and NOT_TRIED in answer.detail:
            seconds = _RETRY_SECONDS
        elif full:
            seconds = min(_RETRY_SECONDS * 2**self._failures, _RETRY_SECONDS_MAX)
        else:
            seconds = min(_RETRY_SECONDS_MIN * 2**self._failures, _RETRY_SECONDS)
        self._retry_at = self._clock() + seconds
        self._failures += 1
        if full or self._failures >= _FAILURES_MAX:
            self.refused = f"segment {self.segments} cannot be made: {answer.detail or answer.outcome}"
