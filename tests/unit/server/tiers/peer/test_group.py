"""Several peers as one tier: who is asked, who is waited for, and what if one does not serve an object (ADR 84)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Probe, ReadFile, StatFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of
from kvdepot.server.tiers.peer import group, owners
from kvdepot.server.tiers.peer.figures import FAILURES
from kvdepot.server.tiers.peer.group import LATE_SECONDS

from tests.fakes.peer_group import ARENA, FILES, GONE, LOAN, A, B, C, Peers, Workers, with_peers
from tests.rigs.patience import until


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


@pytest.mark.requirement("B3")
def test_the_first_answer_of_a_peer_that_a_request_names_is_waited_for() -> None:
    async def test(peers: Peers) -> None:
        assert peers.group.expect(A, 99) and not peers.group.expect(C, 98)
        peers.look_up()
        peers.of[B].has(10, ABSENT, ABSENT)
        await asyncio.sleep(3 * LATE_SECONDS)
        assert not peers.answers, "its workers may have to start first"
        peers.of[A].has(ABSENT, 20, ABSENT)
        assert peers.lengths == (10, 20, ABSENT)
        assert peers.group.expect(A, 99) and not peers.group.expect(A, 98), "another daemon has answered"
        peers.look_up()
        peers.of[B].has(10, ABSENT, ABSENT)
        await until(lambda: peers.answers, "it is waited for like others")
        peers.of[A].why_unusable = "disabled: timeout"
        assert not peers.group.expect(A, 99)

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
    monkeypatch.setattr(owners, "OWNERS_MAX", 2)

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


@pytest.mark.requirement("I4")
def test_peers_that_left_are_not_kept_for_what_they_had() -> None:
    async def test(peers: Peers) -> None:
        left: list[weakref.ref[Workers]] = []
        for _ in range(50):
            peers.group.use([B])
            peers.group.use([A, B])
            peers.are_found(A, B)
            left.append(weakref.ref(peers.of[A]))
        assert {one.place for one in peers.group.owners_of(FILES[0])} == {A, B}
        assert len(peers.group._owners._numbers[FILES[0]]) == 2
        await until(lambda: not peers.group._leaving, "the workers of before have ended")
        gc.collect()
        assert sum(one() is not None for one in left) == 1

    with_peers(test, A, B)


def test_a_late_answer_of_a_peer_that_left_makes_it_no_owner() -> None:
    async def test(peers: Peers) -> None:
        peers.look_up()
        peers.of[B].has(10, 20, 30)
        peers.group.use([B])
        peers.of[A].has(10, 20, 30)
        assert [one.place for one in peers.group.owners_of(FILES[0])] == [B]

    with_peers(test, A, B)


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
        async def leave() -> None:
            raise RuntimeError("in the workers' end")

        peers.of[A].leave = leave  # type: ignore[method-assign]
        peers.group.use([B])
        await until(lambda: bool(peers.caught), "it is counted")
        assert peers.caught == ["io_failed_callbacks"]
        peers.of[A].closed = True

    with_peers(test, A, B)


@pytest.mark.requirement("I6")
def test_workers_of_a_peer_that_left_are_waited_for_until_they_are_dead_or_the_tier_closes() -> None:
    async def test(peers: Peers) -> None:
        for place in (A, B):
            peers.of[place].hangs = True
        peers.group.use([C])
        await asyncio.sleep(0.01)
        hung = peers.of[A]
        assert not hung.closed and not peers.of[B].closed, "nobody forgets a process that may still write"
        hung.hangs = False
        await until(lambda: hung.closed, "its death is proven")
        assert not peers.of[B].closed, "it still hangs when the tier closes"

    with_peers(test, A, B, C)


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
