"""Which bytes of a disk tier are free, while objects end and the index is read again."""

from __future__ import annotations

from kvdepot.server.tiers.disk.space import Space


def test_what_is_dropped_before_its_place_is_claimed_counts_for_nothing() -> None:
    space = Space(1 << 20)
    space.grow(1 << 20)
    space.retire(5, ((0, 8192),))
    assert space.used_bytes == 0


def test_a_dead_write_whose_kill_an_opening_has_found_gives_its_place_back() -> None:
    """Its KILL was in the journal, and whoever asked for it never heard of that."""
    space = Space(1 << 20)
    space.grow(1 << 20)
    fragments = space.allocate(5, 8192)
    assert fragments is not None
    space.keep(5)
    space.retire(5, fragments)
    assert [place[0] for place in space.reopen().dead] == [5]
    space.resize(1 << 20, 1 << 20)
    space.claim(fragments)
    assert space.finish(set()) == []
    assert (space.free_bytes, space.coming_bytes) == (1 << 20, 0)
    space.killed(5)
    assert (space.free_bytes, space.coming_bytes) == (1 << 20, 0)


def test_what_ends_while_an_opening_fails_gives_its_place_back() -> None:
    space = Space(1 << 20)
    space.grow(1 << 20)
    assert space.allocate(5, 8192) is not None
    space.reopen()
    space.abandon(5)
    assert space.free_bytes == (1 << 20) - 8192, "the opening was told of it"
    space.give_up()
    assert space.free_bytes == 1 << 20
