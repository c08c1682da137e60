"""Several peers as one tier: who is asked, who is waited for, and what if one does not serve an object (ADR 84)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kvdepot.core.report import PeerStatus
from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Job, Priority, Probe, ReadFile, StatFiles
from kvdepot.server.platform.guard import tier_guard
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer import group
from kvdepot.server.tiers.peer.figures import FAILURES, PeerFigures
from kvdepot.server.tiers.peer.group import LATE_SECONDS, PeerGroup
from kvdepot.server.tiers.peer.places import Place

from tests.rigs.patience import until

ARENA = 7
A, B, C = places = [("10.0.0.1", 7448), ("10.0.0.2", 7448), ("::1", 7448)]
FILES = tuple(object_file(name_of(number)) for number in range(3))
GONE = Answer(IoOutcome.GONE)
LOAN: Any = object()
LOG = logging.getLogger("tests.g")


class Workers:
    """Those of one peer. The test answers each job."""

    def __init__(self, of: dict[Place, Workers]) -> None:
        self.of = of
        self.jobs: list[tuple[Job, Callable[[Answer], None], Any]] = []
        self.why_unusable = ""
        self.guards: list[str] = []
        self.names: tuple[str, ...] = ()
        self.figures = PeerFigures()
        self.breaker = Breaker(failures_max=1, probe_every_seconds=1.0, clock=lambda: 0.0)
        self.closed = False

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


def test_what_any_peer_has_is_found_and_read_from_one_that_has_it() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, ABSENT, ABSENT)
        assert not peers.answers, "others may have the rest"
        peers.of[B].has(10, 20, ABSENT)
        peers.of[C].has(ABSENT, ABSENT, ABSENT)
        assert peers.lengths == (10, 20, ABSENT)
        peers.read(FILES[1])
        assert [len(peers.of[place].jobs) for place in (A, B, C)] == [0, 1, 0]
        peers.of[B].answer(Answer(IoOutcome.OK, raw_sum=3))
        assert peers.outcome is IoOutcome.OK

    with_peers(test, A, B, C)


def test_a_lookup_ends_when_all_is_found_whoever_has_not_answered() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[B].has(10, 20, 30)
        assert peers.lengths == (10, 20, 30)
        peers.of[A].has(10, 20, 30)
        assert not peers.answers, "it is answered once"
        peers.read(FILES[0])
        peers.read(FILES[0])
        assert [len(peers.of[place].jobs) for place in (A, B)] == [1, 1], "a late answer counts for reads"

    with_peers(test, A, B)


def test_a_peer_that_hangs_is_not_waited_for_and_what_it_may_have_is_not_absent() -> None:
    async def test(peers: Peers) -> None:
        began = asyncio.get_running_loop().time()
        peers.look_up()
        peers.of[B].has(10, ABSENT, ABSENT)
        await until(lambda: peers.answers, "it is answered without the other one")
        assert asyncio.get_running_loop().time() - began >= LATE_SECONDS
        assert peers.lengths == (10, UNKNOWN, UNKNOWN)
        peers.look_up()
        peers.of[A].jobs.clear()
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        await until(lambda: peers.answers, "it is answered without the other one")
        assert peers.lengths == (UNKNOWN,) * 3

    with_peers(test, A, B)


@pytest.mark.parametrize("wrong", [Answer(IoOutcome.TIMEOUT), Answer(IoOutcome.OK, lengths=(1,))])
def test_a_peer_that_fails_hides_nothing_and_proves_nothing_absent(wrong: Answer) -> None:
    async def test(peers: Peers) -> None:
        for order in ((A, B), (B, A)):
            peers.look_up()
            for place in order:
                if place == A:
                    peers.of[A].answer(wrong)
                else:
                    peers.of[B].has(10, ABSENT, ABSENT)
            assert peers.lengths == (10, UNKNOWN, UNKNOWN)
        peers.look_up()
        peers.of[A].answer(Answer(IoOutcome.TIMEOUT))
        peers.of[B].answer(Answer(IoOutcome.IO_ERROR))
        assert peers.outcome in (IoOutcome.IO_ERROR, IoOutcome.TIMEOUT)

    with_peers(test, A, B)


@pytest.mark.parametrize("outcome", sorted(group._ANOTHER))
def test_where_one_peer_does_not_serve_an_object_another_one_is_asked_under_the_same_loan(outcome: IoOutcome) -> None:
    async def test(peers: Peers) -> None:
        peers.are_found(A, B)
        peers.read(FILES[0])
        first, second = sorted((A, B), key=lambda place: -len(peers.of[place].jobs))
        peers.of[first].answer(Answer(outcome))
        ((job, _, loan),) = peers.of[second].jobs
        assert isinstance(job, ReadFile) and loan is LOAN and not peers.answers
        peers.of[second].answer(Answer(outcome))
        await until(lambda: peers.answers, "nobody else has it")
        assert peers.outcome is outcome
        assert not peers.of[first].jobs, "each is asked once"

    with_peers(test, A, B, C)


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("outcome", sorted(set(IoOutcome) - group._ANOTHER))
def test_while_a_worker_may_still_write_or_after_damage_nobody_else_is_asked(outcome: IoOutcome) -> None:
    async def test(peers: Peers) -> None:
        peers.are_found(A, B)
        peers.read(FILES[0])
        first = next(place for place in (A, B) if peers.of[place].jobs)
        peers.of[first].answer(Answer(outcome))
        assert peers.outcome is outcome
        assert not peers.of[A].jobs and not peers.of[B].jobs

    with_peers(test, A, B)


def test_what_a_peer_has_no_more_is_not_asked_of_it_again_but_after_a_lookup() -> None:
    async def test(peers: Peers) -> None:
        peers.are_found(A, B)
        peers.read(FILES[0])
        first, second = sorted((A, B), key=lambda place: -len(peers.of[place].jobs))
        peers.of[first].answer(GONE)
        peers.of[second].answer(Answer(IoOutcome.OK))
        peers.answers.clear()
        for _ in range(3):
            peers.read(FILES[0])
        assert [len(peers.of[place].jobs) for place in (first, second)] == [0, 3]

    with_peers(test, A, B)


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("outcome", sorted(FAILURES))
def test_a_peer_that_failed_is_not_waited_for_and_read_from_last_until_it_answers(outcome: IoOutcome) -> None:
    async def test(peers: Peers) -> None:
        for fails in (True, False):
            peers.look_up()
            peers.of[A].answer(Answer(outcome) if fails else Answer(IoOutcome.OK, lengths=(10, 20, 30)))
            if fails:
                peers.of[B].has(10, ABSENT, ABSENT)
            peers.answers.clear()
            peers.of[B].jobs.clear()
            peers.look_up()
            peers.of[B].has(10, ABSENT, ABSENT)
            assert bool(peers.answers) is fails, "without waiting for the other one"
            peers.of[A].has(10, 20, 30)
            peers.answers.clear()
        peers.look_up()
        peers.of[A].answer(Answer(outcome))
        peers.of[B].has(10, 20, 30)
        for _ in range(3):
            peers.read(FILES[0])
        assert [len(peers.of[place].jobs) for place in (A, B)] == [0, 3]
        peers.answers.clear()
        peers.of[B].answer(GONE)
        assert len(peers.of[A].jobs) == 1, "rather than from nobody"

    with_peers(test, A, B)


def test_an_object_of_peers_that_cannot_be_asked_is_gone() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, 20, 30)
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        peers.answers.clear()
        peers.of[A].why_unusable = "disabled: timeout"
        peers.read(FILES[0])
        await until(lambda: peers.answers, "it is answered")
        assert peers.outcome is IoOutcome.GONE
        assert not peers.of[B].jobs

    with_peers(test, A, B)


def test_reads_go_to_the_peer_with_the_fewest_in_flight() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        for place in (A, B, C):
            peers.of[place].has(10, 20, 30)
        for _ in range(6):
            peers.read(FILES[0])
        assert [len(peers.of[place].jobs) for place in (A, B, C)] == [2, 2, 2]
        for _ in range(2):
            peers.of[B].answer(Answer(IoOutcome.OK))
        peers.read(FILES[0])
        assert len(peers.of[B].jobs) == 1

    with_peers(test, A, B, C)


def test_of_an_object_of_which_nobody_knows_who_has_it_each_peer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "OWNERS_MAX", 2)

    async def test(peers: Peers) -> None:
        peers.are_found(A, B)
        peers.read(FILES[0])
        for _ in range(2):
            asked = next(place for place in (A, B) if peers.of[place].jobs)
            peers.of[asked].answer(GONE)
        await until(lambda: peers.answers, "nobody has it")
        assert peers.outcome is IoOutcome.GONE

    with_peers(test, A, B)


def test_a_daemon_that_is_in_its_own_list_is_never_asked_again() -> None:
    async def test(peers: Peers) -> None:
        peers.group.renew("")
        peers.look_up()
        peers.of[A].has(10, 20, 30, source_id=ARENA)
        peers.of[B].has(ABSENT, 20, ABSENT)
        assert peers.lengths == (ABSENT, 20, ABSENT), "what it has itself is not to be loaded"
        await until(lambda: peers.of[A].closed, "its workers end")
        peers.look_up()
        peers.group.use_names(("DNS:new",))
        assert not peers.of[A].jobs and not peers.of[A].names and peers.of[B].names == ("DNS:new",)
        peers.group.renew("again")
        assert peers.of[A].guards == [""] and peers.of[B].guards == ["", "again"]
        assert not peers.group.reads_from(ARENA) and peers.group.reads_from(99)
        assert not peers.group.use((A, B)), "it is still known"

    with_peers(test, A, B)


def test_peers_come_and_go() -> None:
    async def test(peers: Peers) -> None:
        assert peers.group.why_unusable == "no peer was found"
        assert peers.group.use((A, B))
        peers.group.renew("token")
        assert not peers.group.use((B, A))
        peers.are_found(A, B)
        assert peers.group.use((B, C))
        await until(lambda: peers.of[A].closed, "who is gone has no workers")
        assert peers.of[C].guards == ["token"] and peers.of[B].guards == ["token"]
        for _ in range(2):
            peers.read(FILES[0])
        assert [len(peers.of[place].jobs) for place in (A, B, C)] == [0, 2, 0]
        assert not peers.group.use((B,))
        assert peers.group.use((A, B)), "it is back, and has nothing known of it"
        peers.read(FILES[0])
        assert not peers.of[A].jobs

    with_peers(test)


def test_without_anybody_to_ask_nothing_is_said_of_the_objects() -> None:
    async def test(peers: Peers) -> None:
        for job in (StatFiles(FILES), ReadFile("x", name_of(1), None, "aside"), Probe("probe")):
            peers.ask(job)
            assert not peers.answers, "never from within the call"
            await until(lambda: peers.answers, "it is answered")
            assert peers.outcome is (IoOutcome.GONE if isinstance(job, ReadFile) else IoOutcome.CANCELLED)
        peers.group.use((A, B))
        for place in (A, B):
            peers.of[place].why_unusable = "disabled: timeout"
        assert peers.group.why_unusable == "10.0.0.1:7448: disabled: timeout; 10.0.0.2:7448: disabled: timeout"
        peers.of[B].why_unusable = ""
        assert peers.group.usable and not peers.group.why_unusable
        assert peers.group.trouble == "10.0.0.1:7448: disabled: timeout"

    with_peers(test)


def test_a_group_serves_when_one_of_its_peers_does() -> None:
    async def test(peers: Peers) -> None:
        peers.ask(Probe("probe"))
        peers.of[A].answer(Answer(IoOutcome.TIMEOUT))
        assert not peers.answers
        peers.of[B].answer(replace(Answer(IoOutcome.OK), source_id=99))
        assert [answer.outcome for answer in peers.answers] == [IoOutcome.OK]
        peers.answers.clear()
        peers.ask(Probe("probe"))
        for place in (A, B):
            peers.of[place].answer(Answer(IoOutcome.TIMEOUT))
        assert peers.outcome is IoOutcome.TIMEOUT

    with_peers(test, A, B)


def test_workers_that_cannot_be_closed_are_noticed() -> None:
    async def test(peers: Peers) -> None:
        async def close(seconds: float = 3.0) -> int:
            raise RuntimeError("in the workers' close")

        peers.of[A].close = close  # type: ignore[method-assign]
        peers.group.use([B])
        await until(lambda: bool(peers.caught), "it is counted")
        assert peers.caught == ["io_failed_callbacks"]
        peers.of[A].closed = True

    with_peers(test, A, B)


def test_each_peer_is_shown_also_the_one_that_is_this_daemon() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, 20, 30, source_id=ARENA)
        peers.of[B].has(10, 20, 30)
        assert [one.state for one in peers.group.statuses()] == ["itself", "ready"]
        peers.group.use([B])
        assert [one.state for one in peers.group.statuses()] == ["ready"]

    with_peers(test, A, B)


def test_peers_that_are_new_or_failed_last_are_probed_while_nobody_looks_anything_up() -> None:
    async def test(peers: Peers) -> None:
        peers.group.probe()
        assert not any(workers.jobs for workers in peers.of.values()), "no workers are made yet"
        peers.group.renew("token")
        for _ in range(2):
            peers.group.probe()
        assert all([type(job) for job, _, _ in workers.jobs] == [Probe] for workers in peers.of.values())
        peers.of[A].answer(Answer(IoOutcome.OK, source_id=ARENA))
        peers.of[B].answer(Answer(IoOutcome.OK, source_id=99))
        peers.of[C].answer(Answer(IoOutcome.IO_ERROR, "no route"))
        assert [one.state for one in peers.group.statuses()] == ["itself", "ready", "failing"]
        peers.group.probe()
        assert [len(peers.of[place].jobs) for place in (A, B, C)] == [0, 0, 1]
        peers.of[C].answer(Answer(IoOutcome.OK, source_id=98))
        assert [one.state for one in peers.group.statuses()] == ["itself", "ready", "ready"]
        peers.of[B].why_unusable = "disabled: its breaker probes it"
        peers.of[B].figures.fails = True
        peers.group.probe()
        assert not peers.of[B].jobs

    with_peers(test, A, B, C)


def test_the_reason_for_a_choice_is_shown_and_follows_it() -> None:
    async def test(peers: Peers) -> None:
        assert [one.chosen for one in peers.group.statuses()] == ["", ""]
        peers.group.use([A, B], {A: "by summary: 4 names", B: "by hash"})
        assert [one.chosen for one in peers.group.statuses()] == ["by summary: 4 names", "by hash"]
        peers.group.use([A, C], {A: "by hash", C: "by summary: 9 names"})
        assert [one.chosen for one in peers.group.statuses()] == ["by hash", "by summary: 9 names"]

    with_peers(test, A, B)


# Guests


def test_what_no_member_has_is_asked_of_a_guest_before_the_lookup_is_answered() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, ABSENT, ABSENT)
        assert not peers.elsewhere.seeks, "the other one may have it"
        assert not peers.elsewhere.asked_files, "or ranking would have the guest join already"
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        assert [list(files) for files, _ in peers.elsewhere.seeks] == [[FILES[1], FILES[2]]]
        peers.elsewhere.finds(C)
        ((job, _, _),) = peers.of[C].jobs
        assert job == StatFiles(FILES[1:]) and not peers.answers
        peers.of[C].has(20, ABSENT)
        assert peers.lengths == (10, 20, ABSENT)
        assert peers.elsewhere.judged == [(C, True)] and peers.elsewhere.asked_files == [FILES]
        peers.read(FILES[1])
        assert len(peers.of[C].jobs) == 1

    with_peers(test, A, B, elsewhere=True)


def test_a_peer_that_joins_while_others_are_asked_is_asked_too_and_nobody_joins_as_a_guest() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.group.use([A, B])
        peers.of[A].has(10, ABSENT, ABSENT)
        peers.of[B].has(20, 30)
        assert peers.lengths == (10, 20, 30) and not peers.elsewhere.seeks

    with_peers(test, A, elsewhere=True)


def test_a_lookup_of_what_is_found_or_of_what_nobody_has_has_no_guest() -> None:
    async def test(peers: Peers) -> None:
        peers.are_found(A)
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        assert not peers.elsewhere.seeks
        for nobody in (None, A):
            peers.look_up()
            peers.of[A].has(10, ABSENT, ABSENT)
            peers.of[B].has(10, ABSENT, ABSENT)
            peers.elsewhere.finds(nobody)
            assert peers.lengths == (10, ABSENT, ABSENT), "who was asked is not asked again"
        peers.ask(Probe("probe"))
        for place in (A, B):
            peers.of[place].answer(Answer(IoOutcome.TIMEOUT))
        assert peers.outcome is IoOutcome.TIMEOUT and not peers.elsewhere.seeks

    with_peers(test, A, B, elsewhere=True)


@pytest.mark.parametrize("answer", [
    Answer(IoOutcome.OK, lengths=(ABSENT,) * 3, source_id=99), Answer(IoOutcome.OK, lengths=(1, 2, 3), source_id=ARENA),
    Answer(IoOutcome.IO_ERROR), Answer(IoOutcome.TIMEOUT),
])  # fmt: skip
def test_a_guest_that_has_nothing_is_known_as_useless(answer: Answer) -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(ABSENT, ABSENT, ABSENT)
        peers.elsewhere.finds(B)
        peers.of[B].answer(answer)
        absent = answer.outcome is IoOutcome.OK
        assert peers.lengths == ((ABSENT,) * 3 if absent else (UNKNOWN,) * 3)
        assert peers.elsewhere.judged == [(B, False)]

    with_peers(test, A, elsewhere=True)


def test_a_guest_that_hangs_is_not_waited_for_long_and_what_it_says_later_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "GUEST_SECONDS", 0.05)

    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, ABSENT, ABSENT)
        peers.elsewhere.finds(B)
        await until(lambda: peers.answers, "it is answered without the guest")
        assert peers.lengths == (10, UNKNOWN, UNKNOWN) and not peers.elsewhere.judged
        peers.of[B].has(20, 30)
        assert not peers.answers and peers.elsewhere.judged == [(B, True)]
        peers.read(FILES[1])
        assert len(peers.of[B].jobs) == 1

    with_peers(test, A, elsewhere=True)


def test_a_member_that_is_late_may_end_a_lookup_that_waits_for_a_guest() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        await until(lambda: peers.elsewhere.seeks, "the other one is not waited for")
        peers.of[A].has(10, ABSENT, ABSENT)
        assert not peers.answers
        peers.elsewhere.finds(C)
        peers.of[C].has(10, 20, 30)
        assert peers.lengths == (10, 20, 30)
        peers.look_up()
        peers.of[B].has(ABSENT, ABSENT, ABSENT)
        peers.of[C].has(ABSENT, ABSENT, ABSENT)
        await until(lambda: peers.elsewhere.seeks, "the other one is not waited for")
        peers.of[A].has(10, 20, 30)
        assert peers.lengths == (10, 20, 30)
        peers.elsewhere.finds(None)
        assert not peers.answers

    with_peers(test, A, B, elsewhere=True)


def test_where_all_members_fail_a_guest_is_asked_too() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].answer(Answer(IoOutcome.TIMEOUT))
        peers.elsewhere.finds(B)
        peers.of[B].has(10, 20, ABSENT)
        assert peers.lengths == (10, 20, UNKNOWN)

    with_peers(test, A, elsewhere=True)


def test_a_guest_without_workers_is_known_as_useless_and_a_search_that_raises_is_noticed() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[A].has(10, ABSENT, ABSENT)
        peers.elsewhere.unusable = True
        peers.elsewhere.finds(B)
        assert peers.lengths == (10, ABSENT, ABSENT) and peers.elsewhere.judged == [(B, False)]
        peers.group.use([A])
        peers.elsewhere.raises = True
        peers.look_up()
        peers.of[A].has(10, ABSENT, ABSENT)
        assert peers.lengths == (10, ABSENT, ABSENT) and peers.caught == ["io_failed_callbacks"]

    with_peers(test, A, elsewhere=True)


def test_names_that_prove_nothing_of_a_prompt_are_not_sought() -> None:
    async def test(peers: Peers) -> None:
        state = FILES[1].replace("attention", "state")
        peers.ask(StatFiles((FILES[0], state)))
        peers.of[A].has(10, ABSENT)
        assert peers.lengths == (10, ABSENT) and not peers.elsewhere.seeks

    with_peers(test, A, elsewhere=True)


def test_spare_workers_start_before_there_is_a_peer_for_them() -> None:
    async def test(peers: Peers) -> None:
        peers.group.use([A], spare=True)
        (spare,) = peers.spares
        assert not spare.guards, "nothing may start yet"
        peers.group.renew("token")
        assert spare.guards == ["token"]
        peers.group.use([A], spare=True)
        peers.group.use_names(("DNS:new",))
        assert spare.names == ("DNS:new",) and peers.spares == [spare]
        peers.group.use([A, B], spare=True)
        assert peers.of[B] is spare and spare.guards == ["token"]
        assert len(peers.spares) == 2 and peers.spares[1].guards == ["token"]
        peers.group.use([A, B])
        await until(lambda: peers.spares[1].closed, "no other peer can join")
        peers.group.use([A, B, C])
        assert peers.of[C] not in peers.spares

    with_peers(test, A)
