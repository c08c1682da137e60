"""Every tier through the shipped suite: the ones in memory, and the disk and the shared tier over real files."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.objectfile import object_bytes
from kvdepot.server.io.bucket import Bucket, BucketSettings
from kvdepot.server.io.jobs import Part
from kvdepot.server.storage.base import Tier
from kvdepot.server.tiers.conformance import TierConformance
from kvdepot.server.tiers.conformance_harness import ARENA_BYTES_MIN, RecordingListener, RecordingRegistry, TierHarness
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.tier import DiskTier
from obstore.store import MemoryStore

from tests.fakes.memory_tier import Medium, MemoryTier
from tests.fakes.shared_memory_tier import File, SharedMedium, SharedMemoryTier, file_of
from tests.rigs.disk_rig import InlineOpener, InlineWorkers
from tests.rigs.shared_rig import SharedRig


class MemoryHarness:
    """Jobs wait for `settle`."""

    tier: Tier

    def __init__(self) -> None:
        self.arena = memoryview(bytearray(ARENA_BYTES_MIN))
        self._medium = Medium()
        self._start()

    def _start(self) -> None:
        self.listener = RecordingListener()
        self.tier = self._memory = MemoryTier(self.arena, RecordingRegistry(), medium=self._medium)
        self.tier.start(self.listener)

    def settle(self) -> None:
        self._memory.run()

    def peek(self, handle: int) -> bytes:
        return self._medium.stored[handle]

    def poke(self, handle: int, data: bytes) -> None:
        self._medium.stored[handle] = data

    def take_away(self, handle: int) -> None:
        raise NotImplementedError

    def reopen(self, *, crash: bool) -> None:
        if not crash:
            self._memory.stop()
        self._start()


class DiskHarness:
    """The disk tier's own code over real files; its workers and opening process are calls in this process."""

    tier: Tier

    def __init__(self, root: Path) -> None:
        self.arena = memoryview(mmap.mmap(-1, ARENA_BYTES_MIN))
        self._config = DiskConfig("disk", root, 32 << 20, quarantine_bytes=2 << 20, scrub_bytes_per_second=0)
        self._start()

    def _start(self) -> None:
        self._data = InlineWorkers(self._config.path, self.arena, time.monotonic)
        self._journal = InlineWorkers(self._config.path, self.arena, time.monotonic)
        self._opener = InlineOpener(self._config, Random(1))
        self.listener = RecordingListener()
        self.tier = self._disk = DiskTier(
            self._config, data=self._data, journal=self._journal, opener=self._opener, log=logging.getLogger("disk")
        )
        self.tier.start(self.listener)
        self.settle()

    def settle(self) -> None:
        while self._data.step() or self._journal.step() or self._opener.step():
            pass

    def peek(self, handle: int) -> bytes:
        return b"".join(_range(self._config.path / part.file, part.offset, part.length) for part in self._parts(handle))

    def poke(self, handle: int, data: bytes) -> None:
        at = 0
        for part in self._parts(handle):
            with (self._config.path / part.file).open("r+b") as file:
                file.seek(part.offset)
                file.write(data[at : at + part.length])
            at += part.length

    def _parts(self, handle: int) -> tuple[Part, ...]:
        medium = self._disk._medium
        stored_bytes = object_bytes(medium.catalog.stored_bytes(handle))
        return medium.layout.parts(medium.catalog.fragments(handle), stored_bytes)

    def take_away(self, handle: int) -> None:
        raise NotImplementedError

    def reopen(self, *, crash: bool) -> None:
        if not crash:
            asyncio.run(self._close())
        self._start()

    async def _close(self) -> None:
        """Its workers go on meanwhile."""
        task = asyncio.ensure_future(self.tier.close())
        while not task.done():
            self.settle()
            await asyncio.sleep(0.001)


class SharedMemoryHarness:
    """Jobs wait for `settle`."""

    tier: Tier

    def __init__(self) -> None:
        self.arena = memoryview(bytearray(ARENA_BYTES_MIN))
        self._medium = SharedMedium()
        self._start()

    def _start(self) -> None:
        self.listener = RecordingListener()
        self.tier = self._memory = SharedMemoryTier(
            self.arena, RecordingRegistry(), shared=self._medium, handles_max=512
        )
        self.tier.start(self.listener)

    def settle(self) -> None:
        self._memory.run()

    def peek(self, handle: int) -> bytes:
        return self._medium.files[self._file(handle)]

    def poke(self, handle: int, data: bytes) -> None:
        self._medium.files[self._file(handle)] = data

    def take_away(self, handle: int) -> None:
        del self._medium.files[self._file(handle)]

    def _file(self, handle: int) -> File:
        return file_of(self._memory._names[handle])

    def reopen(self, *, crash: bool) -> None:
        if not crash:
            self._memory.stop()
        self._start()


class SharedHarness:
    """The shared tier's own code over real files; its workers and its coordinator are calls in this process."""

    tier: Tier

    def __init__(self, root: Path, *, touches: bool = True) -> None:
        self.arena = memoryview(mmap.mmap(-1, ARENA_BYTES_MIN))
        self._rig = SharedRig(root, arena=self.arena, handles_max=512, touches=touches)
        self._take()

    def _take(self) -> None:
        self.listener = self._rig.listener
        self.tier = self._rig.tier

    def settle(self) -> None:
        self._rig.settle()

    def peek(self, handle: int) -> bytes:
        return self._rig.path(handle).read_bytes()

    def poke(self, handle: int, data: bytes) -> None:
        self._rig.path(handle).write_bytes(data)

    def take_away(self, handle: int) -> None:
        self._rig.path(handle).unlink()

    def reopen(self, *, crash: bool) -> None:
        if not crash:
            asyncio.run(self._rig.tier.close())
        self._rig.start()
        self._take()


class BucketHarness(SharedHarness):
    """The object tier over a bucket in memory; its workers are calls in this process, and nothing probes."""

    def __init__(self, root: Path) -> None:
        self._store = MemoryStore()
        super().__init__(root, touches=False)

    def _take(self) -> None:
        super()._take()
        self._rig.workers.bucket = Bucket(BucketSettings("memory://"), self._store)

    def peek(self, handle: int) -> bytes:
        return bytes(self._store.get(self._key(handle)).bytes())

    def poke(self, handle: int, data: bytes) -> None:
        self._store.put(self._key(handle), data)

    def take_away(self, handle: int) -> None:
        self._store.delete(self._key(handle))

    def _key(self, handle: int) -> str:
        return str(self._rig.path(handle).relative_to(self._rig.root))


def _range(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def harness(self) -> TierHarness:
        return MemoryHarness()


class TestDiskTier(TierConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> TierHarness:
        return DiskHarness(tmp_path / "disk")


class TestSharedMemoryTier(TierConformance):
    @pytest.fixture
    def harness(self) -> TierHarness:
        return SharedMemoryHarness()


class TestSharedTier(TierConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> TierHarness:
        return SharedHarness(tmp_path / "shared")


class TestObjectTier(TierConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> TierHarness:
        return BucketHarness(tmp_path / "nothing")
