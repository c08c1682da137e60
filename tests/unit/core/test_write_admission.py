"""Which chunks a disk takes with `write = "auto"`: what is expected to be read again, within the target."""

from __future__ import annotations

from random import Random

import pytest
from kvdepot.core.write_admission import BURST_SECONDS, DAY_SECONDS, SAMPLE_MAX, Returns, Verdict, WriteAdmission

DAY_BYTES = 1_000_000
REACH = 1_000_000
KIND = 1


class World:
    """A disk that takes chunks of 100 bytes, and two classes: those of `likely` come back `reads` times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.random = Random(1)
        self.admission = WriteAdmission(lambda: self.now)
        self.written = 0

    def judge(self, use_class: int, *, target: float = 0.0, free_bytes: int = 0, waiting_bytes: int = 0) -> Verdict:
        return self.admission.judge(use_class, target, free_bytes, waiting_bytes)

    def drop(self, use_class: int, reads: int, *, target: float = 0.0, free_bytes: int = 0) -> Verdict:
        """RAM drops a chunk, which is written if it is admitted, and comes back so often."""
        mark = self.random.getrandbits(64)
        self.admission.returns.dropped(mark, KIND, use_class, REACH)
        verdict = self.judge(use_class, target=target, free_bytes=free_bytes)
        if verdict is Verdict.ADMITTED:
            self.admission.wrote(100)
            self.written += 100
        for _ in range(reads):
            self.admission.returns.returned(mark, KIND)
        return verdict


def test_what_does_not_come_back_is_not_written_any_more() -> None:
    world = World()
    for _ in range(300):
        world.drop(1, 1)
        world.drop(0, 0)
    assert world.judge(1) is Verdict.ADMITTED
    assert world.judge(0) is Verdict.UNLIKELY
    assert world.written < 100 * 450


def test_a_refused_class_is_written_again_once_its_chunks_come_back() -> None:
    world = World()
    for _ in range(500):
        world.drop(0, 0)
    assert world.judge(0) is Verdict.UNLIKELY
    for _ in range(100):
        world.drop(0, 1)
    assert world.judge(0) is Verdict.ADMITTED


def test_what_comes_back_beyond_the_reach_of_the_disk_is_no_read() -> None:
    returns = Returns()
    for mark in range(1, 200):
        returns.dropped(mark, KIND, 0, REACH)
        returns.wrote(REACH)
        returns.dropped(mark + 1000, KIND, 1, REACH)
        returns.returned(mark, KIND)  # the disk has dropped it, too
        returns.returned(mark + 1000, KIND)
    assert returns.rate(0) < 0.1 < 0.9 < returns.rate(1)


def test_an_object_of_another_kind_is_not_what_came_back() -> None:
    returns = Returns()
    for mark in range(1, 200):
        returns.dropped(mark, 3, 0, REACH)
        returns.returned(mark, KIND)
    assert returns.rate(0) < 0.05


@pytest.mark.requirement("I4")
def test_the_sample_is_bounded_and_says_the_same() -> None:
    world = World()
    returns = world.admission.returns
    marks = [world.random.getrandbits(64) for _ in range(12 * SAMPLE_MAX)]
    for number, mark in enumerate(marks):
        returns.dropped(mark, KIND, 0, REACH)
        assert len(returns) <= SAMPLE_MAX
        if number >= 2 * SAMPLE_MAX and number % 2:  # half of them, after many others
            returns.returned(marks[number - 2 * SAMPLE_MAX], KIND)
    assert returns.rate(0) == pytest.approx(0.5, abs=0.1)


def test_the_sample_grows_again_when_less_is_dropped() -> None:
    world = World()
    returns = world.admission.returns
    for mark in (world.random.getrandbits(64) for _ in range(4 * SAMPLE_MAX)):
        returns.dropped(mark, KIND, 0, REACH)
    for _ in range(16 * SAMPLE_MAX):
        returns.wrote(REACH // 100)
        returns.dropped(world.random.getrandbits(64), KIND, 0, REACH)
    assert 90 <= len(returns) <= 101, "every chunk is in the sample again, for as long as the disk reaches"


def test_over_days_no_more_is_written_than_the_target_allows() -> None:
    world = World()
    days, steps = 5, 20_000
    for _ in range(days * steps):
        world.now += DAY_SECONDS / steps
        world.drop(1, 1, target=DAY_BYTES)
    target = DAY_BYTES * days
    assert 0.9 * target <= world.written <= target + 100 * 2


def test_without_a_target_all_that_is_likely_is_written() -> None:
    world = World()
    verdicts = {world.drop(1, 1) for _ in range(1000)}
    assert verdicts == {Verdict.ADMITTED}


def test_what_the_target_allows_goes_to_the_chunks_with_the_most_reads() -> None:
    world = World()
    steps = 20_000
    taken = {1: 0, 2: 0, 3: 0}
    for _ in range(steps):
        world.now += DAY_SECONDS / steps
        for use_class, reads in ((1, 1), (2, 4), (3, 2)):
            verdict = world.drop(use_class, reads, target=DAY_BYTES)
            taken[use_class] += verdict is Verdict.ADMITTED
    assert taken[2] > 10 * taken[3] > 0 or taken[3] < 0.05 * taken[2]
    assert taken[1] < 0.05 * taken[2]
    assert world.written >= 0.9 * DAY_BYTES


def test_a_new_disk_is_filled_and_a_restart_allows_nothing_more() -> None:
    burst = int(DAY_BYTES * BURST_SECONDS / DAY_SECONDS)
    assert World().judge(0, target=DAY_BYTES, free_bytes=10 * burst) is Verdict.ADMITTED
    full = World()
    assert full.judge(0, target=DAY_BYTES, free_bytes=0) is Verdict.ENDURANCE
    full.now += DAY_SECONDS
    assert full.judge(0, target=DAY_BYTES) is Verdict.ADMITTED


def test_what_waits_and_what_was_written_beyond_the_target_count() -> None:
    world = World()
    world.judge(0, target=DAY_BYTES)
    world.now += DAY_SECONDS
    assert world.judge(0, target=DAY_BYTES, waiting_bytes=DAY_BYTES) is Verdict.ENDURANCE
    world.admission.wrote(DAY_BYTES)  # by another policy, before a reload
    world.now += DAY_SECONDS / 2
    assert world.judge(0, target=DAY_BYTES) is Verdict.ENDURANCE, "it is a debt"
    world.now += DAY_SECONDS / 2
    assert world.judge(0, target=DAY_BYTES) is Verdict.ADMITTED
