"""What the workers of a peer remember of it: whether it is back, and what it may have again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, StatFiles
from kvdepot.server.io.peer_wire import PeerSettings
from kvdepot.server.storage.base import IoOutcome, Loan
from kvdepot.server.tiers.peer.source import SETTLE_SECONDS, SourceWorkers

LOOKUP = StatFiles(("x", "y"))
FAILED = Answer(IoOutcome.IO_ERROR)


class Pool:
    """A pool that the test plays."""

    def __init__(self) -> None:
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)
        self.usable = True
        self.jobs: list[Callable[[Answer], None]] = []

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        self.jobs.append(done)


class World:
    def __init__(self) -> None:
        self.pool = Pool()
        self.now = 1000.0
        self.returns: list[float] = []
        pool: Any = self.pool
        log: Any = None
        self.workers = SourceWorkers(
            pool, PeerSettings("10.0.0.1", 7448, "c", "k", "a", ("DNS:a",), 6.0), log=log, count=lambda *_: None,
            clock=lambda: self.now, returned=self._returned,
        )  # fmt: skip

    def _returned(self) -> None:
        self.returns.append(self.now)

    def look_up(self, answer: Answer) -> tuple[int, ...]:
        """Return the lengths that the tier is told."""
        answers: list[Answer] = []
        self.workers.submit(LOOKUP, priority=Priority.LOAD, done=answers.append)
        self.pool.jobs.pop()(answer)
        return answers[0].lengths

    def has(self, *lengths: int, source_id: int = 9) -> tuple[int, ...]:
        return self.look_up(Answer(IoOutcome.OK, lengths=lengths, source_id=source_id))


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
