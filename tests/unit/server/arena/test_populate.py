"""The arena's pages come piece by piece, from its start, and again when room that was missing is back."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from ctypes import addressof, c_char
from pathlib import Path

import pytest
from kvdepot.server.arena import populate
from kvdepot.server.arena.populate import Growth, Populator

from tests.rigs.patience import patient, wait_until

PIECE = 64 << 10
PIECES = 8
SIZE = PIECES * PIECE - 4096
NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


class Arena:
    """A mapped file, its growth as reported, and what is allocated of it."""

    def __init__(self, path: Path, size_bytes: int = SIZE) -> None:
        self.file = path.open("w+b")
        os.ftruncate(self.file.fileno(), size_bytes)
        self.size_bytes = size_bytes
        self.map = mmap.mmap(self.file.fileno(), size_bytes)
        self.reports: list[Growth] = []

    def populator(self, threads: int = 4, retry_seconds: float = 0.05) -> Populator:
        address = addressof(c_char.from_buffer(self.map))
        return Populator(
            fd=self.file.fileno(), address=address, size_bytes=self.size_bytes, threads=threads,
            report=self.reports.append, retry_seconds=retry_seconds,
        )  # fmt: skip

    @property
    def ready(self) -> list[int]:
        return [report.ready_bytes for report in self.reports]

    @property
    def is_whole(self) -> bool:
        return bool(self.reports) and self.reports[-1].done


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(populate, "PIECE_BYTES", PIECE)
    return Arena(tmp_path / "arena")


def allocating(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """`before` is told of the offset of each piece, and may raise."""
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        before(offset)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)


def test_it_grows_in_order_and_ends_whole(arena: Arena) -> None:
    populator = arena.populator()
    populator.start()
    wait_until(lambda: arena.is_whole, "it is whole")
    assert arena.ready == sorted(arena.ready)
    last = arena.reports[-1]
    assert (last.ready_bytes, last.reason) == (SIZE, "")
    assert not any(report.done for report in arena.reports[:-1])
    populator.stop()


def test_bytes_are_ready_only_when_all_before_them_have_pages(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first touch of one without would end a process, where the file system is full."""
    first, others = threading.Event(), threading.Semaphore(0)

    def wait(offset: int) -> None:
        if not offset:
            assert first.wait(patient(20))
        others.release()

    allocating(monkeypatch, wait)
    populator = arena.populator()
    populator.start()
    for _ in range(PIECES - 1):
        assert others.acquire(timeout=patient(20))
    wait_until(lambda: len(populator._finished) == PIECES - 1, "all others have pages")
    assert not arena.reports
    first.set()
    wait_until(lambda: arena.is_whole, "it is whole")
    assert arena.ready == [SIZE, SIZE]
    populator.stop()


def test_what_found_no_room_is_tried_again_until_there_is(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    full, tries = [True], [0]

    def squeeze(offset: int) -> None:
        if offset >= 3 * PIECE and full[0]:
            tries[0] += 1
            raise NO_ROOM

    allocating(monkeypatch, squeeze)
    populator = arena.populator()
    populator.start()
    wait_until(lambda: tries[0] > 8, "it tries again")
    last = arena.reports[-1]
    assert (last.ready_bytes, last.done) == (3 * PIECE, False)
    assert f"no room for more than {3 * PIECE} of {SIZE} bytes" in last.reason
    full[0] = False
    wait_until(lambda: arena.is_whole, "it is whole")
    assert (arena.reports[-1].ready_bytes, arena.reports[-1].reason) == (SIZE, "")
    assert arena.ready == sorted(arena.ready)
    populator.stop()


def test_the_reason_names_the_first_piece_without_room_whichever_thread_is_first(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def squeeze(offset: int) -> None:
        if offset == 3 * PIECE:
            wait_until(lambda: arena.reports and arena.reports[-1].reason, "a later piece has found none")
        if offset >= 3 * PIECE:
            raise NO_ROOM

    allocating(monkeypatch, squeeze)
    populator = arena.populator(threads=2, retry_seconds=3600)
    populator.start()
    first = f"no room for more than {3 * PIECE} of {SIZE} bytes"
    wait_until(lambda: arena.reports and first in arena.reports[-1].reason, "the reason is that of the first piece")
    populator.stop()


def test_while_there_is_no_room_one_piece_at_a_time_is_tried_and_the_reason_stays(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most, tries = [0], [0], [0]

    def squeeze(offset: int) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        tries[0] += 1
        at_once[0] -= 1
        raise NO_ROOM

    allocating(monkeypatch, squeeze)
    populator = arena.populator(threads=1)
    populator.start()
    wait_until(lambda: tries[0] > 3, "it tries again")
    assert most[0] == 1
    assert all(report.reason for report in arena.reports)
    populator.stop()


def test_a_stop_ends_the_waiting(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def squeeze(_: int) -> None:
        raise NO_ROOM

    allocating(monkeypatch, squeeze)
    populator = arena.populator(retry_seconds=3600)
    populator.start()
    wait_until(lambda: bool(arena.reports), "it says so")
    populator.stop()
    assert not populator._thread.is_alive()
    assert not any(report.done for report in arena.reports)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_arena_on_a_full_tmpfs_is_whole_once_its_neighbour_has_gone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populate, "PIECE_BYTES", PIECE)
    neighbour = tiny / "neighbour"
    neighbour.write_bytes(bytes(768 << 10))
    arena = Arena(tiny / "arena")
    populator = arena.populator()
    populator.start()
    wait_until(lambda: any(report.reason for report in arena.reports), "it says so")
    assert arena.reports[-1].ready_bytes < SIZE
    neighbour.unlink()
    wait_until(lambda: arena.is_whole, "it is whole")
    assert arena.reports[-1].ready_bytes == SIZE
    arena.map[:] = bytes([1]) * SIZE
    populator.stop()
