"""Every tier through the shipped suite: the one in memory, and the disk tier over real files."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from pathlib import Path
from random import Random

import pytest
from kvdepot.core.objectfile import object_bytes
from kvdepot.server.io.jobs import Part
from kvdepot.server.tiers.base import Tier
from kvdepot.server.tiers.conformance import (
    ARENA_BYTES_MIN,
    RecordingListener,
    RecordingRegistry,
    TierConformance,
    TierHarness,
)
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.tier import DiskTier

from tests.fakes.disk_rig import InlineOpener, InlineWorkers
from tests.fakes.memory_tier import Medium, MemoryTier


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
