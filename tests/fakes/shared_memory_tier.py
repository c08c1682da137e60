"""A shared tier whose medium is a dict that several tiers use, with every answer under a test's control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectDamageError, ObjectHeader
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Loan, ObjectName, Read, Stored, TierTraits
from kvdepot.server.storage.found import FoundObjects

from tests.fakes.memory_tier import Job, MemoryTier, Unlent

_LOOKED_AT = 0xFFFF_FFFE
"""No handle, of a job that reads a file all the same."""
File = tuple[bytes, bytes, int]
"""(namespace, key, kind): where an object lies."""


def _ignored(_: Read) -> None:
    """Nobody waits for it."""


def file_of(name: ObjectName) -> File:
    return name.namespace, name.key, name.kind


@dataclass
class SharedMedium:
    """A directory of files. Anybody may add to it and take away from it at any time."""

    files: dict[File, bytes] = field(default_factory=dict)
    quarantined: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Search:
    """A look-up that was asked for."""

    names: list[ObjectName]
    done: Callable[[], None]


class SharedMemoryTier(MemoryTier):
    """Implements `SharedTier`. It has no negative cache: what the engine asks for twice is searched for twice.

    `searches` wait as jobs do; `searched` and `told` are what it was asked for, `already_there` writes for nothing.
    """

    def __init__(self, *args: Any, shared: SharedMedium, handles_max: int = 256, **options: Any) -> None:
        super().__init__(*args, handles_max=handles_max, capacity_bytes=handles_max, **options)
        self.traits = TierTraits(shared=True)
        self.shared = shared
        self.searches: list[Search] = []
        self.searched: list[list[ObjectName]] = []
        self.again: list[bool] = []  # whether they were asked for in spite of their absence a moment ago
        self.source_id = 0
        self.told: list[list[ObjectName]] = []
        self.already_there = 0
        self._doubtful: dict[File, tuple[int, ...]] = {}  # checksums that reads refuse
        self._names: dict[int, ObjectName] = {}  # by handle
        self._by_file: dict[File, int] = {}
        self._used = 0

    @property
    def handles(self) -> set[int]:
        return set(self._names)

    def cost_bytes(self, raw_bytes: int) -> int:
        return 1

    def reads_from(self, source_id: int) -> bool:
        return self.source_id == source_id

    def look_up(self, names: Sequence[ObjectName], done: Callable[[], None], *, again: bool = False) -> None:
        with self._may_raise("look_up"):
            if not self.readable:
                done()
                return
            assert not {file_of(name) for name in names} & self._by_file.keys(), "it has a handle"
            self.searched.append(list(names))
            self.again.append(again)
            search = Search(list(names), done)
            self.searches.append(search)
            if self.automatic:
                self.search(search)

    def used(self, handles: Sequence[int]) -> None:
        with self._may_raise("used"):
            self.told.append([self._names[handle] for handle in handles])

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        with self._may_raise("read"):
            if not self.readable:
                done(Read(IoOutcome.CANCELLED))
                return
            if self._names[handle] != name:
                self.drop(handle)
                done(Read(IoOutcome.IDENTITY))
                return
            self._add(Job(name, extents, loan, done, handle=handle))

    def _named(self, handle: int) -> ObjectName:
        return self._names[handle]

    def drop(self, handle: int) -> None:
        """Only here."""
        del self._by_file[file_of(self._names.pop(handle))]
        self._used -= 1

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """A read into nothing that waits as others do. A handle of the file is of no use from then on.

        Until the job has told what is there, reads refuse these bytes.
        """
        self._doubtful[file_of(name)] = (*raw_sums, *self._doubtful.get(file_of(name), ()))
        job = Job(name, (), Unlent(), _ignored, handle=_LOOKED_AT, doubtful=tuple(raw_sums))
        self._add(job)

    def stored(self, handle: int) -> Stored:
        return Stored(self._names[handle].raw_bytes, 0, None)

    # The test's part

    def open(self) -> None:
        super().open()
        assert not self._names, "it knows what it was asked for, and nothing else"

    def search(self, search: Search, *, answered: bool = True) -> None:
        """Answer it, with what is there by now, or with nothing because the medium did not answer."""
        self.searches.remove(search)
        found = [name for name in search.names if file_of(name) in self.shared.files] if answered else []
        found = [name for name in found if file_of(name) not in self._by_file][: self.handles_max - self._used]
        if found and self._listener is not None:
            self._used += len(found)
            self._listener.found(self, FoundObjects.of([(self._take_handle(name), name) for name in found]))
        search.done()

    def run(self) -> int:
        done = super().run()
        while self.searches:
            self.search(self.searches[0])
            done += 1 + self.run()
        return done

    def stop(self) -> None:
        super().stop()
        for search in list(self.searches):
            self.search(search, answered=False)

    # Within

    def _take_handle(self, name: ObjectName) -> int:
        handle = next(number for number in range(self.handles_max) if number not in self._names)
        self._names[handle] = name
        self._by_file[file_of(name)] = handle
        return handle

    def _finish_read(self, job: Job) -> None:
        blob = self.shared.files.get(file_of(job.name))
        if blob is None:
            self._end(job, IoOutcome.GONE, lent=True)
        elif self._foreign(job.name):
            self._end(job, IoOutcome.FOREIGN, lent=True)
        else:
            job.snapshot = blob
            job.doubtful = (*job.doubtful, *self._doubtful.get(file_of(job.name), ()))
            super()._finish_read(job)

    def _finish_write(self, job: Job) -> None:
        if self._foreign(job.name):
            self._end(job, IoOutcome.FOREIGN, lent=True)
        else:
            super()._finish_write(job)

    def _note_read(self, job: Job, outcome: IoOutcome) -> None:
        file = file_of(job.name)
        if job.handle == _LOOKED_AT and outcome in (*DAMAGED, IoOutcome.OK, IoOutcome.GONE, IoOutcome.FOREIGN):
            self._doubtful.pop(file, None)
        if outcome in DAMAGED and self.shared.files.get(file) == job.snapshot:
            self.shared.quarantined.append(self.shared.files.pop(file))
        if outcome in (*DAMAGED, IoOutcome.GONE, IoOutcome.FOREIGN) and self._by_file.get(file) == job.handle:
            self.drop(job.handle)

    def _put(self, job: Job, blob: bytes) -> int:
        file = file_of(job.name)
        if self._sound(job.name):
            self.already_there += 1
        else:
            self.shared.files[file] = blob
        if file in self._by_file:
            self._used -= job.cost_bytes  # of the handle that it has
            return self._by_file[file]
        return self._take_handle(job.name)

    def _sound(self, name: ObjectName) -> bool:
        """Whether a file is there that says it is this object."""
        return self._headed(name) == name

    def _foreign(self, name: ObjectName) -> bool:
        """Whether the file of this name says another parent or boundary, and all else as asked."""
        found = self._headed(name)
        wanted = found and replace(name, parent=found.parent, boundary_tokens=found.boundary_tokens)
        return found is not None and wanted == found != name

    def _headed(self, name: ObjectName) -> ObjectName | None:
        try:
            return ObjectHeader.unpack(self.shared.files.get(file_of(name), b"")).name
        except ObjectDamageError:
            return None
