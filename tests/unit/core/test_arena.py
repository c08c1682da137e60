"""The arena's layout: the page docs/formats/arena.md, alignment, refusals, and any bytes at all as a superblock."""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import arena
from kvdepot.core.arena import (
    ArenaFormatError,
    ArenaLayout,
    ArenaTables,
    Columns,
    GenerationsHeader,
    LentMode,
    RowState,
    Superblock,
    generations,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs/formats/arena.md").read_text()
MIB = 1 << 20
BOOT = bytes(range(16))
TABLES = {
    "Extent": arena.EXTENT_COLUMNS,
    "Lent": arena.LENT_COLUMNS,
    "Session": arena.SESSION_COLUMNS,
    "Attachment": arena.ATTACHMENT_COLUMNS,
    "Namespace": arena.NAMESPACE_COLUMNS,
}
IDENTITY_BYTES = 88

layouts = st.builds(
    lambda rows, lent_rows, spare: ArenaLayout.plan((64 + spare) * MIB, rows, lent_rows),
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.integers(0, 64),
)


def superblock(layout: ArenaLayout) -> Superblock:
    return Superblock(
        0x1122334455667788, layout, run=3, boot=BOOT, generations_file=(25, 4710), data_files=((25, 4711),)
    )


def summed(identity: bytes, run: int = 1) -> bytes:
    return identity + struct.pack("<QQ", xxhash.xxh3_64_intdigest(identity), run)


def documented(section: str) -> Columns:
    """(name, numpy dtype) of the rows of a section's table."""
    text = PAGE.split(f"## {section} table\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (?:(\d+) bytes|([ui])(\d+)) \|", text, re.MULTILINE)
    return tuple(
        (name, f"V{size}" if size else f"{'<' * (bits != '8')}{sign}{int(bits) // 8}")
        for name, size, sign, bits in found
    )


def parts(layout: ArenaLayout) -> list[tuple[int, Columns, int]]:
    return [
        (layout.extents_offset, arena.EXTENT_COLUMNS, layout.rows),
        (layout.lent_offset, arena.LENT_COLUMNS, layout.lent_rows),
        (layout.sessions_offset, arena.SESSION_COLUMNS, arena.SESSIONS_MAX),
        (layout.attachments_offset, arena.ATTACHMENT_COLUMNS, arena.ATTACHMENTS_MAX),
        (layout.namespaces_offset, arena.NAMESPACE_COLUMNS, arena.NAMESPACES_MAX),
    ]


@pytest.mark.parametrize("section", TABLES)
def test_the_page_has_the_columns_of_the_code(section: str) -> None:
    assert documented(section) == TABLES[section]


def test_the_page_has_the_states_and_modes_of_the_code() -> None:
    assert ", ".join(f"{state.value} {state.name.lower()}" for state in RowState) in PAGE
    modes = {LentMode.FREE: "empty"}
    assert ", ".join(f"{mode.value} {modes.get(mode, mode.name.lower())}" for mode in LentMode) in PAGE


def test_the_page_has_the_limits_of_the_code() -> None:
    for limit in (arena.ROWS_MAX, arena.LENT_ROWS_MAX, arena.SESSIONS_MAX, arena.ATTACHMENTS_MAX, arena.NAMESPACES_MAX):
        assert f"{limit:,}" in PAGE
    assert arena.SIZE_BYTES_MAX == 2**47
    assert "2^47" in PAGE


def test_golden_superblock() -> None:
    page = superblock(ArenaLayout.plan(64 * MIB, rows=1024, lent_rows=512)).pack()
    assert page.hex() == (
        "4b56444152454e410300000003000000887766554433221100000004000000000004000000020000"
        "000102030405060708090a0b0c0d0e0f19000000000000006612000000000000"
        "19000000000000006712000000000000b297ecbf3b75e3500300000000000000"
    )  # fmt: skip
    assert len(page) == arena.SUPERBLOCK_BYTES


@given(layouts)
def test_columns_are_aligned_and_never_overlap(layout: ArenaLayout) -> None:
    end = arena.PAGE_BYTES
    for offset, columns, rows in parts(layout):
        assert offset % arena.PAGE_BYTES == 0
        assert offset >= end
        at = offset
        for _, dtype in columns:
            at = -(-at // 64) * 64 + np.dtype(dtype).itemsize * rows
        end = at
    assert end <= layout.tables_bytes
    assert layout.tables_bytes % arena.FILE_ALIGN_BYTES == 0
    assert layout.generations_bytes % arena.FILE_ALIGN_BYTES == 0
    assert layout.generations_bytes >= arena.PAGE_BYTES + 8 * layout.rows
    assert layout.tables_bytes + layout.generations_bytes + layout.data_bytes == layout.size_bytes
    assert layout.overhead_bytes == layout.tables_bytes + layout.generations_bytes


def test_tables_are_views_of_the_file_at_the_documented_places() -> None:
    layout = ArenaLayout.plan(8 * MIB, rows=1000, lent_rows=100)
    buffer = memoryview(mmap.mmap(-1, layout.tables_bytes))
    tables = ArenaTables(buffer, layout)
    for table, (offset, columns, rows) in zip(
        (tables.extents, tables.lent, tables.sessions, tables.attachments, tables.namespaces),
        parts(layout),
        strict=True,
    ):
        for number, (name, dtype) in enumerate(columns):
            size = np.dtype(dtype).itemsize
            mark = bytes([number + 1]) * size
            table[name][rows - 1] = np.frombuffer(mark, dtype=dtype)[0]
            offset = -(-offset // 64) * 64 + size * rows
            assert bytes(buffer[offset - size : offset]) == mark
            assert len(table[name]) == table.rows == rows


@pytest.mark.requirement("I1b")
def test_a_reader_sees_the_generation_the_daemon_wrote() -> None:
    layout = ArenaLayout.plan(8 * MIB, rows=1000, lent_rows=100)
    buffer, file = (memoryview(mmap.mmap(-1, size)) for size in (layout.tables_bytes, layout.generations_bytes))
    column = ArenaTables(buffer, layout, file).extents["generation"]
    seen = generations(file, layout.rows)
    column[999] = 2**63 + 5
    assert (seen[999], seen[0], len(seen)) == (2**63 + 5, 0, 1000)
    assert not any(buffer), "what engines read is not in the tables"


def test_golden_header_of_the_generations() -> None:
    header = GenerationsHeader(0x1122334455667788, 1000)
    assert header.pack().hex() == "4b564447454e45520300000003000000" + "8877665544332211" + "e803000000000000"
    assert GenerationsHeader.unpack(header.pack().ljust(arena.PAGE_BYTES, b"\0")) == header
    assert header.file_bytes == arena.PAGE_BYTES + 8000


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (b"", "too short"),
        (superblock(ArenaLayout.plan(64 * MIB)).pack(), "magic"),
        (
            GenerationsHeader(1, 1).pack().replace(struct.pack("<II", 3, 3), struct.pack("<II", 4, 4)),
            "since 4, this is 3",
        ),
        (GenerationsHeader(1, 1).pack().replace(struct.pack("<II", 3, 3), struct.pack("<II", 2, 1)), "format 2"),
        (GenerationsHeader(1, 0).pack(), "rows is 0"),
        (GenerationsHeader(1, arena.ROWS_MAX + 1).pack(), "rows is 8388609"),
    ],
)
def test_what_is_no_header_of_generations_is_refused(page: bytes, found: str) -> None:
    with pytest.raises(ArenaFormatError, match=found):
        GenerationsHeader.unpack(page)


def test_tables_that_are_not_all_mapped_are_refused() -> None:
    layout = ArenaLayout.plan(64 * MIB)
    tables = memoryview(bytearray(layout.tables_bytes))
    ArenaTables(tables, layout)
    with pytest.raises(ArenaFormatError, match=f"its generations have {layout.generations_bytes}"):
        ArenaTables(tables, layout, memoryview(bytearray(layout.generations_bytes - 1)))
    with pytest.raises(ArenaFormatError, match=f"its tables have {layout.tables_bytes}"):
        ArenaTables(memoryview(bytearray(layout.tables_bytes - 1)), layout)


@pytest.mark.requirement("T1")
@given(st.integers(1, 1 << 43))
def test_a_planned_arena_is_never_larger_than_asked_and_its_tables_are_small(size: int) -> None:
    try:
        layout = ArenaLayout.plan(size)
    except ArenaFormatError:
        assert size < 6 * MIB
        return
    assert size - arena.PAGE_BYTES < layout.size_bytes <= size
    assert layout.overhead_bytes <= 0.0017 * size + 6 * MIB


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rows": arena.ROWS_MAX + 1}, "rows is 8388609"),
        ({"lent_rows": 0}, "lent_rows is 0"),
        ({"lent_rows": arena.LENT_ROWS_MAX + 1}, "lent_rows is 262145"),
        ({"size_bytes": 0}, "size_bytes is 0"),
        ({"size_bytes": 64 * MIB + 1}, "no multiple of 4096"),
        ({"size_bytes": arena.SIZE_BYTES_MAX + 4096}, "size_bytes is"),
        ({"size_bytes": 4 * MIB}, "no room beside tables"),
        ({"rows": 4 * MIB}, "no room beside tables"),
    ],
)
def test_impossible_layouts_are_refused_by_name(change: dict[str, int], field: str) -> None:
    layout = ArenaLayout.plan(64 * MIB)
    with pytest.raises(ArenaFormatError, match=field):
        replace(layout, **change)  # type: ignore[arg-type]


@given(layouts, st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1), st.binary(min_size=16, max_size=16))
def test_a_superblock_comes_back_as_it_went(layout: ArenaLayout, arena_id: int, run: int, boot: bytes) -> None:
    block = Superblock(arena_id, layout, run, boot)
    assert Superblock.unpack(block.pack()) == block
    assert Superblock.unpack(memoryview(block.pack().ljust(arena.PAGE_BYTES, b"\0"))) == block


@pytest.mark.requirement("I1c")
@given(layouts, st.integers(0, 8 * IDENTITY_BYTES + 63))
def test_every_flipped_bit_of_the_identity_or_its_sum_is_refused(layout: ArenaLayout, bit: int) -> None:
    page = bytearray(superblock(layout).pack())
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ArenaFormatError):
        Superblock.unpack(bytes(page))


@pytest.mark.requirement("I8")
@given(st.integers(0, 8))
def test_a_run_written_half_leaves_a_sound_superblock(written: int) -> None:
    old = superblock(ArenaLayout.plan(64 * MIB))
    new = replace(old, run=0x0102030405060708)
    cut = IDENTITY_BYTES + 8 + written
    block = Superblock.unpack(new.pack()[:cut] + old.pack()[cut:])
    assert replace(block, run=old.run) == old


DIVIDED = ArenaLayout.plan(64 * MIB, rows=1024, lent_rows=512)
DIVIDED = replace(DIVIDED, divided=(2 * MIB, DIVIDED.data_bytes - 6 * MIB, 4 * MIB))


def divided() -> Superblock:
    files = ((25, 4711), (25, 4712), (25, 4713))
    return Superblock(0x1122334455667788, DIVIDED, 3, BOOT, (25, 4710), files, tenants=bytes(range(16)))


@pytest.mark.requirement("S2")
def test_golden_superblock_of_several_parts() -> None:
    page = divided().pack()
    assert page.hex() == (
        "4b56444152454e410400000004000000887766554433221100000004000000000004000000020000"
        "000102030405060708090a0b0c0d0e0f19000000000000006612000000000000"
        "000102030405060708090a0b0c0d0e0f0300000000000000"
        "000020000000000019000000000000006712000000000000"
        "000060030000000019000000000000006812000000000000"
        "000040000000000019000000000000006912000000000000"
        "301100bc6d6c375d0300000000000000"
    )  # fmt: skip
    assert Superblock.unpack(page.ljust(arena.PAGE_BYTES, b"\0")) == divided()
    assert DIVIDED.part_starts == (0, 2 * MIB, DIVIDED.data_bytes - 4 * MIB)


@pytest.mark.requirement("I1c", "S2")
def test_every_flipped_bit_of_several_parts_is_refused() -> None:
    page = divided().pack()
    for bit in range(8 * (len(page) - 8)):
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArenaFormatError):
            Superblock.unpack(bytes(flipped))
    for size_bytes in (0, 60, 100, len(page) - 1):
        with pytest.raises(ArenaFormatError):
            Superblock.unpack(page[:size_bytes])


@pytest.mark.parametrize("parts", [(2 * MIB,), (0, 4 * MIB), (MIB, 3 * MIB), (2 * MIB, 2 * MIB, 2 * MIB)])
def test_parts_that_are_not_all_of_the_data_in_huge_pages_are_refused(parts: tuple[int, ...]) -> None:
    layout = ArenaLayout.plan(64 * MIB, rows=1024)
    with pytest.raises(ArenaFormatError, match="are no parts of"):
        ArenaLayout.plan(layout.overhead_bytes + 4 * MIB, rows=1024, divided=parts)


@pytest.mark.parametrize("count", [0, arena.PARTS_MAX + 1])
def test_a_number_of_parts_that_cannot_be_is_refused(count: int) -> None:
    page = bytearray(divided().pack())
    page[88:96] = struct.pack("<Q", count)
    with pytest.raises(ArenaFormatError, match=f"the data has {count} parts"):
        Superblock.unpack(bytes(page))


@pytest.mark.requirement("I8")
def test_a_later_format_is_refused_unless_it_says_that_this_one_can_read_it() -> None:
    identity = bytearray(superblock(ArenaLayout.plan(64 * MIB)).pack()[:IDENTITY_BYTES])
    identity[8:16] = struct.pack("<II", 7, 3)
    assert Superblock.unpack(summed(bytes(identity))).run == 1
    identity[8:16] = struct.pack("<II", 7, 5)
    with pytest.raises(ArenaFormatError, match="format 7 is readable since 5, this is 4"):
        Superblock.unpack(bytes(identity) + bytes(16))


@pytest.mark.requirement("I1c")
@pytest.mark.parametrize("version", [1, 2])
def test_an_arena_of_a_former_format_is_refused_and_its_tables_are_found(version: int) -> None:
    layout = replace(ArenaLayout.plan(64 * MIB), former=True)
    file = struct.pack("<QQ", 25, 4711) if version == 2 else b""

    def page(size: int, rows: int, lent_rows: int) -> bytes:
        numbers = (b"KVDARENA", version, version, 7, size, rows, lent_rows, BOOT)
        return summed(struct.pack("<8sIIQQII16s", *numbers) + file)

    found = page(64 * MIB, layout.rows, layout.lent_rows)
    whole = found.ljust(arena.PAGE_BYTES, b"\0")
    with pytest.raises(ArenaFormatError, match=f"format {version} is too old, this is 4"):
        Superblock.unpack(whole)
    data_file = (25, 4711) if version == 2 else arena.NO_FILE
    assert Superblock.unpack_former(whole) == Superblock(7, layout, 1, BOOT, data_files=(data_file,))
    for other in (found[:-9] + b"x" + found[-8:], found[:40], page(0, 0, 0), superblock(layout).pack()):
        assert Superblock.unpack_former(other) is None


def test_tables_of_a_former_format_have_generations_first() -> None:
    layout = replace(ArenaLayout.plan(64 * MIB), former=True)
    assert layout.lent_offset == ArenaLayout.plan(64 * MIB).lent_offset + arena._round_up(8 * layout.rows, 4096)
    assert layout.data_bytes == layout.size_bytes - layout.tables_bytes


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(page: bytes) -> None:
    with pytest.raises(ArenaFormatError):
        Superblock.unpack(page)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1) | st.integers(1, 1 << 20).map(lambda pages: pages * 4096),
    st.integers(0, 2**32 - 1) | st.integers(1, 1 << 20),
    st.integers(0, 2**32 - 1) | st.integers(1, 1 << 18),
)
def test_any_numbers_with_a_right_sum_are_refused_or_fit(arena_id: int, size: int, rows: int, lent: int) -> None:
    page = summed(
        struct.pack("<8sIIQQII16sQQQQ", b"KVDARENA", 3, 3, arena_id, size, rows, lent, BOOT, 25, 4710, 25, 4711)
    )
    try:
        layout = Superblock.unpack(page).layout
    except ArenaFormatError as error:
        assert re.search("size_bytes|rows|no room", str(error))
        return
    assert (layout.size_bytes, layout.rows, layout.lent_rows) == (size, rows, lent)
    assert rows <= arena.ROWS_MAX
    assert arena.PAGE_BYTES <= layout.data_bytes < size <= arena.SIZE_BYTES_MAX
