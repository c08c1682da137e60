"""What the workers of a peer remember of it: whether it is back, and what it may have again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, ReadFile, StatFiles
from kvdepot.server.io.peer_wire import Lane, PeerSettings
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer.source import (
    LATE,
    NIXL_SECONDS_MAX,
    NIXL_SECONDS_MIN,
    SETTLE_SECONDS,
    SourceWorkers,
)

LOOKUP = StatFiles(("x", "y"))
READ = ReadFile("x", name_of(1), None, "")
FAILED = Answer(IoOutcome.IO_ERROR)


class Pool:
    """A pool that the test plays."""

    def __init__(self) -> None:
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)
        self.usable = True
        self.jobs: list[Callable[[Answer], None]] = []
        self.renewed: list[PeerSettings] = []

    def renew(self, guard: str, peer: str) -> None:
        assert not guard
        self.renewed.append(PeerSettings.unpack(peer))

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        self.jobs.append(done)


class World:
    def __init__(self, lane: Lane = Lane.STREAM) -> None:
        self.pool = Pool()
        self.now = 1000.0
        self.returns: list[float] = []
        pool: Any = self.pool
        self.workers = SourceWorkers(
            pool, PeerSettings("10.0.0.1", 7448, "c", "k", "a", ("DNS:a",), 6.0, lane), log=logging.getLogger("peer"),
            count=lambda *_: None, clock=lambda: self.now, returned=self._returned,
        )  # fmt: skip

    def _returned(self) -> None:
        self.returns.append(self.now)

    def look_up(self, answer: Answer) -> tuple[int, ...]:
        """Return the lengths that the tier is told."""
        answers: list[Answer] = []
        self.workers.submit(LOOKUP, priority=Priority.LOAD, done=answers.append)
        self.pool.jobs.pop()(answer)
        return answers[0].lengths

    def read(self, outcome: IoOutcome, lane: str = "") -> None:
        self.workers.submit(READ, priority=Priority.LOAD, done=lambda _: None)
        self.pool.jobs.pop()(Answer(outcome, lane=lane))

    def renewals(self) -> list[str]:
        """Return why no NIXL is used, for each renewal since the last call."""
        renewed, self.pool.renewed = self.pool.renewed, []
        return [one.no_nixl for one in renewed]

    def has(self, *lengths: int, source_id: int = 9) -> tuple[int, ...]:
        return self.look_up(Answer(IoOutcome.OK, lengths=lengths, source_id=source_id))


@pytest.mark.requirement("S3")
@pytest.mark.parametrize(
    ("names", "outcome"),
    [(("DNS:a", "DNS:b"), IoOutcome.OK), (("DNS:b",), IoOutcome.CANCELLED), ((), IoOutcome.CANCELLED)],
)
def test_what_was_read_while_a_name_was_taken_away_is_not_used(names: tuple[str, ...], outcome: IoOutcome) -> None:
    world = World()
    answers: list[Answer] = []
    world.workers.submit(READ, priority=Priority.LOAD, done=answers.append)
    world.workers.use_names(names)
    world.pool.jobs.pop()(Answer(IoOutcome.OK))
    assert [one.outcome for one in answers] == [outcome]


def test_a_peer_that_is_back_may_have_again_what_it_does_not_have_at_once() -> None:
    world = World()
    assert world.has(5, ABSENT) == (5, ABSENT)
    world.look_up(FAILED)
    assert not world.returns
    assert world.has(5, ABSENT) == (5, UNKNOWN) and len(world.returns) == 1
    world.now += SETTLE_SECONDS - 1
    assert world.has(5, ABSENT) == (5, UNKNOWN) and len(world.returns) == 1
    world.now += 1
    assert world.has(5, ABSENT) == (5, ABSENT)
    assert world.has(5, ABSENT, source_id=8) == (5, UNKNOWN) and len(world.returns) == 2


def test_a_peer_that_was_disabled_is_back_before_anybody_asks_it() -> None:
    world = World()
    world.workers.changed()
    assert not world.returns, "its workers have started"
    world.look_up(FAILED)
    world.pool.usable = False
    world.workers.changed()
    assert not world.returns
    world.pool.usable = True
    world.workers.changed()
    assert len(world.returns) == 1 and world.has(5, ABSENT) == (5, UNKNOWN)


def test_a_peer_is_probed_once_at_a_time_while_it_is_new_or_failed_last() -> None:
    world = World()
    works: list[Answer] = []
    assert world.workers.probe(works.append) and not world.workers.probe(works.append)
    world.pool.jobs.pop()(FAILED)
    assert not works and world.workers.probe(works.append)
    world.pool.jobs.pop()(Answer(IoOutcome.OK, source_id=9))
    assert [one.source_id for one in works] == [9] and len(world.returns) == 1
    assert not world.workers.probe(works.append), "it has answered"
    world.look_up(FAILED)
    world.pool.usable = False
    assert not world.workers.probe(works.append), "its breaker probes it"
    world.pool.usable = True
    assert world.workers.probe(works.append)


# Lanes


def test_after_a_read_over_nixl_that_hangs_objects_come_over_the_stream_for_longer_each_time() -> None:
    world, seconds = World(Lane.NIXL), NIXL_SECONDS_MIN
    for _ in range(10):
        world.read(IoOutcome.TIMEOUT)
        world.read(IoOutcome.TIMEOUT)  # it had begun before
        assert world.renewals() == [LATE]
        world.read(IoOutcome.OK, f"{Lane.STREAM}: {LATE}")
        world.read(IoOutcome.TIMEOUT)  # over the stream
        world.now += seconds - 1
        world.has(5)
        assert not world.renewals()
        world.now += 1
        world.has(5)
        assert world.renewals() == [""]
        seconds = min(2 * seconds, NIXL_SECONDS_MAX)
    world.read(IoOutcome.OK, Lane.NIXL)
    world.read(IoOutcome.TIMEOUT)
    world.now += NIXL_SECONDS_MIN
    world.has(5)
    assert world.renewals() == [LATE, ""], "it has worked since"


@pytest.mark.parametrize(
    ("lane", "outcome", "used"),
    [
        (Lane.STREAM, IoOutcome.TIMEOUT, Lane.STREAM),
        (Lane.NIXL, IoOutcome.TIMEOUT, f"{Lane.STREAM}: the peer lends nothing over NIXL"),
        (Lane.NIXL, IoOutcome.IO_ERROR, Lane.NIXL),
    ],
)
def test_the_lane_stays_after_what_does_not_speak_against_nixl(lane: Lane, outcome: IoOutcome, used: str) -> None:
    world = World(lane)
    world.read(IoOutcome.OK, used)
    world.read(outcome)
    assert not world.renewals()


def test_a_lookup_that_hangs_does_not_speak_against_nixl() -> None:
    world = World(Lane.NIXL)
    world.look_up(Answer(IoOutcome.TIMEOUT))
    assert not world.renewals()


def test_a_peer_with_other_names_keeps_its_lane() -> None:
    world = World(Lane.NIXL)
    world.read(IoOutcome.TIMEOUT)
    world.workers.use_names(("DNS:b",))
    assert world.renewals() == [LATE, LATE]
