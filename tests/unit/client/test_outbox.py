"""What ends leases: queued until confirmed, batched, in order; and the book of what is owed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.client import outbox
from kvdepot.client.leases import LEASE_BITS, LeaseBook, LeaseIds
from kvdepot.client.outbox import INDICES_PER_CALL, LEASES_PER_CALL, Outbox, OutboxCall
from kvdepot.core.calls import (
    AbandonCall,
    CommitCall,
    CommitOutcome,
    CommitReply,
    EndRequestCall,
    ReleaseCall,
    RequestEnd,
    TokenReport,
)
from kvdepot.core.limits import REPORTED_TOKENS_MAX

TOKEN = b"t" * 16
OK = bytes([CommitOutcome.COMMITTED])


def kinds(endings: Outbox) -> list[type]:
    return [type(call) for call in endings.next_calls(TOKEN)]


@pytest.mark.requirement("I5")
def test_a_call_stays_queued_until_it_is_confirmed() -> None:
    endings = Outbox()
    endings.release([1, 2], used=True)
    assert endings.next_calls(TOKEN) == [ReleaseCall(TOKEN, (1, 2))]
    endings.release([3], used=False)
    assert endings.next_calls(TOKEN) == [], "one in flight at a time"
    endings.unconfirmed(ReleaseCall)
    assert endings.next_calls(b"u" * 16) == [ReleaseCall(b"u" * 16, (1, 2, 3), unused=(3,))]
    assert endings.confirmed(ReleaseCall).leases == (1, 2, 3)
    assert len(endings) == 0
    assert endings.next_calls(TOKEN) == []


def test_an_end_of_a_request_waits_for_the_commits_before_it() -> None:
    endings = Outbox()
    endings.commit(7, (0,), None)
    endings.end_request("a", RequestEnd(), TokenReport())
    endings.commit(8, (0,), None)
    endings.end_request("b", RequestEnd(), TokenReport())
    (call,) = endings.next_calls(TOKEN)
    assert isinstance(call, CommitCall)
    assert [item.lease_id for item in call.items] == [7, 8]
    endings.commit(9, (0,), None)
    endings.end_request("c", RequestEnd(), TokenReport())
    endings.confirmed(CommitCall, CommitReply((OK, OK)))
    assert kinds(endings) == [CommitCall, EndRequestCall]
    endings.confirmed(EndRequestCall)
    assert endings.next_calls(TOKEN) == [EndRequestCall(TOKEN, "b")]
    endings.confirmed(EndRequestCall)
    assert endings.next_calls(TOKEN) == [], "c waits for 9"
    endings.confirmed(CommitCall, CommitReply((OK,)))
    assert endings.next_calls(TOKEN) == [EndRequestCall(TOKEN, "c")]


def test_every_callback_gets_its_own_outcomes() -> None:
    endings = Outbox()
    got: dict[str, bytes] = {}
    endings.commit(1, (0, 1), lambda outcomes: got.__setitem__("one", outcomes))
    endings.commit(2, (5,), None)
    endings.commit(3, (2,), lambda outcomes: got.__setitem__("three", outcomes))
    (call,) = endings.next_calls(TOKEN)
    assert isinstance(call, CommitCall)
    assert call.items[0].indices == struct.pack("<2I", 0, 1)
    ended = endings.confirmed(CommitCall, CommitReply((b"\x01\x03", b"\x01", b"\x04")))
    for done, outcomes in ended.committed:
        done(outcomes)
    assert got == {"one": b"\x01\x03", "three": b"\x04"}
    assert ended.objects == ((1, (0, 1)), (2, (5,)), (3, (2,)))


def test_an_answer_that_is_too_short_means_lost() -> None:
    endings = Outbox()
    got: list[bytes] = []
    endings.commit(1, (0, 1, 2), got.append)
    endings.next_calls(TOKEN)
    ((done, outcomes),) = endings.confirmed(CommitCall, CommitReply((OK,))).committed
    done(outcomes)
    assert got == [bytes([CommitOutcome.COMMITTED, CommitOutcome.LOST, CommitOutcome.LOST])]


def test_one_item_that_the_daemon_refuses_does_not_take_the_others_with_it() -> None:
    endings = Outbox()
    outcomes: dict[int, bytes] = {}
    for lease in (1, 2, 3):
        endings.commit(lease, (0,), lambda found, lease=lease: outcomes.__setitem__(lease, found))  # type: ignore[misc]
    sent = []
    while calls := endings.next_calls(TOKEN):
        (call,) = calls
        assert isinstance(call, CommitCall)
        leases = [item.lease_id for item in call.items]
        sent.append(leases)
        bad = 2 in leases
        ended = endings.refused(CommitCall) if bad else endings.confirmed(CommitCall, CommitReply((OK,) * len(leases)))
        for done, found in ended.committed:
            done(found)
    assert sent == [[1, 2, 3], [1], [2, 3], [2], [3]]
    assert outcomes == {1: OK, 2: bytes([CommitOutcome.LOST]), 3: OK}


@pytest.mark.requirement("I4")
def test_calls_are_bounded_and_everything_goes_in_the_end() -> None:
    endings = Outbox()
    endings.release(range(1, 2 * LEASES_PER_CALL + 2), used=True)
    for lease in range(1, 5):
        endings.commit(lease, tuple(range(INDICES_PER_CALL - 1)), None)
    released, committed = 0, []
    while calls := endings.next_calls(TOKEN):
        for call in calls:
            if isinstance(call, ReleaseCall):
                assert len(call.lease_ids) <= LEASES_PER_CALL
                released += len(endings.confirmed(ReleaseCall).leases)
            else:
                assert isinstance(call, CommitCall)
                assert sum(len(item.indices) // 4 for item in call.items) <= INDICES_PER_CALL
                committed.append(len(call.items))
                endings.confirmed(CommitCall, CommitReply(()))
    assert released == 2 * LEASES_PER_CALL + 1
    assert committed == [1, 1, 1, 1]


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("answered", [True, False])
def test_a_full_queue_of_ends_loses_the_oldest_ones_and_no_tokens(
    monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    monkeypatch.setattr(outbox, "REQUESTS_QUEUED_MAX", 3)
    endings = Outbox()

    def report(number: int) -> TokenReport:
        return TokenReport(number, 100 + number, number, {"ram": 1, "disk": number}, 0.5)

    def sent() -> EndRequestCall:
        (call,) = endings.next_calls(TOKEN)
        assert isinstance(call, EndRequestCall)
        return call

    for number in (1, 2, 3):
        endings.end_request(str(number), RequestEnd(), report(number))
    first = sent()
    for number in (4, 5):
        endings.end_request(str(number), RequestEnd(), report(number))
    assert len(endings) == 3
    if not answered:  # the daemon may have counted it, so it is sent again as it was
        endings.unconfirmed(EndRequestCall)
        endings.end_request("6", RequestEnd(), TokenReport())
        assert sent() == first
    endings.confirmed(EndRequestCall)
    found, requests = [first.tokens], []
    while len(endings):
        call = sent()
        endings.confirmed(EndRequestCall)
        requests.append(call.request_id)
        found.append(call.tokens)
    assert requests == (["4", "5"] if answered else ["5", "6"])
    assert [one.number for one in found] == ([1, 4, 5] if answered else [1, 5, 0])
    total = found[0]
    for one in found[1:]:
        total = total.joined(one)
    assert (total.prompt_tokens, total.engine_tokens) == (515, 15)
    assert total.loaded_tokens == {"ram": 5, "disk": 15}
    assert total.saved_seconds == 2.5


def test_tokens_that_would_be_too_many_for_one_report_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon would believe none of them."""
    monkeypatch.setattr(outbox, "REQUESTS_QUEUED_MAX", 2)
    endings = Outbox()
    for number, tokens in ((1, REPORTED_TOKENS_MAX), (2, 1), (3, 1)):
        endings.end_request(str(number), RequestEnd(), TokenReport(number, tokens))
    (call,) = endings.next_calls(TOKEN)
    assert isinstance(call, EndRequestCall) and call.tokens == TokenReport(2, 1)


def test_an_abandon_ends_the_whole_lease_or_only_the_named_objects() -> None:
    endings = Outbox()
    endings.abandon(4, ())
    endings.abandon(5, (1, 2))
    (call,) = endings.next_calls(TOKEN)
    assert isinstance(call, AbandonCall)
    ended = endings.confirmed(AbandonCall)
    assert ended.leases == (4,)
    assert ended.objects == ((5, (1, 2)),)


@pytest.mark.requirement("I5")
def test_a_reservation_is_owed_until_each_granted_object_has_ended() -> None:
    book = LeaseBook()
    book.ask(1)
    assert book.ids() == (1,), "owed from the asking: the reply may be lost"
    book.granted(1, [0, 2, 3])
    book.confirmed(1, [0])
    book.confirmed(1, [0, 2])
    assert 1 in book
    book.confirmed(1, [3])
    assert 1 not in book
    book.ask(3)
    book.confirmed(3, [0])
    assert 3 in book, "an unanswered lease ends as a whole"
    book.ended(3)
    book.ended(3)
    assert len(book) == 0


@pytest.mark.parametrize("start", [0, (1 << LEASE_BITS) - 2, (1 << LEASE_BITS) - 1])
def test_lease_ids_are_positive_63_bit_numbers_and_never_repeat(start: int) -> None:
    ids = LeaseIds(start)
    drawn = [ids.draw() for _ in range(5)]
    assert len(set(drawn)) == 5
    assert all(0 < lease < 1 << LEASE_BITS for lease in drawn)


class Daemon:
    """Asks for endings, loses or confirms calls, and notes what was confirmed."""

    def __init__(self) -> None:
        self.endings = Outbox()
        self.asked: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.in_flight: list[OutboxCall] = []

    def ask(self, kind: str, number: int, count: int) -> None:
        self.asked.append((kind, number))
        if kind == "release":
            self.endings.release([number], used=True)
        elif kind == "commit":
            self.endings.commit(number, tuple(range(count)), None)
        elif kind == "abandon":
            self.endings.abandon(number, ())
        else:
            self.endings.end_request(str(number), RequestEnd(), TokenReport())

    def send(self) -> None:
        self.in_flight.extend(self.endings.next_calls(TOKEN))

    def lose(self) -> None:
        if self.in_flight:
            self.endings.unconfirmed(type(self.in_flight.pop(0)))

    def confirm(self) -> None:
        if not self.in_flight:
            return
        call = self.in_flight.pop(0)
        if isinstance(call, EndRequestCall):
            self.endings.confirmed(EndRequestCall)
            self.ended.append(("end_request", int(call.request_id)))
        elif isinstance(call, CommitCall):
            ended = self.endings.confirmed(CommitCall, CommitReply((OK,) * len(call.items)))
            self.ended.extend(("commit", lease) for lease, _ in ended.objects)
        else:
            name = "release" if isinstance(call, ReleaseCall) else "abandon"
            self.ended.extend((name, lease) for lease in self.endings.confirmed(type(call)).leases)


ASKED = ("release", "commit", "abandon", "end_request")


@pytest.mark.requirement("I5")
@given(st.lists(st.tuples(st.sampled_from((*ASKED, "send", "lose", "confirm")), st.integers(1, 5)), max_size=60))
def test_whatever_fails_everything_asked_for_is_confirmed_in_the_end(steps: list[tuple[str, int]]) -> None:
    """Random mixtures of asking, losing and confirming, then a healthy daemon: nothing is left, nothing twice."""
    daemon = Daemon()
    for number, (step, count) in enumerate(steps, 1):
        if step in ASKED:
            daemon.ask(step, number, count)
        else:
            getattr(daemon, step)()
    while len(daemon.endings):
        daemon.send()
        daemon.confirm()
    for kind in ASKED:
        asked = [number for name, number in daemon.asked if name == kind]
        assert [number for name, number in daemon.ended if name == kind] == asked, "once each, in the order of asking"
