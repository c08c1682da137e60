"""A place that is no member joins for a lookup of what it alone has (ADR 86)."""

from __future__ import annotations

import pytest
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Probe, StatFiles
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.peer import group

from tests.fakes.peer_group import ARENA, FILES, A, B, C, Peers, with_peers
from tests.rigs.patience import until


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
