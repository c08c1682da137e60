"""Miniature caches: what a request resumes at, and that sizes add up."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from random import Random

import pytest
from kvdepot.core.eviction import policy_by_name, policy_names
from kvdepot.core.miniature_cache import MiniatureCache, Path


def cache(capacity_bytes: float, policy: str = "lru") -> MiniatureCache:
    return MiniatureCache(policy_by_name(policy, 64), capacity_bytes)


def served(serving: Generator[None, None, int]) -> int:
    while True:
        try:
            next(serving)
        except StopIteration as ended:
            points: int = ended.value
            return points


def chunks(*marks: int) -> Path:
    return Path(list(marks), [10] * len(marks), [(at + 1) * 16 for at in range(len(marks))])


def ends(*marks: int) -> Path:
    return Path(list(marks), [10] * len(marks), [(at + 1) * 16 for at in range(len(marks))], 30)


def test_chunks_are_served_up_to_the_first_that_is_missing() -> None:
    small = cache(1000)
    assert served(small.serve(chunks(1, 2, 3), 0.0)) == 0
    assert served(small.serve(chunks(1, 2, 9), 1.0)) == 2
    assert served(small.serve(chunks(1, 2, 3, 4), 2.0)) == 3
    assert (small.used_bytes, len(small), small.evicted) == (50, 5, False)


def test_the_end_of_the_least_recent_path_goes_first() -> None:
    small = cache(40)
    served(small.serve(chunks(1, 2), 0.0))
    served(small.serve(chunks(5, 6), 1.0))
    served(small.serve(chunks(7), 2.0))
    assert small.evicted
    assert served(small.serve(chunks(1, 2), 3.0)) == 1


def test_a_prompt_larger_than_the_cache_keeps_its_beginning() -> None:
    small = cache(25)
    assert served(small.serve(chunks(1, 2, 3, 4), 0.0)) == 0
    assert served(small.serve(chunks(1, 2, 3, 4), 1.0)) == 2


def test_ends_are_resumed_at_the_last_one_that_is_there() -> None:
    small = cache(1000)
    assert served(small.serve(ends(1), 0.0)) == 0
    assert served(small.serve(ends(1, 2), 1.0)) == 1
    assert served(small.serve(ends(1, 2, 3), 2.0)) == 2
    assert served(small.serve(ends(1, 8), 3.0)) == 1


def test_what_is_stored_at_each_point_is_there_where_prompts_part() -> None:
    small = cache(1000)
    assert served(small.serve(replace(ends(1, 2, 3), at_each=True), 0.0)) == 0
    assert served(small.serve(replace(ends(1, 2, 9), at_each=True), 1.0)) == 2
    assert small.used_bytes == 4 * 40


def test_the_state_of_an_inner_end_goes_alone_and_is_stored_again() -> None:
    small = cache(110)  # two ends take 40 each, and an inner end without its state 10
    served(small.serve(ends(1), 0.0))
    served(small.serve(ends(1, 2), 1.0))
    served(small.serve(ends(7), 2.0))  # room: the state of 1
    assert served(small.serve(ends(1, 2), 3.0)) == 2, "the end of the conversation is there"
    assert served(small.serve(ends(1), 4.0)) == 0, "nobody can resume at its first end"
    assert served(small.serve(ends(1), 5.0)) == 1, "what was computed is stored again"


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("kind", [chunks, ends])
def test_a_cache_never_holds_more_than_its_capacity(policy: str, kind: type) -> None:
    random = Random(3)
    small = cache(400, policy)
    talks: list[tuple[int, ...]] = [(1,)]
    for number in range(600):
        path = (*random.choice(talks[-12:]), *range(10 * number + 10, 10 * number + 10 + random.randint(1, 4)))
        talks.append(path[-40:] if len(path) < 40 else (1,))
        before = len(path) - served(small.serve(kind(*path), float(number)))
        assert before >= 0
        assert 0 <= small.used_bytes <= 400
        assert len(small) <= 40
    assert small.evicted


def test_what_an_engine_computed_is_stored_and_is_no_use() -> None:
    small = cache(40)
    served(small.serve(chunks(1, 2), 0.0))
    served(small.serve(chunks(5, 6), 1.0))
    served(small.serve(chunks(1, 2), 2.0, hit=False))
    served(small.serve(chunks(7, 8), 3.0))
    assert served(small.serve(chunks(5, 6), 4.0)) == 2
    assert served(small.serve(chunks(1, 2), 5.0)) == 0, "it was the one that was used the longest ago"


def test_a_point_that_takes_the_room_of_all_others_is_stored_in_steps() -> None:
    small = cache(1000)
    served(small.serve(chunks(*range(100)), 0.0))
    steps = sum(1 for _ in small.serve(Path([1000], [1000], [16]), 1.0))
    assert steps >= 10
    assert (small.used_bytes, len(small)) == (1000, 1)


def test_a_long_prompt_is_served_in_steps() -> None:
    assert sum(1 for _ in cache(1e9).serve(chunks(*range(1000)), 0.0)) >= 30
