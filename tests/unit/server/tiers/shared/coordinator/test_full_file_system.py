"""Coordinators on a file system that has less room than the capacity says (ADR 0097)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.storage.shared_layout import NODES, spare_file
from kvdepot.server.tiers.shared.coordinator.files import taken_bytes
from kvdepot.server.tiers.shared.coordinator.relief import Relief
from kvdepot.server.tiers.shared.links import REFUSED_SECONDS

from tests.fakes.shared_directory import MIB, Clock, Nodes, put

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
OBJECT = 32 << 10
CAPACITY = 8 * MIB
HOUR_AND_MORE = 3.0
TO_THE_SPARE = 40
"""Heartbeats until a new janitor has made its spare room."""


@pytest.fixture(params=["size=4m", "size=64m,nr_inodes=200"])
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A shared directory that runs out of blocks, or of inodes, below its capacity."""
    root = tmp_path / "shared"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{request.param},mode=700", "tmpfs", str(root)], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def fill(root: Path, first: int = 0) -> int:
    """Put objects until there is no room; the last bytes and inodes are nobody's. Return the number of the next one."""
    number = first
    with suppress(OSError):
        while True:
            put(root, number, path=f"prompt{number}", payload_bytes=OBJECT, age_hours=HOUR_AND_MORE)
            number += 1
    for at in range(10_000):
        try:
            (root / f"loose-{at}").write_bytes(bytes(PAGE_BYTES))
        except OSError:
            return number
    raise AssertionError("the file system is never full")


def objects(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kvd"))


def used(root: Path) -> int:
    return sum(taken_bytes(path.lstat()) for path in (root, *root.rglob("*")))


@pytest.mark.requirement("T5")
@needs_root
def test_a_lower_capacity_is_kept_on_a_file_system_without_a_free_byte(small: Path) -> None:
    """An operator's way out of a capacity above a quota: nodes register, one becomes janitor, and it evicts."""
    Nodes(small, 2, CAPACITY).go_on(TO_THE_SPARE)
    fill(small)
    full, before = used(small), len(objects(small))
    again = Nodes(small, 2, capacity_bytes=full * 3 // 4)
    again.go_on(400)  # the nodes of before are silent for ten minutes
    assert [report.reason for report in again.reports] == ["", ""]
    assert len(objects(small)) < before
    assert used(small) <= full * 3 // 4
    assert (small / spare_file(0)).exists()


@pytest.mark.requirement("T5")
@needs_root
def test_a_file_system_that_refuses_writes_is_relieved_again_and_again(small: Path) -> None:
    nodes = Nodes(small, 2, CAPACITY)
    nodes.go_on(TO_THE_SPARE)
    number = 0
    for _ in range(3):
        number = fill(small, number)
        before = objects(small)
        nodes.coordinators[1].publish(0, refused=True)
        nodes.go_on(60)
        deleted = len(before) - len(objects(small))
        assert len(before) // 20 < deleted < len(before) // 2
        nodes.coordinators[1].publish(0, refused=False)
        nodes.go_on(2)
        assert [report.reason for report in nodes.reports] == ["", ""]
        for loose in small.glob("loose-*"):
            loose.unlink()


@pytest.mark.requirement("T5")
def test_what_makes_no_room_is_given_up_and_said(tmp_path: Path) -> None:
    """As with a snapshot, which keeps all that is deleted."""
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(1)
    for number in range(100):
        put(nodes.root, number, path=f"prompt{number}", payload_bytes=OBJECT, age_hours=HOUR_AND_MORE)
    nodes.coordinators[0].publish(0, refused=True)
    nodes.go_on(1_000)
    assert 60 < len(objects(nodes.root)) < 90
    assert "deletions make no room" in nodes.reports[0].reason
    nodes.coordinators[0].publish(0, refused=False)
    nodes.go_on(3)
    assert nodes.reports[0].reason == ""


def test_a_used_spare_room_is_made_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "shared", 1)
    nodes.go_on(TO_THE_SPARE)
    pieces = sorted((nodes.root / NODES).glob("*.spare"))
    size_bytes = sum(path.stat().st_size for path in pieces)
    pieces[0].unlink()
    nodes.go_on(TO_THE_SPARE)
    assert sum(path.stat().st_size for path in pieces) == size_bytes <= 64 * MIB // 256
    assert nodes.reports[0].used_bytes >= size_bytes


def test_a_relief_waits_until_the_nodes_have_tried_again() -> None:
    clock = Clock()
    relief = Relief(0.9, clock)
    wanted = []
    for used_bytes, freed_bytes in [(1_000, 60), (940, 40), (960, 0), (960, 0)]:
        relief.look(used_bytes, refused=True)
        relief.deleted(freed_bytes)
        wanted.append(relief.wanted)
        clock.seconds += REFUSED_SECONDS * (freed_bytes == 0 or not relief.wanted)
    assert wanted == [True, False, False, True]
