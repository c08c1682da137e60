"""The connector with ranks whose copies can be held up or made to fail, from outside, by files.

A file `<direction>-<rank>-<fault>` in the folder that `KVDEPOT_TEST_FAULTS` names is in force while it lies
there: `hold` keeps the rank's copying thread before its next batch, and `fail` lets that batch fail. A thread
that is held says so by a file `<direction>-<rank>-held`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdepot.client.copy.base import CopyBatch, CopyError, CopyMemory, Direction
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.vllm.connector import KVDepotConnector

VARIABLE = "KVDEPOT_TEST_FAULTS"
MODULE = "tests.e2e.faulty_connector"
RANK_NICE = 10
HELD_SECONDS_MAX = 60.0
"""For the test that sets a fault to see it; a rank that was stopped meanwhile goes on where it was."""


class Faults:
    """The test's end of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @contextmanager
    def set(self, direction: Direction, rank: int, fault: str) -> Iterator[None]:
        file = self.folder / f"{direction.name.lower()}-{rank}-{fault}"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def held(self, direction: Direction, rank: int, seconds: float) -> bool:
        """Whether the rank's copying thread is held within this time; forgets that it was."""
        file = self.folder / f"{direction.name.lower()}-{rank}-held"
        until = time.monotonic() + seconds
        while not file.exists():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        file.unlink()
        return True

    def wait_held(self, direction: Direction, rank: int) -> None:
        assert self.held(direction, rank, HELD_SECONDS_MAX), f"no {direction.name.lower()} of rank {rank} was held"


class FaultyConnector(KVDepotConnector):
    """`KVDepotConnector`, but for what the files say."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _disturb(Path(os.environ[VARIABLE]), int(self._vllm_config.parallel_config.rank))
        super().register_kv_caches(kv_caches)
        # Ranks that wait for each other spin. Where they have all cores, what their scheduler asks comes seconds late.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), RANK_NICE)


def _disturb(folder: Path, rank: int) -> None:
    copy = CpuCopier.copy

    def disturbed(self: CpuCopier, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        name = f"{direction.name.lower()}-{rank}"
        if (folder / f"{name}-hold").exists():
            (folder / f"{name}-held").touch()
            while (folder / f"{name}-hold").exists():
                time.sleep(0.01)
        if (folder / f"{name}-fail").exists():
            raise CopyError(f"a {direction.name.lower()} that a test lets fail")
        copy(self, arena, batch, direction)

    CpuCopier.copy = disturbed  # type: ignore[method-assign]
