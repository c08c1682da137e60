"""The what-if curve: near to a full replay, of a window, bounded, and silent without evidence."""

from __future__ import annotations

import tracemalloc
from functools import cache
from hashlib import blake2b
from random import Random

import pytest
from kvdepot.core.what_if import FACTORS, POINTS_MAX, REQUESTS_MIN, WINDOW_SECONDS, Geometry, WhatIf

from benchmarks.policy import GEOMETRIES, Request, hit_rate
from benchmarks.policy import Geometry as Objects
from benchmarks.what_if import curve
from benchmarks.workload_policies import requests_of
from benchmarks.workloads.families import family_names
from tests.rigs.seeds import one_in

ATTENTION, HYBRID, _ = GEOMETRIES
CHUNKS = Geometry(16, 100)
REQUESTS = 240
FRACTION = 0.1


class Clock:
    now = 0.0
    step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def key(*names: object) -> bytes:
    return blake2b(repr(names).encode(), digest_size=16).digest()


def keys(*path: object) -> bytes:
    return b"".join(key(*path[: end + 1]) for end in range(len(path)))


def ask(sketch: WhatIf, path: bytes, geometry: Geometry = CHUNKS, salt: int = 0, offered_tokens: int = 0) -> None:
    sketch.asked(salt, geometry, path, len(path) // 16 * geometry.chunk_tokens, offered_tokens)


def finish(sketch: WhatIf) -> None:
    while not sketch.idle:
        sketch.work(1.0)


def ratios(sketch: WhatIf) -> list[float]:
    finish(sketch)
    found = [point.hit_ratio for point in sketch.status().points]
    return [ratio for ratio in found if ratio is not None]


def rates(sketch: WhatIf) -> list[float]:
    return [point.sample_ratio for point in sketch.status().points]


@cache
def trace(family: str) -> tuple[Request, ...]:
    return tuple(requests_of(family, 3, REQUESTS))


@pytest.mark.parametrize("geometry", [ATTENTION, HYBRID], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("family", one_in(2, family_names(), 1))
def test_the_curve_is_near_a_full_replay_of_each_family(family: str, geometry: Objects) -> None:
    """A cache of 100 hybrid prompts is coarse: ADR 79 has the cells that miss 0.02."""
    requests = trace(family)
    capacity_bytes = int(FRACTION * geometry.unique_bytes(requests))
    found, _ = curve(requests, geometry, capacity_bytes, requests_min=REQUESTS)
    (point,) = [point for point in found.points if point.factor == 1.0]
    full = hit_rate(requests, geometry, "adaptive", FRACTION)
    assert point.hit_ratio == pytest.approx(full, abs=0.02 if geometry is ATTENTION else 0.03)
    rising = [point.hit_ratio for point in found.points if point.hit_ratio is not None]
    assert len(rising) >= 3
    assert rising == pytest.approx(sorted(rising), abs=0.01), "more room, more hits"


@pytest.mark.long(seconds=12)
def test_a_sample_says_nearly_what_all_requests_say() -> None:
    random, clock = Random(5), Clock()
    weights = [1 / (rank + 1) for rank in range(3000)]
    paths = [keys("system", *((at, chunk) for chunk in range(4))) for at in range(3000)]
    sketches = [WhatIf(1000 * 100, "adaptive", clock, points_max=points) for points in (1 << 30, 600)]
    for number in range(3000):
        clock.now = number / 10
        (path,) = random.choices(paths, weights)
        for sketch in sketches:
            ask(sketch, path)
            finish(sketch)
    whole, sample = sketches
    assert rates(sample) == [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625]
    assert ratios(sample) == pytest.approx(ratios(whole), abs=0.02)


def test_chunks_that_the_table_of_marks_has_forgotten_still_count_as_hits() -> None:
    clock = Clock()
    sketch = WhatIf(300_000 * 100, "adaptive", clock, requests_min=300)
    paths = [b"".join(key(number, chunk) for chunk in range(200)) for number in range(1000)]
    for _ in range(2):  # 200,000 chunks lie between two uses, and the table has 65,536 slots
        for path in paths:
            clock.now += 0.1
            ask(sketch, path)
            finish(sketch)
    small, *large = ratios(sketch)
    assert small < 0.3, "a cache of a quarter does not have them"
    assert large[1:] == pytest.approx([0.5] * 2, abs=0.02)


@pytest.mark.long(seconds=12)
def test_ends_are_remembered_over_many_prompts() -> None:
    """Eight thousand prompts lie between two turns. A large cache has them, so they are hits."""
    geometry, clock = Geometry(16, 100, 300), Clock()
    sketch = WhatIf(8_000 * 400, "lru", clock)
    for turn in (("first",), ("first", "second")):
        for number in range(8_000):
            ask(sketch, keys(number, *turn), geometry)
            finish(sketch)
    assert ratios(sketch)[-1] == pytest.approx(2 / 5, abs=0.02)


def test_few_requests_give_no_ratio_but_their_number() -> None:
    sketch = WhatIf(10_000, "adaptive", Clock())
    for number in range(REQUESTS_MIN - 1):
        ask(sketch, keys(number % 3), offered_tokens=8)
    finish(sketch)
    found = sketch.status()
    assert (ratios(sketch), found.measured_hit_ratio) == ([], None)
    assert {point.sampled_requests for point in found.points} == {found.requests} == {REQUESTS_MIN - 1}
    assert found.requests_min == REQUESTS_MIN
    ask(sketch, keys(0), offered_tokens=8)
    finish(sketch)
    assert sketch.status().measured_hit_ratio == 0.5
    assert len(ratios(sketch)) == len(FACTORS)


def test_what_left_the_window_counts_no_more() -> None:
    clock = Clock()
    sketch = WhatIf(1 << 20, "adaptive", clock, points_max=1 << 20)
    for number in range(REQUESTS_MIN):
        ask(sketch, keys(("once", number)))
    assert max(ratios(sketch)) == 0.0
    clock.now = WINDOW_SECONDS * 1.2
    assert ratios(sketch) == []
    for _ in range(REQUESTS_MIN):
        ask(sketch, keys(("once", 0)))
    assert min(ratios(sketch)) == 1.0, "the cache still has what came before the window"
    assert sketch.status().requests == REQUESTS_MIN


def test_namespaces_share_nothing() -> None:
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1 << 20)
    for number in range(REQUESTS_MIN):
        ask(sketch, keys("one prompt"), salt=number + 1)
    assert max(ratios(sketch)) == 0.0


def test_a_common_beginning_is_no_place_to_resume_at_for_states() -> None:
    geometry = Geometry(16, 100, 300)
    sketch = WhatIf(1 << 22, "adaptive", Clock(), points_max=1 << 22)
    for number in range(REQUESTS_MIN):
        ask(sketch, keys("system", number), geometry)
    assert max(ratios(sketch)) == 0.0
    for number in range(REQUESTS_MIN):
        ask(sketch, keys("system", number, "next"), geometry)
    assert min(ratios(sketch)[2:]) == pytest.approx(2 / 5)


def test_a_common_beginning_is_a_place_to_resume_at_for_windows_once_it_is_known() -> None:
    """Windows are stored with each chunk. The place where prompts part is known from the second one on."""
    geometry = Geometry(16, 100, 300, at_branches=True)
    sketch = WhatIf(1 << 22, "adaptive", Clock(), points_max=1 << 22)
    for number in range(REQUESTS_MIN):
        ask(sketch, keys("system", number), geometry)
    assert min(ratios(sketch)) == pytest.approx((REQUESTS_MIN - 2) / REQUESTS_MIN / 2)


def test_a_lower_tier_has_at_least_what_ram_has() -> None:
    alone, below = (WhatIf(100, "adaptive", Clock(), least_bytes=least) for least in (0.0, 50_000.0))
    for sketch in (alone, below):
        for number in range(REQUESTS_MIN):
            ask(sketch, keys(number % 50))
    assert ratios(alone)[0] < 0.1
    assert ratios(below)[0] == pytest.approx(1 - 50 / REQUESTS_MIN)


def test_only_a_full_cache_says_so() -> None:
    sketch = WhatIf(1000, "adaptive", Clock())
    for number in range(REQUESTS_MIN):
        ask(sketch, keys(number % 30))
    finish(sketch)
    assert [point.full for point in sketch.status().points] == [True, True, True, True, False, False]


def test_more_points_than_allowed_halve_the_rate() -> None:
    sketch = WhatIf(1 << 40, "adaptive", Clock(), points_max=64)
    for number in range(1000):
        ask(sketch, keys(number), Geometry(16, 100, 1))
        finish(sketch)
    assert 0 < min(rates(sketch)) <= 1 / 8


def test_work_stops_after_its_time() -> None:
    clock = Clock()
    sketch = WhatIf(1 << 20, "adaptive", clock, points_max=1 << 20)
    ask(sketch, keys(*range(600)))
    clock.step = 0.001
    began = clock.now
    sketch.work(0.002)
    assert clock.now - began < 0.006
    assert not sketch.idle, "a long prompt takes several ticks"
    finish(sketch)


def overload(sketch: WhatIf) -> None:
    """Queue more than fits, and let the sketch notice."""
    path = keys("prompt") * 10_000
    for _ in range(40):
        ask(sketch, path)
    sketch.work(0.0)
    assert sketch.idle


def test_what_cannot_keep_up_starts_again_with_a_smaller_sample() -> None:
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1 << 20)
    overload(sketch)
    assert rates(sketch) == [0.5] * len(FACTORS)


def test_prompts_without_a_chunk_fill_the_queue_too() -> None:
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1 << 20)
    for _ in range(20_000):
        ask(sketch, b"")
    sketch.work(0.0)
    assert sketch.idle
    assert max(rates(sketch)) == 0.5


def test_a_sample_never_becomes_nothing() -> None:
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1 << 20)
    for _ in range(100):
        overload(sketch)
    assert min(rates(sketch)) > 0
    for number in range(REQUESTS_MIN):
        ask(sketch, keys(number))
    assert ratios(sketch) == []


def test_a_quiet_window_gives_a_half_back() -> None:
    clock = Clock()
    sketch = WhatIf(1 << 20, "adaptive", clock, points_max=1 << 20)
    overload(sketch)
    overload(sketch)
    for expected in (0.5, 1.0, 1.0):
        clock.now += WINDOW_SECONDS
        ask(sketch, keys("one"))
        finish(sketch)
        assert rates(sketch) == [expected] * len(FACTORS)


def test_a_busy_window_gives_nothing_back() -> None:
    clock = Clock()
    sketch = WhatIf(1 << 20, "adaptive", clock, points_max=1 << 20)
    overload(sketch)
    for _ in range(10):  # more than an eighth of what fits
        ask(sketch, keys("prompt") * 10_000)
    clock.now += WINDOW_SECONDS
    finish(sketch)
    assert rates(sketch) == [0.5] * len(FACTORS)


def test_the_rate_of_ends_is_chosen_for_whole_prompts() -> None:
    """An end has the attention of its whole prompt, so a sample of all ends has few points."""
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1024)
    ask(sketch, keys(*range(64)), Geometry(16, 100, 300))
    finish(sketch)
    assert rates(sketch) == [1.0] * 5 + [0.5]


def test_what_an_engine_generated_is_there_in_the_next_turn() -> None:
    sketch = WhatIf(1 << 20, "adaptive", Clock(), points_max=1 << 20)
    for number in range(REQUESTS_MIN):
        ask(sketch, keys(number))
        sketch.computed(0, CHUNKS, keys(number, "answer"))
    assert ratios(sketch) == [0.0] * len(FACTORS), "nobody has looked it up"
    assert sketch.status().requests == REQUESTS_MIN
    for number in range(REQUESTS_MIN):
        ask(sketch, keys(number, "answer", "next"))
    assert min(ratios(sketch)) == pytest.approx(2 / 4)


def test_a_full_sketch_takes_less_than_four_mebibytes() -> None:
    clock = Clock()
    tracemalloc.start()
    try:
        sketch = WhatIf(4 * POINTS_MAX * 100, "adaptive", clock)
        for number in range(1000):
            clock.now += 1
            ask(sketch, keys(*((number, chunk) for chunk in range(8))))
            finish(sketch)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sketch.status().points[1].full
    assert taken < 4 << 20
