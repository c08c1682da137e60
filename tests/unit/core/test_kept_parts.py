"""An arena of another size: how much of it may be used, and for which purpose it was made."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.arena import PAGE_BYTES, ArenaFormatError, ArenaLayout, Superblock
from kvdepot.core.arena_purpose import NO_PURPOSE
from kvdepot.core.ram_size import ROOM_ALIGN_BYTES, kept_parts

MIB = 1 << 20
BOOT = bytes(range(16))
PURPOSE = bytes(range(16, 32))
sizes = st.integers(64, 1 << 14).map(lambda count: count * 2 * MIB)


def divided(size_bytes: int, first: int) -> ArenaLayout:
    data_bytes = ArenaLayout.plan(size_bytes).data_bytes
    return ArenaLayout.plan(size_bytes, divided=(first, data_bytes - first))


@given(sizes, sizes)
def test_an_arena_that_is_kept_takes_no_more_memory_than_is_asked_for(found_bytes: int, asked_bytes: int) -> None:
    found, asked = ArenaLayout.plan(found_bytes), ArenaLayout.plan(asked_bytes)
    rooms = kept_parts(found, asked)
    if not rooms:
        assert asked.data_bytes < ROOM_ALIGN_BYTES + found.overhead_bytes - asked.overhead_bytes
        return
    (room,) = rooms
    assert 0 < room <= found.data_bytes
    assert room == found.data_bytes or room % ROOM_ALIGN_BYTES == 0
    assert room + found.overhead_bytes <= max(asked_bytes, found_bytes if found_bytes <= asked_bytes else 0)
    assert min(found_bytes, asked_bytes) - room - found.overhead_bytes < ROOM_ALIGN_BYTES


def test_the_size_that_is_asked_for_is_used_to_the_last_byte() -> None:
    for layout in (ArenaLayout.plan(64 * MIB), divided(256 * MIB, 50 * MIB)):
        assert kept_parts(layout, layout) == layout.parts


def test_each_part_keeps_within_its_own_size() -> None:
    found, asked = divided(512 * MIB, 202 * MIB), divided(384 * MIB, 300 * MIB)
    first, second = kept_parts(found, asked)
    assert first == 202 * MIB  # smaller than asked for
    assert second % ROOM_ALIGN_BYTES == 0 and asked.parts[1] - ROOM_ALIGN_BYTES < second <= asked.parts[1]


def test_other_parts_and_parts_of_which_nothing_is_left_are_not_kept() -> None:
    assert kept_parts(divided(512 * MIB, 200 * MIB), ArenaLayout.plan(512 * MIB)) == ()
    assert kept_parts(divided(512 * MIB, 200 * MIB), divided(512 * MIB, 30 * MIB)) == ()


@pytest.mark.parametrize("layout", [ArenaLayout.plan(64 * MIB), divided(64 * MIB, 8 * MIB)], ids=["one", "two"])
def test_the_purpose_is_read_back_and_a_damaged_one_is_none(layout: ArenaLayout) -> None:
    files = tuple((25, 4711 + part) for part in range(len(layout.parts)))
    block = Superblock(7, layout, 1, BOOT, (25, 4710), files, purpose=PURPOSE)
    page = block.pack().ljust(PAGE_BYTES, b"\0")
    assert len(page) == PAGE_BYTES and Superblock.unpack(page) == block
    for at in range(2048, 2048 + 32):
        damaged = bytearray(page)
        damaged[at] ^= 1
        assert Superblock.unpack(bytes(damaged)) == replace(block, purpose=NO_PURPOSE)


def test_the_purpose_of_another_arena_is_none() -> None:
    layout = ArenaLayout.plan(64 * MIB)
    former = Superblock(7, layout, 1, BOOT, purpose=PURPOSE).pack()
    page = Superblock(9, layout, 1, BOOT).pack()
    assert Superblock.unpack(page + former[len(page) :]).purpose == NO_PURPOSE


@pytest.mark.parametrize("layout", [ArenaLayout.plan(64 * MIB), divided(64 * MIB, 8 * MIB)], ids=["one", "two"])
def test_what_was_freed_is_read_back_until_nothing_is_and_is_never_used(layout: ArenaLayout) -> None:
    files = tuple((25, 4711 + part) for part in range(len(layout.parts)))
    freed_from = tuple(part - 2 * MIB for part in layout.parts)
    block = Superblock(7, layout, 1, BOOT, (25, 4710), files, purpose=PURPOSE, freed_from=freed_from)
    page = block.pack().ljust(PAGE_BYTES, b"\0")
    assert len(page) == PAGE_BYTES and Superblock.unpack(page) == block
    assert kept_parts(layout, layout, freed_from) == freed_from
    used_again = replace(block, freed_from=()).pack()
    assert Superblock.unpack(used_again + page[len(used_again) :]) == replace(block, freed_from=())
    for at in range(2048 + 32, 2048 + 32 + 16 + 8 * len(files) + 8):
        damaged = bytearray(page)
        damaged[at] ^= 1
        if layout.divided:
            assert Superblock.unpack(bytes(damaged)) == replace(block, freed_from=())
        else:
            with pytest.raises(ArenaFormatError, match="what was freed is not known"):
                Superblock.unpack(bytes(damaged))


@pytest.mark.requirement("I1c", "S2")
def test_a_daemon_that_does_not_know_of_freed_memory_does_not_read_the_arena() -> None:
    """An engine's driver has other pages pinned there: both would see other bytes in the same place."""
    block = Superblock(7, ArenaLayout.plan(64 * MIB), 1, BOOT, (25, 4710), ((25, 4711),), purpose=PURPOSE)
    freed = replace(block, freed_from=(32 * MIB,))
    versions = struct.Struct("<8xII")
    assert versions.unpack_from(block.pack()) == (3, 3)
    assert versions.unpack_from(freed.pack()) == (4, 4)  # "is readable since 4, this is 3", said version 0.3.0
    one_part_less = bytearray(freed.pack().ljust(PAGE_BYTES, b"\0"))
    one_part_less[96:104] = struct.pack("<Q", block.layout.data_bytes - MIB)
    identity = bytes(one_part_less[:120])
    one_part_less[120:128] = struct.pack("<Q", xxhash.xxh3_64_intdigest(identity))
    with pytest.raises(ArenaFormatError):
        Superblock.unpack(bytes(one_part_less))
