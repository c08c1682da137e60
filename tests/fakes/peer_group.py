"""A group of peers whose workers the test answers for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvdepot.core.report import PeerStatus
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Priority, ReadFile, StatFiles
from kvdepot.server.platform.guard import tier_guard
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer.figures import PeerFigures
from kvdepot.server.tiers.peer.group import PeerGroup
from kvdepot.server.tiers.peer.places import Place
from kvdepot.server.tiers.peer.source import SourceWorkers

ARENA = 7
A, B, C = places = [("10.0.0.1", 7448), ("10.0.0.2", 7448), ("::1", 7448)]
FILES = tuple(object_file(name_of(number)) for number in range(3))
GONE = Answer(IoOutcome.GONE)
LOAN: Any = object()
LOG = logging.getLogger("tests.g")


class Workers:
    """Those of one peer. The test answers each job. They probe as real ones do."""

    _probed = False

    def __init__(self, of: dict[Place, Workers]) -> None:
        self.of = of
        self.jobs: list[tuple[Job, Callable[[Answer], None], Any]] = []
        self.why_unusable = ""
        self.guards: list[str] = []
        self.names: tuple[str, ...] = ()
        self.figures = PeerFigures()
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)
        self.closed = False
        self.hangs = False  # a process of it

    @property
    def usable(self) -> bool:
        return not self.why_unusable

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Any = None) -> None:
        self.figures.asked(job)
        self.jobs.append((job, done, loan))

    def answer(self, answer: Answer) -> None:
        job, done, _ = self.jobs.pop(0)
        self.figures.answered(job, answer)
        done(answer)

    def has(self, *lengths: int, source_id: int = 99) -> None:
        self.answer(Answer(IoOutcome.OK, lengths=lengths, source_id=source_id))

    def probe(self, works: Callable[[Answer], object]) -> bool:
        workers: Any = self
        return SourceWorkers.probe(workers, works)

    def renew(self, guard: str) -> None:
        self.guards.append(guard)

    def serve(self, place: Place) -> None:
        assert place not in self.of and self not in self.of.values(), "spare workers have no peer"
        self.of[place] = self

    def use_names(self, names: tuple[str, ...]) -> None:
        self.names = names

    def reads_from(self, source_id: int) -> bool:
        return self.figures.source_id == source_id

    def status(self, *, itself: bool = False) -> PeerStatus:
        return self.figures.status("10.0.0.1:7448", self, itself=itself)

    async def leave(self) -> None:
        while self.hangs:  # noqa: ASYNC110 - the test decides
            await asyncio.sleep(0.001)
        self.closed = True

    async def close(self, seconds: float = 3.0) -> int:
        self.closed = True
        return 0


class Elsewhere:
    """What knows other places. The test answers for it."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.asked_files: list[Sequence[str]] = []
        self.seeks: list[tuple[Sequence[str], Callable[[Place | None], None]]] = []
        self.judged: list[tuple[Place, bool]] = []
        self.raises = False
        self.unusable = False  # who joins

    def asked(self, files: Sequence[str]) -> None:
        self.asked_files.append(files)

    def seek(self, files: Sequence[str], found: Callable[[Place | None], None]) -> None:
        if self.raises:
            raise RuntimeError("in a search")
        self.seeks.append((files, found))

    def judge(self, place: Place, useful: bool) -> None:
        self.judged.append((place, useful))

    def finds(self, place: Place | None) -> None:
        """Answer the only question, with a place that joins for it."""
        ((_, found),) = self.seeks
        self.seeks.clear()
        if place is not None:
            self.peers.group.use({*self.peers.of, place})
            if self.unusable:
                self.peers.of[place].why_unusable = "no worker was started"
        found(place)


class Peers:
    """A group in the loop of a test, and the workers of each peer. `elsewhere`: there are other places."""

    def __init__(self, *members: Place, elsewhere: bool = False) -> None:
        self.of: dict[Place, Workers] = {}
        self.spares: list[Workers] = []
        self.elsewhere = Elsewhere(self)
        self.answers: list[Answer] = []
        self.caught: list[str] = []
        self.group = PeerGroup(
            self._make, name="peers", arena_id=ARENA, loop=asyncio.get_running_loop(), log=LOG,
            guard=tier_guard("peers", self._caught, LOG, lambda: 0.0),
            elsewhere=lambda: self.elsewhere if elsewhere else None,
        )  # fmt: skip
        self.group.use(members)

    def _caught(self, counter: str, _: float) -> None:
        self.caught.append(counter)

    def _make(self, place: Place | None) -> Any:
        workers = Workers(self.of)
        if place is None:
            self.spares.append(workers)
        else:
            self.of[place] = workers
        return workers

    def ask(self, job: Job, loan: Any = None) -> None:
        self.group.submit(job, priority=Priority.LOAD, done=self.answers.append, loan=loan)

    def look_up(self) -> None:
        self.ask(StatFiles(FILES))

    def are_found(self, *owners: Place) -> None:
        """Look up, and let these peers have all files."""
        self.look_up()
        for owner in owners:
            self.of[owner].has(10, 20, 30)
        assert self.lengths == (10, 20, 30)

    def read(self, file: str) -> None:
        self.ask(ReadFile(file, name_of(1), ((0, 4096),), "aside"), LOAN)

    @property
    def lengths(self) -> tuple[int, ...]:
        (answer,) = self.answers
        assert answer.outcome is IoOutcome.OK
        self.answers.clear()
        return answer.lengths

    @property
    def outcome(self) -> IoOutcome:
        (answer,) = self.answers
        self.answers.clear()
        return answer.outcome


def with_peers(test: Callable[[Peers], Awaitable[None]], *members: Place, elsewhere: bool = False) -> None:
    async def run() -> None:
        peers = Peers(*members, elsewhere=elsewhere)
        await test(peers)
        await peers.group.close()
        assert all(workers.closed for workers in (*peers.of.values(), *peers.spares))

    asyncio.run(run())
