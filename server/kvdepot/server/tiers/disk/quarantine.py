"""Damaged objects, kept so that somebody can find out why: bounded in bytes, number and age, oldest removed first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Final

from kvdepot.core.allocator import GRANULE_BYTES
from kvdepot.server.io.jobs import FILES_MAX as FILES_PER_JOB_MAX
from kvdepot.server.io.jobs import Answer, Part, Priority, Quarantine, Remove
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk.layout import quarantine_name
from kvdepot.server.tiers.wall_time import unix_seconds
from kvdepot.server.tiers.workers import Hold, Workers

FILES_MAX: Final = 4_096


class QuarantineRoom:
    """Copies damaged objects into files. One at a time: damage comes in heaps, and what serves goes first."""

    def __init__(
        self, workers: Workers, *, capacity_bytes: int, keep_seconds: float, wall_clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._capacity_bytes = capacity_bytes
        self._keep_seconds = keep_seconds
        self._wall_clock = wall_clock
        self._files: deque[tuple[str, int]] = deque()  # oldest first
        self._copying: set[str] = set()  # not answered yet
        self._removing: set[str] = set()  # not answered yet
        self._looking = False
        self._taken: set[str] = set()  # since an opening began to look, or on their way by then
        self._removed: set[str] = set()  # as `_taken`
        self.used_bytes = 0

    def look(self) -> None:
        """Prepare for an opening that is about to list the files. `recover` follows, or another `look`."""
        self._looking = True
        self._taken = set(self._copying)
        self._removed = set(self._removing)

    def recover(self, files: Iterable[tuple[str, int]]) -> None:
        """Take over the files that an opening found.

        The opening may have seen files that were added or removed since `look`, or not, or in part.
        """
        found = {file: _rounded(size) for file, size in files if file not in self._removed}
        found.update((file, size) for file, size in self._files if file in self._taken)
        self._looking = False
        self._taken.clear()
        self._removed.clear()
        self._hold(found)

    def take(self, parts: tuple[Part, ...], sequence: int, reason: IoOutcome, left: Callable[[], None]) -> None:
        """Copy an object; `left` is called when nobody reads its place any more, whether or not there is a copy.

        Nothing has happened where this raises.
        """
        size_bytes = _rounded(sum(part.length for part in parts))
        if size_bytes > self._capacity_bytes:
            left()
            return
        file = quarantine_name(unix_seconds(self._wall_clock), sequence, reason)
        self._files.append((file, size_bytes))
        self._copying.add(file)
        if self._looking:
            self._taken.add(file)
        self.used_bytes += size_bytes
        too_old = self._oldest(self._capacity_bytes, keep=1)

        def ended() -> None:
            self._copying.discard(file)
            left()

        def copy(removed: Answer) -> None:
            if removed.outcome is not IoOutcome.OK:  # what was to make room for it may be there yet
                self._forget(file)
                ended()
                return
            overdue = False

            def answered(answer: Answer) -> None:
                nonlocal overdue
                overdue = answer.outcome is IoOutcome.TIMEOUT
                if not overdue:
                    ended()

            def released() -> None:
                if overdue:  # else it was not copied yet, or is copied again by another worker
                    ended()

            job = Quarantine(parts, file)
            self._workers.submit(job, priority=Priority.TEND, done=answered, loan=Hold(None, released))

        if too_old:
            self._remove(too_old, copy)
        else:
            copy(Answer(IoOutcome.OK))

    def tend(self) -> None:
        """Remove what is too old or too much. What cannot be removed counts as before, until the next time."""
        files = self._oldest(self._capacity_bytes, keep=0)
        oldest = quarantine_name(unix_seconds(lambda: self._wall_clock() - self._keep_seconds), 0, "")
        while self._files and PurePath(self._files[0][0]).name < PurePath(oldest).name:
            files |= self._pop()
        if files:
            self._remove(files, lambda _: None)

    def _oldest(self, capacity_bytes: int, *, keep: int) -> dict[str, int]:
        files: dict[str, int] = {}
        while len(self._files) > keep and (self.used_bytes > capacity_bytes or len(self._files) > FILES_MAX):
            files |= self._pop()
        return files

    def _pop(self) -> dict[str, int]:
        file, size_bytes = self._files.popleft()
        self.used_bytes -= size_bytes
        if self._looking:
            self._removed.add(file)
        return {file: size_bytes}

    def _forget(self, file: str) -> None:
        self._taken.discard(file)
        self._hold({name: size_bytes for name, size_bytes in self._files if name != file})

    def _hold(self, files: Mapping[str, int]) -> None:
        self._files = deque(sorted(files.items()))
        self.used_bytes = sum(files.values())

    def _remove(self, files: Mapping[str, int], done: Callable[[Answer], None]) -> None:
        """Remove any number of files. `done` gets the last answer that was not OK, if there is one."""
        self._removing.update(files)
        names = tuple(files)
        batches = [names[at : at + FILES_PER_JOB_MAX] for at in range(0, len(names), FILES_PER_JOB_MAX)]
        left, result = len(batches), Answer(IoOutcome.OK)

        def answered(batch: tuple[str, ...], answer: Answer) -> None:
            nonlocal left, result
            left -= 1
            self._removing.difference_update(batch)
            if answer.outcome is not IoOutcome.OK:
                result = answer
                self._removed.difference_update(batch)
                self._hold({**dict(self._files), **{file: files[file] for file in batch}})
            if not left:
                done(result)

        for batch in batches:
            self._workers.submit(Remove(batch), priority=Priority.TEND, done=partial(answered, batch))


def _rounded(size_bytes: int) -> int:
    """Return the size with a page for what the file system keeps about a file."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES + GRANULE_BYTES
