"""Telling the directory what requests use, so that the janitor of whichever node spares it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.server.io.jobs import ABSENT, FILES_PER_STAT, UNKNOWN, Answer, Priority, TouchFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.shared.directory import Directory

TOUCH_SECONDS: Final = 3_600
"""A file is touched at most so often by a node; the janitor compares hours."""
_DUE_MAX: Final = 65_536
"""Files that wait; what is used beyond is due at its next use."""


class Recency:
    """One job at a time. `lost` is told of handles whose file is gone.

    Counts `shared_touches.ok` and `.failed`, of files; one that failed is due at its next use.
    """

    def __init__(self, directory: Directory, *, lost: Callable[[Sequence[int]], None]) -> None:
        self._directory = directory
        self._lost = directory.guard.safe("telling what is lost", lost)
        self._due: deque[tuple[int, int]] = deque()  # (handle, which use of it)
        self._touching = False

    def used(self, handles: Sequence[int]) -> None:
        """Note a use of these objects, parents first."""
        if not self._directory.config.touches:
            return
        holdings, now = self._directory.holdings, int(self._directory.clock())
        for handle in handles:
            touched_at = holdings.touched_at(handle)
            if handle in holdings and not 0 <= now - touched_at < TOUCH_SECONDS and len(self._due) < _DUE_MAX:
                holdings.touch(handle, now)
                self._due.append((handle, holdings.use(handle)))
        self.pump()

    def pump(self) -> None:
        """Touch what is due, where that is possible now."""
        if self._touching or not self._directory.data.usable:
            return
        batch: list[tuple[int, int]] = []
        while self._due and len(batch) < FILES_PER_STAT:
            one = self._due.popleft()
            if self._is(*one):
                batch.append(one)
        if not batch:
            return
        job = TouchFiles(tuple(object_file(self._directory.holdings.name(handle)) for handle, _ in batch))
        self._directory.data.submit(job, priority=Priority.TEND, done=lambda answer: self._touched(batch, answer))
        self._touching = True

    def _touched(self, batch: list[tuple[int, int]], answer: Answer) -> None:
        self._touching = False
        lengths = answer.lengths if answer.outcome is IoOutcome.OK else (UNKNOWN,) * len(batch)
        failed = lengths.count(UNKNOWN)
        self._directory.count("shared_touches.ok", len(batch) - failed)
        if failed:
            self._directory.count("shared_touches.failed", failed)
        lost = []
        for (handle, use), length in zip(batch, lengths, strict=True):
            if not self._is(handle, use):
                continue
            if length == ABSENT:
                lost.append(handle)
            elif length == UNKNOWN:
                self._directory.holdings.untouch(handle)
        if lost:
            self._lost(lost)
        self.pump()

    def _is(self, handle: int, use: int) -> bool:
        """Return whether the handle is still that object's."""
        return handle in self._directory.holdings and self._directory.holdings.use(handle) == use
