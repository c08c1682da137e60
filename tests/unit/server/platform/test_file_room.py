"""The last byte of a file system is nobody's: files grow only where a reserve stays free."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Allocate, Append, PublishFile
from kvdepot.server.io.perform import perform
from kvdepot.server.platform import file_room
from kvdepot.server.platform.durable_files import LACKED
from kvdepot.server.platform.file_room import NOT_TRIED, check_room, explained
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_rig import MIB, PAGE, IoRig, object_name
from tests.rigs.patience import patient

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
SEGMENT = "segments/00007.seg"


def shows(monkeypatch: pytest.MonkeyPatch, total_bytes: int, free_bytes: int, **more: int) -> None:
    found = {"f_blocks": total_bytes // PAGE, "f_bavail": free_bytes // PAGE, "f_frsize": PAGE, "f_files": 0}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**found | more))


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    context = Context(os.fspath(tmp_path))
    yield context
    context.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 32 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=40", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def test_a_reserve_for_others_and_for_what_is_written_beside_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, 640 * MIB, 100 * MIB)  # 10 MiB for others
    check_room("/tier", 90 * MIB)
    check_room("/tier", 70 * MIB, 20 * MIB)
    for wanted, beside in ((90 * MIB + PAGE, 0), (70 * MIB, 20 * MIB + PAGE)):
        with pytest.raises(OSError, match=rf"100.*{NOT_TRIED}.*'/tier'") as caught:
            check_room("/tier", wanted, beside)
        assert caught.value.errno == errno.ENOSPC


def test_the_reserve_is_bounded_on_small_and_on_large_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    shows(monkeypatch, 1 << 50, 300 * MIB)
    check_room("/tier", 44 * MIB)
    shows(monkeypatch, 64 * MIB, 6 * MIB)  # 1 MiB for others, 4 MiB beside: not the 500 MiB of a larger tier
    check_room("/tier", MIB, 500 * MIB)


def test_where_the_file_system_does_not_tell_its_room_allocation_finds_out(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows(monkeypatch, 0, 0)
    assert perform(Allocate(SEGMENT, MIB), context).outcome is IoOutcome.OK
    monkeypatch.setattr(os, "statvfs", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no statvfs")))
    assert perform(Allocate(SEGMENT, 2 * MIB), context).outcome is IoOutcome.OK


def test_a_segment_without_room_is_refused_without_trying(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows(monkeypatch, 640 * MIB, 12 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it was tried"))
    answer = perform(Allocate(SEGMENT, 4 * MIB), context)
    assert answer.outcome is IoOutcome.NO_SPACE
    assert NOT_TRIED in answer.detail and "segments" in answer.detail
    assert not (tmp_path / SEGMENT).exists()


def test_a_segment_that_has_its_blocks_needs_no_room(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert perform(Allocate(SEGMENT, MIB), context).outcome is IoOutcome.OK
    shows(monkeypatch, 640 * MIB, 0)
    assert perform(Allocate(SEGMENT, MIB), context).outcome is IoOutcome.OK
    assert perform(Allocate(SEGMENT, MIB // 2), context).outcome is IoOutcome.OK


def test_a_quota_that_is_not_shown_keeps_room_for_what_is_written_beside(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An ext4 user quota: statvfs(2) shows the file system, EDQUOT comes at its own limit."""
    real = os.posix_fallocate

    def quota(fd: int, offset: int, length: int) -> None:
        if offset + length > 20 * MIB:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", quota)
    answer = perform(Allocate(SEGMENT, 19 * MIB, 2 * MIB), context)
    assert answer.outcome is IoOutcome.NO_SPACE and "fallocate: " in answer.detail
    assert not (tmp_path / SEGMENT).exists()
    assert perform(Allocate(SEGMENT, 18 * MIB, 2 * MIB), context).outcome is IoOutcome.OK
    assert (tmp_path / SEGMENT).stat().st_size == 18 * MIB


@pytest.mark.parametrize("number", sorted(LACKED))
def test_without_fallocate_segments_are_zeros_and_what_lies_there_stays(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def lacks(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", lacks)
    path = tmp_path / SEGMENT
    path.parent.mkdir()
    path.write_bytes(b"data" * PAGE)
    assert perform(Allocate(SEGMENT, 3 * MIB), context).outcome is IoOutcome.OK
    assert path.read_bytes() == (b"data" * PAGE).ljust(3 * MIB, b"\0")
    assert path.stat().st_blocks * 512 >= 3 * MIB


@needs_root
def test_two_tiers_that_grow_at_the_same_moment_leave_a_reserve(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see the room of one segment; a slow allocation makes them overlap."""
    monkeypatch.setattr(file_room, "_PIECE_BYTES", 256 << 10)
    real, both, lowest = os.posix_fallocate, threading.Barrier(2), [1 << 40]

    def slow(fd: int, offset: int, length: int) -> None:
        if not offset:
            both.wait(patient(10))
        real(fd, offset, length)
        lowest[0] = min(lowest[0], free_bytes(tiny))

    monkeypatch.setattr(os, "posix_fallocate", slow)
    outcomes = []

    def grow(name: str) -> None:
        outcomes.append(perform(Allocate(f"{name}/0.seg", 28 * MIB), Context(os.fspath(tiny))).outcome)

    threads = [threading.Thread(target=grow, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert IoOutcome.NO_SPACE in outcomes
    assert lowest[0] > 0


@needs_root
def test_a_published_file_leaves_the_reserve(tiny: Path) -> None:
    rig = IoRig(tiny, segment_bytes=31 * MIB)
    (tiny / ".tmp").mkdir()
    before = free_bytes(tiny)
    job = PublishFile(
        "ns/00/x.kvd", ".tmp/1", 0, object_name(1, MIB), 0, 0, ((0, MIB),), None, sync=False, quarantine="q"
    )
    answer = perform(job, Context(os.fspath(tiny), rig.arena))
    assert answer.outcome is IoOutcome.NO_SPACE and NOT_TRIED in answer.detail
    assert free_bytes(tiny) == before and not list((tiny / ".tmp").iterdir())
    rig.close()


@needs_root
def test_a_file_system_without_inodes_says_so_and_not_that_it_is_full(tiny: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        for number in range(100):
            (tiny / str(number)).touch()
    answer = perform(Append("1", 0, b"x", sync=False), Context(os.fspath(tiny)))
    assert answer.outcome is IoOutcome.OK, "the file is there"
    answer = perform(Append("new", 0, b"x", sync=False), Context(os.fspath(tiny)))
    assert answer.outcome is IoOutcome.NO_SPACE
    assert f"open: no inodes left: '{tiny}/new'" in answer.detail


def test_a_full_file_system_is_not_one_without_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "write: No space left on device", "/tier/x")
    for more in ({"f_files": 0, "f_favail": 0}, {"f_files": 100, "f_favail": 1}):
        shows(monkeypatch, 640 * MIB, MIB, **more)
        assert "No space" in str(explained(full))
    shows(monkeypatch, 640 * MIB, 0, f_files=100, f_favail=0)
    assert "No space" in str(explained(full))
