"""The session's thread: an event that goes wrong costs one call, and a thread that ends leaves nobody waiting."""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client import session_loop
from kvdepot.client.calls import ChainedAcquire
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.session_loop import SessionLoop
from kvdepot.client.transports.call_socket import CALLS_UNSENT
from kvdepot.client.transports.control import ControlChannel
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    Confirmed,
    DeclareCall,
    DeclareReply,
    EndRequestCall,
    LocateCall,
    LocateReply,
    ReleaseCall,
    RequestEnd,
    TokenReport,
)
from kvdepot.core.limits import LEASES_PER_SESSION_MAX

from tests.rigs.patience import patient, wait_until

TOKEN = b"t" * 16
ENDPOINT = Endpoint("/tmp/none.sock")
PATIENCE_SECONDS = 30.0


class Channel:
    """Answers at once what the test says; a missing answer never comes."""

    def __init__(self, answers: dict[type, Any]) -> None:
        self.answers = answers
        self.calls: list[Any] = []

    def start(self, call: Any, timeout_seconds: float, done: Callable[[Any], None]) -> None:
        del timeout_seconds
        self.calls.append(call)
        answer = self.answers.get(type(call))
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            done(answer)

    def watch(self, inbox: Any) -> float:
        del inbox
        return inf

    def work(self, ready: bool) -> None: ...

    def close(self) -> None: ...


class Session:
    """A loop that is attached to a scripted channel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channel = Channel({DeclareCall: DeclareReply((), 1), LocateCall: LocateReply(16, "ram", 16)})
        monkeypatch.setattr(session_loop, "ControlChannel", lambda _: self.channel)
        self.completions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.broken_clock = False
        self.detached = threading.Event()
        attachment: Any = SimpleNamespace(
            session=TOKEN, refusal="", daemon_version="9.9.9", renew=lambda _: None, end=self._detach
        )
        self.loop = SessionLoop(
            ENDPOINT, attachment, self.completions, 1, self._clock, random.Random(1), confirm_timeout_seconds=1.0
        )
        self.loop.start()
        self.loop.post(self.loop.attachment_changed, TOKEN, None)
        self.wait(lambda: self.loop.state.attached)

    def _detach(self) -> None:
        assert self.loop.state.ended, "what is sent is sent before"
        self.detached.set()

    def _clock(self) -> float:
        if self.broken_clock:
            raise OSError("no clock")
        return time.monotonic()

    def wait(self, what: Callable[[], bool]) -> None:
        wait_until(what, seconds=PATIENCE_SECONDS, pause_seconds=0.002)

    def submit(self, call: Any, then: ChainedAcquire | None = None) -> None:
        self.loop.post(self.loop.calls.submit, call, time.monotonic() + 5, print, then)

    def answer(self) -> Any:
        """What the next callback gets."""
        return self.completions.get(timeout=patient(PATIENCE_SECONDS))[1]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    found = Session(monkeypatch)
    yield found
    found.broken_clock = False
    found.loop.end(0.1)
    found.loop.join(patient(PATIENCE_SECONDS))


def locate() -> LocateCall:
    return LocateCall(b"", b"n" * 16, b"k" * 16, 16, "r")


def raises() -> None:
    raise KeyError("unexpected")


@pytest.mark.requirement("I3")
def test_an_event_that_fails_is_counted_and_the_session_goes_on(session: Session) -> None:
    session.loop.post(raises)
    session.loop.post(lambda: session.loop.after(0.0, raises))
    session.submit(locate())
    assert session.answer() == LocateReply(16, "ram", 16)
    assert session.loop.state.counters["errors"] == 2
    assert session.loop.state.attached


@pytest.mark.requirement("I3")
def test_a_call_whose_event_fails_is_answered(session: Session) -> None:
    session.channel.answers[AcquireCall] = RuntimeError("unexpected")
    session.submit(AcquireCall(b"", 7, b"n" * 16, b"k" * 16, b"\0", "r"))
    answer = session.answer()
    assert isinstance(answer, CallFailure)
    assert answer.reason is FailureReason.UNAVAILABLE
    # The daemon may have made the lease.
    session.wait(lambda: ReleaseCall(TOKEN, (7,), unused=(7,)) in session.channel.calls)


@pytest.mark.requirement("I3")
def test_when_the_thread_ends_nobody_is_left_waiting(session: Session) -> None:
    del session.channel.answers[LocateCall]
    session.submit(locate())
    session.wait(lambda: any(isinstance(call, LocateCall) for call in session.channel.calls))
    session.broken_clock = True
    session.loop.post(lambda: heapq.heappush(session.loop._timers, (0.0, -1, raises)))
    assert session.answer().code == "closed", "what was pending fails"
    session.wait(lambda: session.loop.state.ended)
    assert not session.loop.state.attached
    session.submit(locate())
    assert session.answer().code == "closed", "what comes later fails at once"


def test_a_session_that_is_to_end_sends_what_it_owes_and_detaches_last(session: Session) -> None:
    session.loop.post(partial(session.loop.outbox.release, (7,), used=True))
    session.loop.end(0.2)
    assert session.detached.wait(patient(PATIENCE_SECONDS))
    assert any(isinstance(call, ReleaseCall) for call in session.channel.calls)


def test_a_session_whose_thread_has_died_detaches_when_it_is_to_end(session: Session) -> None:
    session.broken_clock = True
    session.loop.post(lambda: heapq.heappush(session.loop._timers, (0.0, -1, raises)))
    session.wait(lambda: session.loop.state.ended)
    assert not session.detached.is_set(), "ranks may still copy"
    session.broken_clock = False
    session.loop.end(0.1)
    assert session.detached.wait(patient(PATIENCE_SECONDS))


class Sockets:
    """A loop whose channels are scripted, call sockets and gRPC's. Which were made, and what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, Channel]] = []
        self.grpc_fails = False
        self.reconnects = 0
        self.broken: Callable[[], None] = print
        found = self

        class Socket(Channel):
            def __init__(self, connection: Any, *_: Any, broken: Callable[[], None], **__: Any) -> None:
                super().__init__({})
                found.broken = broken
                found.made.append((f"socket {connection.name}", self))

        monkeypatch.setattr(session_loop, "CallSocket", Socket)
        monkeypatch.setattr(session_loop, "ControlChannel", self._grpc)
        attachment: Any = SimpleNamespace(refusal="", renew=lambda _: None, reconnect=self._reconnect, end=lambda: None)
        self.loop = SessionLoop(
            ENDPOINT, attachment, queue.SimpleQueue(), 1, time.monotonic, random.Random(1), confirm_timeout_seconds=1.0
        )
        self.loop.start()

    def _reconnect(self) -> None:
        self.reconnects += 1

    def _grpc(self, _: Any) -> Channel:
        if self.grpc_fails:
            raise RuntimeError("can't start new thread")
        self.made.append(("grpc", Channel({})))
        return self.made[-1][1]

    def attach(self, token: bytes, name: str) -> None:
        connection = SimpleNamespace(name=name, close=lambda: None, getsockopt=lambda *_: bytes(12))  # of nobody seen
        self.loop.post(self.loop.attachment_changed, token, connection)

    def detach(self) -> None:
        self.loop.post(self.loop.attachment_changed, None, None)

    def wait(self, what: Callable[[], bool]) -> None:
        wait_until(what, seconds=PATIENCE_SECONDS, pause_seconds=0.002)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sockets]:
    found = Sockets(monkeypatch)
    yield found
    found.loop.end(0.1)
    found.loop.join(patient(PATIENCE_SECONDS))


@pytest.mark.requirement("I6")
def test_attachments_that_are_seen_late_are_seen_one_by_one_and_declared_once_each(sockets: Sockets) -> None:
    """A declaration that overtakes a reservation of the same attachment would give its extents to others."""
    other = b"u" * 16
    sockets.loop.post(time.sleep, 0.1)  # busy meanwhile
    for token, name in ((TOKEN, "a"), (other, "b"), (other, "c")):
        sockets.attach(token, name)
        sockets.detach()
    sockets.attach(other, "d")
    sockets.wait(lambda: len(sockets.made) == 4)
    assert [name for name, _ in sockets.made] == [f"socket {name}" for name in "abcd"], "and none over gRPC"
    sockets.wait(lambda: bool(sockets.made[-1][1].calls))
    assert [[call.session for call in channel.calls] for _, channel in sockets.made] == [[TOKEN], *[[other]] * 3]
    assert sockets.loop.state.counters["attached"] == 4


@pytest.mark.requirement("I6")
def test_an_answer_to_a_former_attachment_s_declaration_declares_nothing(sockets: Sockets) -> None:
    sockets.attach(TOKEN, "a")
    sockets.wait(lambda: len(sockets.made) == 1)
    former = sockets.made[0][1]
    sockets.attach(TOKEN, "b")
    sockets.wait(lambda: len(sockets.made) == 2)
    answered = sockets.loop._declare_answered
    sockets.loop.post(answered, former, DeclareReply((), 1))
    sockets.loop.post(answered, former, CallFailure(FailureReason.UNAVAILABLE, "channel_closed"))
    time.sleep(0.2)
    assert not sockets.loop.state.attached
    assert len(sockets.made[1][1].calls) == 1, "nor is it declared again"
    sockets.loop.post(answered, sockets.made[1][1], DeclareReply((), 1))
    sockets.wait(lambda: sockets.loop.state.attached)


@pytest.mark.requirement("I6")
def test_a_call_socket_that_breaks_by_itself_is_replaced_with_the_attachment(sockets: Sockets) -> None:
    """The daemon may yet begin what was sent over it: nothing goes beside it."""
    sockets.attach(TOKEN, "a")
    sockets.wait(lambda: len(sockets.made) == 1)
    sockets.loop.post(sockets.loop._declare_answered, sockets.made[0][1], DeclareReply((), 1))
    sockets.wait(lambda: sockets.loop.state.attached)
    sockets.loop.post(lambda: sockets.broken())
    sockets.wait(lambda: sockets.reconnects == 1)
    assert not sockets.loop.state.attached
    assert [name for name, _ in sockets.made] == ["socket a"]
    sockets.loop.post(lambda: sockets.broken())
    sockets.detach()
    sockets.attach(TOKEN, "b")
    time.sleep(0.3)
    assert sockets.reconnects == 1, "where the attachment had ended, too, it comes back by itself"


@pytest.mark.requirement("I3")
def test_where_no_channel_can_be_made_the_session_goes_on_and_tries_again(sockets: Sockets) -> None:
    sockets.grpc_fails = True
    sockets.loop.post(sockets.loop.attachment_changed, TOKEN, None)
    sockets.wait(lambda: sockets.reconnects == 1)
    assert not sockets.loop.state.ended
    sockets.grpc_fails = False
    sockets.detach()
    sockets.loop.post(sockets.loop.attachment_changed, TOKEN, None)
    sockets.wait(lambda: [name for name, _ in sockets.made] == ["grpc"])


@pytest.mark.requirement("T4")
def test_a_daemon_that_takes_no_calls_does_not_count_as_one_that_answers(session: Session) -> None:
    def opened() -> bool:
        return session.loop.state.counters["breaker_opened"] == 1 and not session.loop.state.attached

    def fail(reason: FailureReason, code: str) -> None:
        session.loop.noted(CallFailure(reason, code))

    for _ in range(session_loop.UNANSWERED_MAX):
        session.loop.post(fail, FailureReason.DEADLINE, "DEADLINE_EXCEEDED")
        time.sleep(session_loop.UNANSWERED_SECONDS_MIN / 2 + 0.1)
    session.wait(opened)
    session.loop.post(fail, FailureReason.UNAVAILABLE, CALLS_UNSENT)
    time.sleep(0.1)
    assert opened()
    session.loop.post(fail, FailureReason.UNAVAILABLE, "not_ready")
    session.wait(lambda: session.loop.state.attached)


@pytest.mark.requirement("I3")
def test_a_deadline_in_the_far_future_ends_no_session(session: Session) -> None:
    session.loop.post(session.loop.after, 1e9, raises)
    session.submit(locate())
    assert session.answer() == LocateReply(16, "ram", 16)
    assert not session.loop.state.ended


@pytest.mark.requirement("I3")
def test_a_call_that_cannot_be_encoded_is_refused_and_not_repeated() -> None:
    channel = ControlChannel(ENDPOINT)
    answers: list[Any] = []
    channel.start(EndRequestCall(TOKEN, "\ud800"), 1.0, answers.append)
    channel.close()
    assert answers[0].reason is FailureReason.REFUSED
    channel.start(EndRequestCall(TOKEN, "r"), 1.0, answers.append)
    assert answers[1].reason is FailureReason.UNAVAILABLE, "a closed channel is another matter"


@pytest.mark.requirement("I5")
def test_an_ending_that_is_refused_does_not_hold_up_the_next(session: Session) -> None:
    session.channel.answers[EndRequestCall] = CallFailure(FailureReason.REFUSED, "not_encodable")
    session.loop.post(session.loop.outbox.end_request, "bad", RequestEnd(), TokenReport())
    session.wait(lambda: EndRequestCall(TOKEN, "bad") in session.channel.calls)
    session.channel.answers[EndRequestCall] = Confirmed()
    session.loop.post(session.loop.outbox.end_request, "good", RequestEnd(), TokenReport())
    session.wait(lambda: EndRequestCall(TOKEN, "good") in session.channel.calls)


def test_an_acquire_that_waits_for_a_disk_is_no_sign_of_a_dead_daemon(session: Session) -> None:
    session.channel.answers[AcquireCall] = CallFailure(FailureReason.DEADLINE, "DEADLINE_EXCEEDED")
    session.channel.answers[ReleaseCall] = Confirmed()
    for lease in (1, 2, 3, 4):
        call = AcquireCall(b"", lease, b"n" * 16, b"k" * 16, b"\0", "r")
        session.loop.post(session.loop.calls.submit, call, time.monotonic() + 1.3, print)
    session.loop.post(session.loop.after, 1.2, lambda: None)
    for _ in range(4):
        assert session.answer().reason is FailureReason.DEADLINE
    assert session.loop.state.counters["failed_deadline"] > 4, "each was asked for again"
    assert session.loop.state.counters["breaker_opened"] == 0
    assert session.loop.state.attached


FOLLOWING = AcquireCall(b"", 7, b"n" * 16, b"k" * 16, b"\1", "r")
GRANTED = AcquireReply(AcquireOutcome.GRANTED, b"", 1)


def follow(make: Callable[[LocateReply], AcquireCall | None] = lambda _: FOLLOWING) -> ChainedAcquire:
    return ChainedAcquire(7, make, 5.0, print)


def acquired(session: Session) -> int:
    return sum(isinstance(call, AcquireCall) for call in session.channel.calls)


def test_what_follows_a_lookup_is_asked_for_when_it_is_answered(session: Session) -> None:
    session.channel.answers[AcquireCall] = GRANTED
    session.submit(locate(), follow(lambda reply: FOLLOWING if reply.boundary_tokens == 16 else None))
    assert session.answer() == LocateReply(16, "ram", 16), "first, so that whoever sees it knows what is asked for"
    assert session.answer() == GRANTED
    assert session.loop.state.leases_asked == 1
    session.channel.answers[ReleaseCall] = Confirmed()
    session.loop.post(session.loop.calls.cancel, 7)
    session.wait(lambda: session.loop.state.leases_ended == 1)
    assert ReleaseCall(TOKEN, (7,), unused=(7,)) in session.channel.calls


def test_nothing_follows_a_lookup_whose_answer_is_not_worth_it_or_where_leases_are_out(session: Session) -> None:
    session.submit(locate(), follow(lambda _: None))
    assert session.answer() == LocateReply(16, "ram", 16)
    session.channel.answers[LocateCall] = CallFailure(FailureReason.REFUSED)
    session.submit(locate(), follow())
    assert isinstance(session.answer(), CallFailure)
    session.channel.answers[LocateCall] = LocateReply(16, "ram", 16)
    session.loop.post(session.loop._leases._open.update, dict.fromkeys(range(100, 100 + LEASES_PER_SESSION_MAX)))
    session.submit(locate(), follow())
    assert session.answer() == LocateReply(16, "ram", 16)
    session.loop.post(session.loop.calls.cancel, 7)
    session.submit(locate())  # all before it is done when it is answered
    session.answer()
    assert session.loop.state.leases_asked == acquired(session) == 0
    assert not any(isinstance(call, ReleaseCall) for call in session.channel.calls), "there is no lease"


def test_what_is_forgone_before_the_answer_is_never_asked_for(session: Session) -> None:
    answer = session.channel.answers.pop(LocateCall)
    session.submit(locate(), follow())
    session.wait(lambda: any(isinstance(call, LocateCall) for call in session.channel.calls))
    session.loop.post(session.loop.calls.cancel, 7)
    session.loop.post(session.loop.calls._answered, 0, answer)
    assert session.answer() == answer
    assert session.loop.state.leases_asked == acquired(session) == 0


@pytest.mark.requirement("I3")
def test_a_following_call_that_cannot_be_made_fails_its_lookup(session: Session) -> None:
    def unmade(_: LocateReply) -> None:
        raise KeyError("unexpected")

    session.submit(locate(), follow(unmade))
    answer = session.answer()
    assert isinstance(answer, CallFailure)
    assert answer.reason is FailureReason.UNAVAILABLE
    assert session.loop.state.attached
    assert session.loop.state.leases_asked == acquired(session) == 0


@pytest.mark.requirement("I5")
def test_a_following_call_whose_answer_is_lost_is_given_back(session: Session) -> None:
    session.channel.answers[AcquireCall] = RuntimeError("unexpected")
    session.channel.answers[ReleaseCall] = Confirmed()
    session.submit(locate(), follow())
    assert session.answer() == LocateReply(16, "ram", 16)
    assert isinstance(session.answer(), CallFailure)
    session.wait(lambda: session.loop.state.leases_ended == session.loop.state.leases_asked == 1)
    assert ReleaseCall(TOKEN, (7,), unused=(7,)) in session.channel.calls
