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
IDENTITY_BYTES = 72

layouts = st.builds(
    lambda rows, lent_rows, spare: ArenaLayout.plan((64 + spare) * MIB, rows, lent_rows),
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.integers(0, 64),
)


def superblock(layout: ArenaLayout) -> Superblock:
    return Superblock(arena_id=0x1122334455667788, layout=layout, run=3, boot=BOOT, data_file=(25, 4711))


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
        "4b56444152454e410200000002000000887766554433221100000004000000000004000000020000"
        "000102030405060708090a0b0c0d0e0f19000000000000006712000000000000321a7a3ba69e1ee10300000000000000"
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
    assert layout.tables_bytes + layout.data_bytes == layout.size_bytes


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
    buffer = memoryview(mmap.mmap(-1, layout.tables_bytes))
    column = ArenaTables(buffer, layout).extents["generation"]
    seen = generations(buffer, layout)
    column[999] = 2**63 + 5
    assert (seen[999], seen[0], len(seen)) == (2**63 + 5, 0, 1000)


def test_tables_that_are_not_all_mapped_are_refused() -> None:
    layout = ArenaLayout.plan(64 * MIB)
    ArenaTables(memoryview(bytearray(layout.tables_bytes)), layout)
    with pytest.raises(ArenaFormatError, match=f"its tables have {layout.tables_bytes}"):
        ArenaTables(memoryview(bytearray(layout.tables_bytes - 1)), layout)


@pytest.mark.requirement("T1")
@given(st.integers(1, 1 << 43))
def test_a_planned_arena_is_never_larger_than_asked_and_its_tables_are_small(size: int) -> None:
    try:
        layout = ArenaLayout.plan(size)
    except ArenaFormatError:
        assert size < 4 * MIB
        return
    assert size - arena.PAGE_BYTES < layout.size_bytes <= size
    assert layout.tables_bytes <= 0.0017 * size + 3 * MIB


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
        ({"size_bytes": 2 * MIB}, "no room beside tables"),
        ({"rows": 4 * MIB}, "no room beside tables"),
    ],
)
def test_impossible_layouts_are_refused_by_name(change: dict[str, int], field: str) -> None:
    layout = ArenaLayout.plan(64 * MIB)
    with pytest.raises(ArenaFormatError, match=field):
        replace(layout, **change)


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


@pytest.mark.requirement("I8")
def test_a_later_format_is_refused_unless_it_says_that_this_one_can_read_it() -> None:
    identity = bytearray(superblock(ArenaLayout.plan(64 * MIB)).pack()[:IDENTITY_BYTES])
    identity[8:16] = struct.pack("<II", 7, 2)
    assert Superblock.unpack(summed(bytes(identity))).run == 1
    identity[8:16] = struct.pack("<II", 7, 3)
    with pytest.raises(ArenaFormatError, match="format 7 is readable since 3, this is 2"):
        Superblock.unpack(bytes(identity) + bytes(16))


@pytest.mark.requirement("I1c")
def test_an_arena_of_one_file_is_refused_and_its_tables_are_found() -> None:
    layout = ArenaLayout.plan(64 * MIB)
    page = summed(struct.pack("<8sIIQQII16s", b"KVDARENA", 1, 1, 7, 64 * MIB, layout.rows, layout.lent_rows, BOOT))
    with pytest.raises(ArenaFormatError, match="format 1 is too old, this is 2"):
        Superblock.unpack(page.ljust(arena.PAGE_BYTES, b"\0"))
    assert arena.format_1(page.ljust(arena.PAGE_BYTES, b"\0")) == (layout, BOOT)
    assert arena.format_1(page[:-9] + b"x" + page[-8:]) is None
    assert arena.format_1(page[:40]) is None
    assert arena.format_1(superblock(layout).pack()) is None
    assert arena.format_1(summed(struct.pack("<8sIIQQII16s", b"KVDARENA", 1, 1, 7, 0, 0, 0, BOOT))) is None


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
    page = summed(struct.pack("<8sIIQQII16sQQ", b"KVDARENA", 2, 2, arena_id, size, rows, lent, BOOT, 25, 4711))
    try:
        layout = Superblock.unpack(page).layout
    except ArenaFormatError as error:
        assert re.search("size_bytes|rows|no room", str(error))
        return
    assert (layout.size_bytes, layout.rows, layout.lent_rows) == (size, rows, lent)
    assert rows <= arena.ROWS_MAX
    assert arena.PAGE_BYTES <= layout.data_bytes < size <= arena.SIZE_BYTES_MAX
