"""The extent allocator against a map of bytes, and row T1: below 5 % waste whatever the sizes."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvdepot.core.allocator import Extent, ExtentAllocator, ExtentError

GRANULE = 4096
START = 2 << 20
MIB = 1 << 20
MODEL_SIZES = (1536 << 10, 4 * MIB, 393216, 917504, 65536 + 4096, 1 * MIB + 12288, 131072 + 100, 262144 - 512)


def ready(length: int, granule: int = GRANULE) -> ExtentAllocator:
    allocator = ExtentAllocator(START, length, granule)
    allocator.grow(START + length)
    return allocator


def take(allocator: ExtentAllocator, size: int) -> list[Extent]:
    extents = allocator.allocate(size)
    assert extents is not None
    return extents


class Churn:
    """Objects of the given sizes come and go; the evicted one is the oldest, or any."""

    def __init__(self, capacity: int, sizes: tuple[int, ...], seed: int, oldest_first: bool) -> None:
        self.allocator = ready(capacity)
        self.random = random.Random(seed)
        self.sizes = sizes
        self.oldest_first = oldest_first
        self.live: deque[tuple[int, list[Extent]]] = deque()
        self.payload = 0

    def evict(self) -> None:
        if not self.oldest_first:
            self.live.rotate(self.random.randrange(len(self.live)))
        size, extents = self.live.popleft()
        self.payload -= size
        for extent in extents:
            self.allocator.free(*extent)

    def add(self, size: int) -> int:
        extents = take(self.allocator, size)
        self.live.append((size, extents))
        self.payload += size
        return len(extents)

    def run(self, operations: int, full: float) -> float:
        """Extents an object, over `operations` stores with at most the share `full` of the region used."""
        pieces = 0
        capacity = self.allocator.ready_bytes
        for _ in range(operations):
            size = self.random.choice(self.sizes)
            while self.allocator.used_bytes + self.allocator.rounded(size) > full * capacity:
                self.evict()
            pieces += self.add(size)
        return pieces / operations


@pytest.mark.requirement("T1")
@pytest.mark.parametrize("oldest_first", [True, False], ids=["lru", "random"])
@pytest.mark.parametrize("full", [0.95, 1.0])
def test_waste_is_below_5_percent_at_refusal_after_long_churn(oldest_first: bool, full: float) -> None:
    churn = Churn(256 * MIB, MODEL_SIZES, seed=7, oldest_first=oldest_first)
    churn.run(20_000, full)
    refused: set[int] = set()
    while len(refused) < len(MODEL_SIZES):
        size = churn.random.choice(MODEL_SIZES)
        if churn.allocator.rounded(size) <= churn.allocator.free_bytes:
            churn.add(size)
        else:
            assert churn.allocator.allocate(size) is None
            refused.add(size)
    churn.allocator.check()
    assert churn.payload >= 0.95 * 256 * MIB


@pytest.mark.requirement("T1")
def test_one_odd_size_wastes_less_than_5_percent() -> None:
    churn = Churn(64 * MIB, (80 * 1024 + 1,), seed=1, oldest_first=True)
    while churn.allocator.allocate(80 * 1024 + 1) is not None:
        churn.payload += 80 * 1024 + 1
    assert churn.payload >= 0.95 * 64 * MIB


@pytest.mark.requirement("T1")
def test_objects_stay_whole_between_the_watermarks() -> None:
    churn = Churn(256 * MIB, MODEL_SIZES, seed=3, oldest_first=True)
    churn.run(5_000, full=0.95)
    assert churn.run(10_000, full=0.95) <= 1.01


@pytest.mark.requirement("T1")
def test_never_refuses_while_bytes_are_free_in_the_worst_comb() -> None:
    allocator = ready(8 * MIB)
    singles = [take(allocator, GRANULE)[0] for _ in range(8 * MIB // GRANULE)]
    for extent in singles[::2]:
        allocator.free(*extent)
    extents = take(allocator, 4 * MIB)
    assert len(extents) == 1024
    assert sum(length for _, length in extents) == 4 * MIB
    assert allocator.free_bytes == 0
    allocator.check()


def test_fragments_are_the_fewest_that_hold_the_size() -> None:
    allocator = ready(100 * GRANULE)
    wall = [take(allocator, n * GRANULE)[0] for n in (5, 1, 30, 1, 20, 1, 10, 1, 31)]
    for extent in wall[0:8:2]:
        allocator.free(*extent)
    assert [length // GRANULE for _, length in take(allocator, 53 * GRANULE - 7)] == [30, 20, 2]


def test_best_fit_takes_the_smallest_run_that_holds_the_size() -> None:
    allocator = ready(100 * GRANULE)
    wall = [take(allocator, n * GRANULE)[0] for n in (30, 1, 12, 1, 20, 1)]
    for extent in wall[::2]:
        allocator.free(*extent)
    assert take(allocator, 11 * GRANULE) == [(wall[2][0], 11 * GRANULE)]


def test_lengths_are_payload_and_rounding_is_counted_as_used() -> None:
    allocator = ready(10 * GRANULE)
    assert take(allocator, GRANULE + 1) == [(START, GRANULE + 1)]
    assert allocator.used_bytes == allocator.rounded(GRANULE + 1) == 2 * GRANULE
    allocator.free(START, GRANULE + 1)
    assert (allocator.used_bytes, allocator.free_runs, allocator.largest_free_bytes) == (0, 1, 10 * GRANULE)


def test_only_the_ready_part_is_handed_out() -> None:
    allocator = ExtentAllocator(START, 10 * GRANULE + 5)
    assert allocator.allocate(1) is None
    allocator.grow(START + 3 * GRANULE + 1)
    first = take(allocator, 3 * GRANULE)
    assert allocator.allocate(1) is None
    allocator.grow(START + 2 * GRANULE)
    assert allocator.ready_bytes == 3 * GRANULE
    allocator.free(*first[0])
    allocator.grow(START + 100 * GRANULE)
    assert (allocator.ready_bytes, allocator.free_runs) == (10 * GRANULE, 1)
    allocator.check()


def test_sizes_that_are_no_sizes_are_refused() -> None:
    allocator = ready(10 * GRANULE)
    for size in (0, -1):
        with pytest.raises(ValueError, match="cannot allocate"):
            allocator.allocate(size)
    with pytest.raises(ValueError, match="multiple of the granule"):
        ExtentAllocator(1, GRANULE)


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    ("offset", "length"),
    [(START, GRANULE), (START + 1, GRANULE), (START - GRANULE, GRANULE), (START + 10 * GRANULE, 1), (START, 0)],
)
def test_wrong_frees_are_refused_and_change_nothing(offset: int, length: int) -> None:
    allocator = ready(10 * GRANULE)
    kept = take(allocator, 2 * GRANULE)
    allocator.free(*kept[0])
    with pytest.raises(ExtentError):
        allocator.free(offset, length)
    allocator.check()
    assert allocator.used_bytes == 0


@pytest.mark.requirement("I1c")
@given(st.integers(1, 12), st.randoms(use_true_random=False), st.booleans())
def test_claims_rebuild_the_same_free_space_in_any_order(count: int, shuffler: random.Random, ascending: bool) -> None:
    before = ready(64 * GRANULE)
    live = [take(before, shuffler.randrange(1, 4 * GRANULE))[0] for _ in range(count)]
    for extent in shuffler.sample(live, count // 2):
        before.free(*extent)
        live.remove(extent)
    after = ready(64 * GRANULE)
    shuffler.shuffle(live)
    for extent in sorted(live) if ascending else live:
        after.claim(*extent)
    after.check()
    assert (after.free_bytes, after.free_runs) == (before.free_bytes, before.free_runs)
    for extent in live:
        with pytest.raises(ExtentError):
            after.claim(*extent)
        with pytest.raises(ExtentError):
            after.claim(extent[0] - GRANULE, 2 * GRANULE)


class AgainstBytes(RuleBasedStateMachine):
    """The allocator and a list with one entry a granule must always tell the same."""

    def __init__(self) -> None:
        super().__init__()
        self.map = [False] * 96  # True: used
        self.ready = 0
        self.allocator = ExtentAllocator(START, len(self.map) * GRANULE)
        self.live: list[Extent] = []

    def granules(self, extent: Extent) -> range:
        first = (extent[0] - START) // GRANULE
        return range(first, first - (-extent[1] // GRANULE))

    def mark(self, extent: Extent, used: bool) -> None:
        for granule in self.granules(extent):
            assert granule < self.ready
            assert self.map[granule] is not used
            self.map[granule] = used

    def runs(self) -> list[int]:
        text = "".join("#" if used else "." for used in self.map[: self.ready])
        return [len(run) for run in text.split("#") if run]

    @rule(upto=st.integers(0, 120))
    def grow(self, upto: int) -> None:
        self.allocator.grow(START + upto * GRANULE)
        self.ready = max(self.ready, min(upto, len(self.map)))

    @rule(size=st.integers(1, 40 * GRANULE))
    def allocate(self, size: int) -> None:
        runs = sorted(self.runs(), reverse=True)
        need = -(-size // GRANULE)
        extents = self.allocator.allocate(size)
        if need > sum(runs):
            assert extents is None
            return
        assert extents is not None
        assert sum(length for _, length in extents) == size
        fewest = next(n for n in range(1, len(runs) + 1) if sum(runs[:n]) >= need)
        assert len(extents) == fewest
        for extent in extents:
            self.mark(extent, used=True)
            self.live.append(extent)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(*extent)
        self.mark(extent, used=False)

    @rule(first=st.integers(0, 95), size=st.integers(1, 9 * GRANULE))
    def claim(self, first: int, size: int) -> None:
        extent = (START + first * GRANULE, size)
        wanted = self.granules(extent)
        if wanted.stop <= self.ready and not any(self.map[g] for g in wanted):
            self.allocator.claim(*extent)
            self.mark(extent, used=True)
            self.live.append(extent)
        else:
            with pytest.raises(ExtentError):
                self.allocator.claim(*extent)

    @invariant()
    def same(self) -> None:
        self.allocator.check()
        runs = self.runs()
        assert self.allocator.free_bytes == sum(runs) * GRANULE
        assert self.allocator.used_bytes == sum(self.map) * GRANULE
        assert self.allocator.free_runs == len(runs)
        assert self.allocator.largest_free_bytes == max(runs, default=0) * GRANULE


AgainstBytes.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAMapOfBytes = pytest.mark.requirement("T1")(AgainstBytes.TestCase)
