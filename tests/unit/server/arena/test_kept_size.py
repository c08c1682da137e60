"""An arena of another size is kept if only the tiers below RAM have changed, within the capacity of now (T6)."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.server.arena.arena_file import ArenaFile, KeptFiles, check_arena, open_arena
from kvdepot.server.arena.arena_request import ArenaRequest
from kvdepot.server.depot.types import Liveness

MIB = 1 << 20
BOOT = bytes(range(16))
PURPOSE, OTHER = b"p" * 16, b"q" * 16
SIZE = 128 * MIB


@pytest.fixture(params=[True, False], ids=["sealed", "file"])
def asked(request: pytest.FixtureRequest) -> Iterator[ArenaRequest]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/dev/shm") as folder:
        yield ArenaRequest(Path(folder) / "a", SIZE, SIZE, "file.toml", sealed=request.param, purpose=PURPOSE)


def opened(request: ArenaRequest, former: ArenaFile | None = None) -> ArenaFile:
    return open_arena(
        request, kept=kept(former), boot_id=BOOT, random_bytes=lambda count: bytes(range(1, count + 1)),
        alive=lambda _: Liveness.DEAD,
    )  # fmt: skip


def ended(arena: ArenaFile) -> None:
    """Close an arena, and unmap it as the end of its daemon does."""
    arena.close()
    for name in ("tables", "data", "_tables_maps"):
        delattr(arena, name)
    gc.collect()


def compatible_since(arena: ArenaFile) -> int:
    return int.from_bytes(os.pread(arena.tables_fd, 4, 12), "little")


def kept(arena: ArenaFile | None) -> KeptFiles:
    return KeptFiles(others=[os.dup(fd) for fd in arena.files[1:]] if arena else [])


def test_a_larger_size_keeps_the_arena_as_it_is(asked: ArenaRequest) -> None:
    first = opened(asked)
    first.data[7] = 42
    larger = replace(asked, size_bytes=2 * SIZE)
    outlook = check_arena(larger, BOOT, kept(first))
    assert not outlook.loss and "until the arena is made again" in outlook.note and "loses" not in outlook.note
    second = opened(larger, first)
    assert (second.origin.value, second.data[7], second.rooms) == ("adopted", 42, first.layout.parts)
    assert second.free_unused() == 0 and compatible_since(second) == 3
    for arena in (first, second):
        arena.close()


def test_a_smaller_size_keeps_the_arena_and_frees_what_is_beyond(asked: ArenaRequest) -> None:
    first = opened(asked)
    first.data[7], first.data[-1] = 42, 43
    smaller = replace(asked, size_bytes=100 * MIB)
    outlook = check_arena(smaller, BOOT, kept(first))
    assert not outlook.loss and "RAM shrinks" in outlook.note
    second = opened(smaller, first)
    (room,) = second.rooms
    assert (second.origin.value, second.layout, room) == ("adopted", first.layout, 96 * MIB)
    assert second.tables.room_bytes == (room,) and second.populated_bytes(0) <= room
    assert second.data[-1] == 43  # nobody knows yet whether it is lent
    assert second.free_unused() == first.layout.data_bytes - room
    assert (second.data[7], second.data[-1]) == (42, 0)
    ended(first)
    third = opened(asked, second)
    assert (third.origin.value, third.data[7]) == ("adopted", 42)
    for arena in (second, third):
        arena.close()


def test_memory_that_was_freed_is_used_again_when_no_engine_can_have_it_pinned(asked: ArenaRequest) -> None:
    """A driver that has pinned pages copies to and from them ever after, also when the file has others there."""
    smaller = replace(asked, size_bytes=100 * MIB)
    first = opened(asked)
    whole, engine = first.layout.parts, first.open_for_engine(0)
    mapped = mmap.mmap(engine[0], MIB)
    for fd in engine:
        os.close(fd)  # as an engine does
    former = first
    for request, expected in ((smaller, 96 * MIB), (asked, 96 * MIB), (smaller, 96 * MIB), (asked, 96 * MIB)):
        arena = opened(request, former)
        assert arena.origin.value == "adopted" and arena.rooms == (expected,)
        arena.free_unused()
        assert compatible_since(arena) == 4  # a daemon of version 0.3.0 would use all of it
        ended(former)
        former = arena
    outlook = check_arena(asked, BOOT, kept(former))
    assert not outlook.loss and "may have pinned" in outlook.note and "shrinks" not in outlook.note
    assert "may have pinned" in former.note
    mapped.close()
    if asked.sealed:
        last = opened(asked, former)
        ended(former)
    else:
        ended(former)
        last = opened(asked)
    assert (last.origin.value, last.rooms, last.note) == ("adopted", whole, "")
    assert last.superblock.freed_from == () and compatible_since(last) == 3
    last.close()


@pytest.mark.parametrize("change", ["purpose", "no purpose", "too small"])
def test_another_purpose_or_nothing_left_makes_another_arena_and_the_price_is_told(
    asked: ArenaRequest, change: str
) -> None:
    changed = {
        "purpose": replace(asked, size_bytes=2 * SIZE, purpose=OTHER),
        "no purpose": replace(asked, size_bytes=2 * SIZE, purpose=bytes(16)),
        "too small": replace(asked, size_bytes=32 * MIB),
    }[change]
    first = opened(replace(asked, purpose=bytes(16)) if change == "no purpose" else asked)
    outlook = check_arena(changed, BOOT, kept(first))
    assert "its size changes" in outlook.loss and not outlook.note
    second = opened(changed, first)
    assert (second.origin.value, second.note) == ("recreated", outlook.loss)
    for arena in (first, second):
        arena.close()


def test_an_arena_of_the_same_size_takes_on_the_purpose(asked: ArenaRequest) -> None:
    first = opened(replace(asked, purpose=OTHER))
    second = opened(asked, first)
    assert (second.origin.value, second.note) == ("adopted", "")
    third = opened(replace(asked, size_bytes=2 * SIZE), second)
    assert third.origin.value == "adopted"
    for arena in (first, second, third):
        arena.close()


def test_a_part_whose_room_is_less_is_populated_up_to_its_room(asked: ArenaRequest) -> None:
    first = opened(asked)
    second = opened(replace(asked, size_bytes=100 * MIB), first)
    second.data[:] = b"x" * len(second.data)
    assert second.populated_bytes(0) == 96 * MIB
    for arena in (first, second):
        arena.close()
