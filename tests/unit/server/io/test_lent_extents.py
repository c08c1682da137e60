"""What a proxy lets its client touch: exactly what the session is lent, in that way, in that generation."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kvdepot.core.arena import NO_ROW, ArenaTables, LentMode, RowState
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.elements import ElementRun, Elements
from kvdepot.core.errors import InvalidArgument, NotLent
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.types import Owner, TenantBudget
from kvdepot.server.io.lent_extents import LentExtents

from tests.rigs.engine_rig import DENSE, HYBRID, Client, Rig, path, spec_of, unpack
from tests.rigs.tier_rig import store

OBJECT_BYTES = 8192


def packed(*extents: object) -> bytes:
    return b"".join(struct.pack("<5Q", *one) for one in extents)  # type: ignore[misc]


class World:
    """Three objects that one engine reads, three that it writes; another engine with three of its own."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.client = self.rig.attach()
        self.other = self.rig.attach("other", pid=11)
        self.client.store(path("read", 3))
        _, acquired = self.client.acquire(path("read", 3))
        assert acquired.outcome is AcquireOutcome.GRANTED
        self.readable = unpack(acquired.extents)
        self.lease, reserved = self.client.reserve(path("written", 3))
        self.writable = unpack(reserved.extents)
        _, theirs = self.other.reserve(path("theirs", 3))
        self.theirs = unpack(theirs.extents)
        for _, row, offset, length, _ in self.readable:
            self.rig.buffer[offset : offset + length] = bytes([row]) * length
        self.tables = ArenaTables(self.rig.tables, self.rig.layout, self.rig.generations)
        self.extents = self.of(self.client)
        self.before = bytes(self.rig.buffer)

    def of(self, client: Client) -> LentExtents:
        session = int(self.tables.attachments["session"][client.attachment])
        return LentExtents(self.rig.buffer, self.tables, session)


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_lent_is_read_in_pieces_of_any_size(world: World) -> None:
    expected = b"".join(bytes([row]) * length for _, row, _, length, _ in world.readable)
    for piece_bytes in (1000, 4096, 8192, 10_000, 1 << 20):
        reading = world.extents.to_read(packed(*world.readable))
        pieces = list(reading.pieces(piece_bytes))
        assert b"".join(pieces) == expected
        assert all(len(piece) == piece_bytes for piece in pieces[:-1])
        reading.check()


def test_parts_of_extents_in_any_order_are_read_and_written(world: World) -> None:
    (_, one, first, _, odd), (_, two, second, _, even), _ = world.writable
    writing = world.extents.to_write(packed((0, two, second + 100, 50, even), (0, one, first + 4000, 200, odd)))
    for data in (b"a" * 49, b"a" + b"b" * 150, b"b" * 50):
        writing.write(data)
    writing.finish()
    changed = bytearray(world.before)
    changed[second + 100 : second + 150] = b"a" * 50
    changed[first + 4000 : first + 4200] = b"b" * 200
    assert world.rig.buffer == changed


def wrong(world: World) -> Iterator[tuple[str, bytes, str]]:
    """(what is wrong, packed extents, "read" or "write")"""
    _, row, offset, length, generation = world.readable[1]
    layout = world.rig.layout
    yield "beyond its row", packed((0, row, offset, length + 1, generation)), "read"
    yield "before its row", packed((0, row, offset - 1, length, generation)), "read"
    yield "another row's place", packed((0, row, world.readable[0][2], length, generation)), "read"
    yield "beyond the data", packed((0, row, layout.data_bytes, length, generation)), "read"
    yield "empty", packed((0, row, offset, 0, generation)), "read"
    yield "a sum that overflows", packed((0, row, (1 << 63) - 1, (1 << 63) - 1, generation)), "read"
    yield "negative", packed((0, row, 1 << 63, length, generation)), "read"
    yield "a length beyond all", packed((0, row, offset, 1 << 62, generation)), "read"
    yield "no such row", packed((0, layout.rows, offset, length, generation)), "read"
    yield "a row far away", packed((0, 1 << 62, offset, length, generation)), "read"
    yield "a free row", packed((0, layout.rows - 1, offset, length, generation)), "read"
    yield "an old generation", packed((0, row, offset, length, generation - 2)), "read"
    yield "one of three wrong", packed(*world.readable[:2], (0, row, offset, length, generation + 2)), "read"
    yield "writing what is read", packed(world.readable[0]), "write"
    yield "reading what is written", packed(world.writable[0]), "read"
    yield "reading another's", packed(world.theirs[0]), "read"
    yield "writing another's", packed(world.theirs[0]), "write"
    yield "one of another's", packed(*world.writable, world.theirs[0]), "write"


@pytest.mark.requirement("I1")
def test_anything_else_is_refused_and_nothing_is_touched(world: World) -> None:
    for what, extents, how in wrong(world):
        with pytest.raises((InvalidArgument, NotLent)):
            world.extents.to_read(extents) if how == "read" else world.extents.to_write(extents)
            pytest.fail(what)
    assert world.rig.buffer == world.before


@pytest.mark.requirement("I6")
def test_after_the_end_of_its_lease_nothing_is_served(world: World) -> None:
    world.extents.to_write(packed(*world.writable))
    world.client.commit(world.lease, 0)
    world.client.abandon(world.lease, 2)
    for extent in world.writable[::2]:
        with pytest.raises(NotLent):
            world.extents.to_write(packed(extent))
    world.extents.to_write(packed(world.writable[1]))


@pytest.mark.requirement("I1b")
@pytest.mark.parametrize("at", range(5))
def test_a_generation_that_changes_during_a_load_fails_it(world: World, at: int) -> None:
    reading = world.extents.to_read(packed(*world.readable))
    column = world.tables.extents["generation"]
    for number, _ in enumerate(reading.pieces(5000)):  # five pieces
        if number == at:
            column[world.readable[at % 3][1]] += 2
    with pytest.raises(NotLent, match="generation"):
        reading.check()


@pytest.mark.requirement("I1b")
@pytest.mark.parametrize("at", range(4))
def test_a_generation_that_changes_during_a_store_stops_it(world: World, at: int) -> None:
    writing = world.extents.to_write(packed(*world.writable))
    column = world.tables.extents["generation"]
    for _ in range(at):
        writing.write(b"x" * OBJECT_BYTES)
    column[world.writable[2][1]] += 1
    before = bytes(world.rig.buffer)
    with pytest.raises(NotLent, match="generation"):
        writing.finish() if at == 3 else writing.write(b"y" * 100)
    assert world.rig.buffer == before


def test_a_store_is_whole_or_an_error(world: World) -> None:
    writing = world.extents.to_write(packed(*world.writable))
    writing.write(b"x" * (3 * OBJECT_BYTES - 1))
    with pytest.raises(InvalidArgument, match=r"1 of 24576 bytes are missing"):
        writing.finish()
    before = bytes(world.rig.buffer)
    with pytest.raises(InvalidArgument, match="more than the 24576"):
        writing.write(b"zz")
    assert world.rig.buffer == before
    writing.write(b"x")
    writing.finish()


def test_what_an_audit_asks_for_is_written_beside_what_is_new() -> None:
    rig = Rig(data_pages=256, audit_sample=1.0)
    elements: Elements = {Kind.ATTENTION: (ElementRun("bfloat16", OBJECT_BYTES),)}
    rig.attach(elements=elements).store(path("p", 1))
    other = rig.attach("other", 11, elements=elements)
    lease, reserved = other.reserve(path("p", 2))
    assert reserved.outcomes == bytes([ReserveOutcome.GRANTED] * 2)
    tables = ArenaTables(rig.tables, rig.layout, rig.generations)
    extents = LentExtents(rig.buffer, tables, int(tables.attachments["session"][other.attachment]))
    writing = extents.to_write(reserved.extents)
    writing.write(b"w" * writing.length)
    writing.finish()
    other.abandon(lease)
    with pytest.raises(NotLent):
        extents.to_write(reserved.extents)


def test_the_fragments_of_an_object_are_found_by_its_links() -> None:
    rig = Rig(data_pages=8)
    small = rig.attach(spec=HYBRID)
    for name in range(4):
        small.store(path(name, 1))
    small.acquire([*path(1, 1), *path(3, 1)])
    big = rig.attach("big", 11, spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4 * 2048,)), name="big"))
    lease, reserved = big.reserve(path("big", 1))
    head, link = unpack(reserved.extents)
    tables = ArenaTables(rig.tables, rig.layout, rig.generations)
    assert tables.extents["state"][link[1]] == RowState.CONTINUATION
    extents = LentExtents(rig.buffer, tables, int(tables.attachments["session"][big.attachment]))
    for granted in ([head], [link], [head, link]):
        writing = extents.to_write(packed(*granted))
        writing.write(b"f" * writing.length)
        writing.finish()
    big.abandon(lease)
    with pytest.raises(NotLent):
        extents.to_write(packed(link))


def test_tables_that_link_in_circles_end_in_an_answer(world: World) -> None:
    rows, links = world.rig.layout.rows, world.tables.extents["next"]
    links[world.readable[0][1]] = rows - 1
    links[rows - 1] = rows - 1
    world.tables.extents["state"][rows - 1] = RowState.CONTINUATION
    with pytest.raises(NotLent):
        world.extents.to_read(packed((0, rows - 2, world.readable[0][2], 1, 1)))


def test_an_entry_of_a_row_outside_the_table_ends_in_an_answer(world: World) -> None:
    lent = world.tables.lent
    lent["row"][lent["mode"] == LentMode.READ] = NO_ROW
    with pytest.raises(NotLent):
        world.extents.to_read(packed(world.readable[0]))


@pytest.mark.requirement("S2", "I1")
def test_with_data_of_its_own_a_session_reads_there_and_nowhere_else() -> None:
    part = 2 << 20
    rig = Rig(parts=(part, part), rows=1024, tenants={name: TenantBudget() for name in "ab"})
    tables = ArenaTables(rig.tables, rig.layout, rig.generations)
    lent = {}
    for uid, name in enumerate("ab", 1):
        client = rig.attach(name, uid, spec=replace(DENSE, tenant=name), owner=Owner(uid, tenant=name))
        store(client, path(name, 3), uid)
        session = int(tables.attachments["session"][client.attachment])
        view = LentExtents(client.data, tables, session, (uid - 1) * part)
        lent[name] = view, unpack(client.acquire(path(name, 3))[1].extents)
    for uid, (view, own) in enumerate(lent.values(), 1):
        assert set(b"".join(view.to_read(packed(*own)).pieces())) == {uid}
    (a, of_a), (b, of_b) = lent.values()
    for view, others, shift in ((a, of_b, 0), (b, of_a, 0), (a, of_b, part), (b, of_a, -part)):
        for index, row, offset, length, generation in others:
            with pytest.raises((NotLent, InvalidArgument, struct.error)):
                view.to_read(packed((index, row, offset + shift, length, generation)))
