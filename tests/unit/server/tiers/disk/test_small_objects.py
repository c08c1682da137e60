"""Small objects: more of them are written at once, and they are scrubbed no faster than large ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.scrub import Scrubber

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("in_flight", "object_bytes", "left"),
    [
        (0, 8192, 8), (7, 8192, 8), (32, 8192, 7), (39, 8192, 1), (40, 8192, 0), (4, 4 * _MIB, 4), (8, 4 * _MIB, 0),
        (8, 256 << 10, 0), (7, 256 << 10, 1),
    ],
)  # fmt: skip
def test_more_small_objects_than_large_ones_are_written_at_once(in_flight: int, object_bytes: int, left: int) -> None:
    config = DiskConfig("disk", Path("/d"), 1 << 30, io_workers=2)
    assert config.slots_left(in_flight, in_flight * object_bytes) == left


@pytest.mark.parametrize(("object_bytes", "in_ten_seconds"), [(4096, 400), (256 << 10, 400), (1 << 20, 100)])
def test_a_scrubber_reads_small_objects_no_faster_than_larger_ones(object_bytes: int, in_ten_seconds: int) -> None:
    now = 0.0
    objects: Any = _Objects(object_bytes)

    def verify(handle: int, done: Callable[[], None]) -> None:
        done()

    scrubber = Scrubber(
        objects, bytes_per_second=10 * _MIB, clock=lambda: now, verify=verify, note=lambda _: None, usable=lambda: True
    )
    for _ in range(100):
        scrubber.run_once()
        now += 0.1
    assert scrubber.verified == pytest.approx(in_ten_seconds, rel=0.02)


class _Objects:
    """Objects without an end, all of one length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def after(self, sequence: int, count: int) -> list[int]:
        return list(range(sequence + 1, sequence + 1 + count))

    def sequence(self, handle: int) -> int:
        return handle

    def stored_bytes(self, handle: int) -> int:
        del handle
        return self._length
