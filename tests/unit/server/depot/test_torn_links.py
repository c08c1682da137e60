"""Links between rows that were damaged: every walk ends, and the object is dropped and counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvdepot.core.arena import NO_ROW, RowState
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.stores.checksums import HELD_BACK_SECONDS_MAX
from kvdepot.server.depot.tree.rows import Rows, TornLinksError

from tests.rigs.engine_rig import Client, Rig, path, spec_of, unpack

PAGE = 4096
PAGES = 32
FRAGMENTS = 3
Damage = Callable[[Rows, list[int], list[int]], int]
SMALL = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(PAGE // 2,)), name="small")
BIG = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(FRAGMENTS * PAGE // 2,)), name="big")


class Fragmented:
    """Two objects of three extents each, `torn` and `other`, with checksums; every second page is held."""

    def __init__(self) -> None:
        self.rig = rig = Rig(data_pages=PAGES)
        small = rig.attach("small", 10, SMALL)
        for number in range(PAGES):
            small.store(path(number, 1))
        small.acquire([one for number in range(0, PAGES, 2) for one in path(number, 1)])
        self.big = rig.attach("big", 11, BIG)
        self.rows: list[list[int]] = []
        for name in ("torn", "other"):
            lease, reply = self.big.reserve(path(name, 1))
            assert reply.outcomes == bytes([ReserveOutcome.GRANTED])
            self.rows.append([extent[1] for extent in unpack(reply.extents)])
            assert self.big.commit(lease, 0) == bytes([CommitOutcome.COMMITTED])
        assert [len(rows) for rows in self.rows] == [FRAGMENTS, FRAGMENTS]
        rig.now += HELD_BACK_SECONDS_MAX  # an engine copies
        rig.depot.tick()
        rig.sum_all()

    def damage(self, at: int, damage: Damage) -> None:
        """Damage the link of one extent of the first object."""
        torn, other = self.rows
        self.table.next[torn[at]] = NO_ROW
        self.table.next[torn[at]] = damage(self.table, torn, other)

    @property
    def table(self) -> Rows:
        return self.rig.depot._ram.rows


def to_its_head(table: Rows, torn: list[int], _: list[int]) -> int:
    return torn[0]


def back(table: Rows, torn: list[int], _: list[int]) -> int:
    """To the first extent that the walk has passed."""
    return torn[1] if table.next[torn[0]] == torn[1] else torn[0]


def to_another_head(table: Rows, _: list[int], other: list[int]) -> int:
    return other[0]


def to_another_objects_extent(table: Rows, _: list[int], other: list[int]) -> int:
    return other[1]


def to_a_free_row(table: Rows, *_: list[int]) -> int:
    return int((table.states == RowState.FREE).nonzero()[0][-1])


def outside(table: Rows, *_: list[int]) -> int:
    return NO_ROW - 1


def just_outside(table: Rows, *_: list[int]) -> int:
    return table.count


DAMAGE = pytest.mark.parametrize(
    "damage",
    [to_its_head, back, to_another_head, to_another_objects_extent, to_a_free_row, outside, just_outside],
    ids=lambda value: value.__name__,
)


def granted_rows(client: Client, name: str) -> set[int]:
    lease, reply = client.acquire(path(name, 1))
    assert reply.outcome is AcquireOutcome.GRANTED
    client.release(lease)
    return {extent[1] for extent in unpack(reply.extents)}


@pytest.mark.requirement("I1", "I4")
@DAMAGE
@pytest.mark.parametrize("link", range(FRAGMENTS - 1))
def test_an_object_with_damaged_links_is_never_granted_and_dropped_at_the_next_tick(damage: Damage, link: int) -> None:
    world = Fragmented()
    other = world.rows[1]
    world.damage(link, damage)
    assert world.big.acquire(path("torn", 1))[1].outcome is AcquireOutcome.REFUSED
    world.rig.depot.tick()
    assert world.rig.counter("torn_objects") == 1
    assert world.big.locate(path("torn", 1)).boundary_tokens == 0
    assert granted_rows(world.big, "other") == set(other)
    used = {(int(world.table.offset[row]), int(world.table.length[row])) for row in other}
    fresh = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(PAGE // 2,)), name="fresh")
    again = world.rig.attach("again", 12, fresh)
    lease, reply = world.big.acquire(path("other", 1))  # pinned, so that only what is free is granted
    granted = unpack(again.reserve(path("q", 8))[1].extents)
    assert granted and used.isdisjoint((offset, length) for _, _, offset, length, _ in granted)
    assert reply.outcome is AcquireOutcome.GRANTED
    world.big.release(lease)
    world.rig.depot.tick()
    assert world.rig.counter("torn_objects") == 1


@pytest.mark.requirement("I4")
@DAMAGE
def test_each_walk_raises_and_takes_no_more_steps_than_there_are_rows(damage: Damage) -> None:
    world = Fragmented()
    torn = world.rows[0]
    world.damage(2, damage)
    assert world.table.follow(torn[0]) == (torn, False)
    for walk in (world.table.chain, world.table.extents, world.table.unindex):
        with pytest.raises(TornLinksError):
            walk(torn[0])
    assert world.table.torn == {torn[0]}


@pytest.mark.requirement("I4")
@DAMAGE
@pytest.mark.parametrize("lent", [False, True], ids=["idle", "lent"])
def test_adoption_drops_what_has_damaged_links_and_nothing_else(damage: Damage, lent: bool) -> None:
    world = Fragmented()
    other = world.rows[1]
    held = set()
    if lent:
        _, reply = world.big.acquire(path("torn", 1))
        held = {extent[2] for extent in unpack(reply.extents)[:2]}  # what the links lead to
    world.damage(1, damage)
    world.rig.crash()
    assert world.rig.report.dropped == {"torn_links": 1}
    world.big = world.rig.attach("big", 11, BIG)
    world.rig.sum_all()
    assert world.big.locate(path("torn", 1)).boundary_tokens == 0
    assert granted_rows(world.big, "other") == set(other)
    if lent:
        granted = unpack(world.big.reserve(path("q", 2))[1].extents)
        assert held.isdisjoint(extent[2] for extent in granted)


@pytest.mark.requirement("I4")
def test_many_heads_that_link_one_chain_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of one name, so that each could be what the chain continues."""
    rig = Rig(data_pages=64, rows=2048)
    rig.attach()
    table = rig.depot._ram.rows
    links = list(range(1000, 2000))
    for row in [*range(1000), *links]:
        table._key[16 * row : 16 * row + 16] = b"k" * 16
        table.kind[row], table.length[row], table.boundary[row] = int(Kind.ATTENTION), PAGE, 32
        table.generation[row] = 2
        table.next[row] = 1000 if row < 1000 else row + 1
        table.state[row] = RowState.COMMITTED if row < 1000 else RowState.CONTINUATION
    table.next[1999] = NO_ROW
    steps = 0
    continues = Rows.continues

    def counted(self: Rows, head: int, row: int) -> bool:
        nonlocal steps
        steps += 1
        return continues(self, head, row)

    monkeypatch.setattr(Rows, "continues", counted)
    rig.crash()
    assert rig.report.dropped == {"torn_links": 1000}
    assert steps <= table.count
