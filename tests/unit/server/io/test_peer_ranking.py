"""Which places are worth asking: by what their summaries have of what was asked for lately (ADR 85)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kvdepot.server.io import peer_ranking
from kvdepot.server.io.peer_ranking import HALF_SECONDS, KEPT, WINDOW_SECONDS, Wanted, leading
from kvdepot.server.io.peer_summary import Filter, summary_of

from tests.rigs.seeds import RUN_SEED


class Known:
    """A summary without chance, or with so much of it."""

    def __init__(self, *words: int, by_chance: float = 0.0) -> None:
        self.words = set(words)
        self.by_chance = by_chance

    def has(self, words: list[int]) -> list[bool]:
        return [word in self.words for word in words]

    def leading(self, words: list[int]) -> int:
        return next((count for count, word in enumerate(words) if word not in self.words), len(words))


class World:
    def __init__(self, *known: Known) -> None:
        self.now = 1000.0
        self.wanted = Wanted(clock=lambda: self.now)
        self.columns = range(len(known))
        for column, one in enumerate(known):
            self.know(column, one)

    def know(self, column: int, known: Any) -> None:
        self.wanted.knows(column, known)

    def best(self, *members: int, most: int = 2) -> list[tuple[int, int]]:
        return self.wanted.best(self.columns, members, most)


def test_the_place_with_most_of_the_names_is_first_and_the_next_adds_most_to_it() -> None:
    world = World(Known(1, 2, 3), Known(1, 2, 3, 4, 5), Known(9), Known(7, 8))
    world.wanted.want([1, 2, 3, 4, 5])
    world.wanted.want([7, 8])
    assert world.best() == [(1, 5), (3, 2)]
    assert world.best(most=4) == [(1, 5), (3, 2)], "a part of another one adds nothing"


@pytest.mark.parametrize("summary_first", [True, False])
def test_names_and_summaries_come_in_any_order(summary_first: bool) -> None:
    world = World(Known(), Known())
    for step in (0, 1) if summary_first else (1, 0):
        if step:
            world.wanted.want([5, 6])
        else:
            world.know(1, Known(5, 6))
    assert world.best() == [(1, 2)]
    world.know(1, Known(5))
    assert world.best() == [(1, 1)]
    world.know(1, None)
    assert world.best() == []


def test_a_member_is_not_replaced_for_a_small_gain() -> None:
    world = World(Known(*range(10)), Known(*range(11)), Known(*range(14)))
    world.wanted.want(list(range(11)))
    assert world.best(0, most=1) == [(0, 10)]
    assert 10 * KEPT < 14
    world.wanted.want(list(range(14)))
    assert world.best(0, most=1) == [(2, 14)]


@pytest.mark.parametrize("summary_first", [True, False])
def test_a_name_counts_only_with_all_that_come_before_it_in_a_lookup(summary_first: bool) -> None:
    world = World(Known(), Known())
    for step in (0, 1) if summary_first else (1, 0):
        if step:
            world.wanted.want([1, 2, 3, 4])
            world.wanted.want([1, 2, 3, 4, 5, 6])
        else:
            world.know(0, Known(1, 2, 4, 5, 6))
            world.know(1, Known(2, 3, 4, 5, 6))
    assert world.best() == [(0, 2)]
    world.know(0, Known(1, 2, 3, 4, 5))
    assert world.best() == [(0, 5)]


def test_names_count_alone_once_those_before_them_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ranking, "WORDS_MAX", 3)
    world = World(Known())
    world.wanted.want([1, 2, 3])
    world.wanted.want([2, 3])
    world.wanted.want([7])
    world.know(0, Known(2, 3))
    assert world.best() == [(0, 2)]


def test_a_path_of_any_length_is_one_place_s() -> None:
    world = World(Known(*range(1000)), Known(*range(1, 1000)))
    world.wanted.want(list(range(1000)))
    assert world.best(most=1) == [(0, 1000)]


def test_a_few_names_are_found_after_many_that_nobody_has() -> None:
    draw = random.Random(RUN_SEED)
    others = [draw.getrandbits(64) for _ in range(20_000)]
    moved = [draw.getrandbits(64) for _ in range(8)]
    world = World()
    world.columns = range(8)
    for column in world.columns:
        has = [*(draw.getrandbits(64) for _ in others), *(moved if column == 5 else ())]
        world.know(column, Filter(summary_of([np.array(has, np.uint64).tobytes()], 1)))
    for _ in range(200):
        world.wanted.want([draw.getrandbits(64) for _ in range(16)])
    world.wanted.want(moved)
    assert world.best(most=4)[0][0] == 5, "others may follow, in one of 50 cases each: by chance"


def test_of_equal_places_the_first_of_the_list_is_taken() -> None:
    world = World(Known(1, 2), Known(1, 2))
    world.wanted.want([1, 2])
    assert world.wanted.best([1, 0], (), 1) == [(1, 2)]
    assert world.wanted.best([0, 1], (), 1) == [(0, 2)]


def test_names_count_less_with_time_and_then_not_at_all() -> None:
    world = World(Known(1, 2, 3), Known(5, 6))
    world.wanted.want([1, 2, 3])
    world.now += HALF_SECONDS
    world.wanted.want([5, 6])
    assert world.best() == [(1, 2), (0, 3)], "three at half a weight, two at a whole one"
    world.now += WINDOW_SECONDS - HALF_SECONDS
    assert world.best() == [(1, 2)]
    world.wanted.want([1])
    assert world.best() == [(0, 1), (1, 2)], "one at its whole weight, two at an eighth"
    world.now += WINDOW_SECONDS
    assert world.best() == []


def test_what_is_there_by_chance_does_not_count() -> None:
    draw = random.Random(RUN_SEED)
    words = [draw.getrandbits(64) for _ in range(4000)]
    others = [draw.getrandbits(64) for _ in range(20_000)]

    def known(*extra: int) -> Filter:
        return Filter(summary_of([np.array([*others, *extra], np.uint64).tobytes()], 1))

    world = World()
    world.columns = range(3)
    world.know(0, known())
    world.know(1, known(*words[:200]))
    world.know(2, known())
    world.wanted.want(words)
    assert sum(known().has(words)) > 5, "some seem to be there"
    assert [column for column, _ in world.best(most=3)] == [1]


def test_the_latest_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ranking, "WORDS_MAX", 4)
    world = World(Known(1), Known(5), Known(2))
    for word in (1, 2, 3, 4, 2, 5):
        world.wanted.want([word])
    assert world.best(most=3) == [(1, 1), (2, 1)], "the first one that was asked for is forgotten"
    world.wanted.want([6, 7, 8, 9])
    assert world.best(most=3) == []


@pytest.mark.requirement("N3")
def test_a_place_that_has_all_names_by_chance_is_worth_nothing() -> None:
    world = World(Known(*range(100), by_chance=1.0), Known(0, 1, 2, 3))
    world.wanted.want(list(range(100)))
    assert world.best() == [(1, 4)]


def first_of(*known: Any, words: int = 9) -> list[tuple[int, int]]:
    return leading(known, list(range(words)))


def test_a_lookup_is_sent_to_the_place_with_most_of_its_first_chunks() -> None:
    assert first_of(Known(0, 1, 2), Known(*range(1, 9)), Known(*range(9)), Known()) == [(2, 9), (0, 3)]
    assert first_of(Known(0, 1), Known(0, 1)) == [(0, 2), (1, 2)]
    assert first_of() == [] and first_of(Known(0), words=0) == []


def test_chunks_that_some_place_may_have_by_chance_send_a_lookup_nowhere() -> None:
    few = [Known(0, 1, by_chance=0.008) for _ in range(2)]
    assert first_of(*few) == [(0, 2), (1, 2)] and first_of(*few, words=1) == []
    many = [Known(0, by_chance=0.38) for _ in range(99)]
    assert first_of(*many, Known(*range(11), by_chance=0.38), words=11) == []
    assert first_of(*many, Known(*range(12), by_chance=0.38), words=12) == [(99, 12)]
    assert first_of(Known(*range(9), by_chance=1.0)) == []


def test_few_lookups_of_what_nobody_has_are_sent_anywhere() -> None:
    draw = random.Random(RUN_SEED)

    def full() -> Filter:
        return Filter(summary_of([np.array([draw.getrandbits(64) for _ in range(4000)], np.uint64).tobytes()], 1))

    filters = [full() for _ in range(16)]
    assert all(0.004 < one.by_chance < 0.02 for one in filters)
    lookups = [[draw.getrandbits(64) for _ in range(16)] for _ in range(1000)]
    assert sum(bool(leading(filters, words)) for words in lookups) < 15
    assert any(one.leading(words) for one in filters for words in lookups), "some seem to be there"
