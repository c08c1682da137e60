"""The session's own thread: owner of everything about the daemon that changes.

All events (calls of the engine, answers, changes of the attachment, timers) come through
one queue, or the call socket, and run here, one after the other, so nothing needs a lock.
Readers on other threads see `LoopState`, plain fields that only this thread writes.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from kvdepot.client.backoff import Backoff
from kvdepot.client.breaker import Breaker
from kvdepot.client.endings import CommitDone, Ended, EndingCall, Endings
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.inbox import Inbox
from kvdepot.client.leases import LeaseBook
from kvdepot.client.registrations import Registrations
from kvdepot.client.transports.call_socket import CALLS_UNSENT, CallSocket
from kvdepot.client.transports.control import Answer, Channel, ControlChannel, ProbeCall
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitReply,
    DeclareCall,
    DeclareReply,
    LocateCall,
    LocateReply,
    RequestEnd,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.limits import LEASES_PER_SESSION_MAX

if TYPE_CHECKING:
    import queue
    import random
    import socket

    from kvdepot.client.attachment import Attachment
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec

Completion = tuple[Callable[[Any], None], Any]
Call = LocateCall | AcquireCall | ReserveCall

CALLS_IN_FLIGHT_MAX = 256
CONFIRM_SECONDS_MAX = 2.0
"""Deadline of one Release, Commit, Abandon, EndRequest or Declare: then it is sent again."""
RETRY_FIRST_SECONDS = 0.02
RETRY_MAX_SECONDS = 1.0
REPEAT_SECONDS_MIN = 0.005
"""With less than this left, a lost reply is not asked for again."""
UNANSWERED_MAX = 3
UNANSWERED_SECONDS_MIN = 1.0
PROBE_SECONDS = 0.5
SLEEP_SECONDS_MAX = 3600.0
"""Longer ones are more than epoll takes."""


@dataclass(slots=True)
class LoopState:
    """What other threads may read, without a lock and a moment late."""

    attached: bool = False
    ended: bool = False  # the loop's thread is over: nothing is sent or answered any more
    ranks_attached: int = 0
    registered: frozenset[bytes] = frozenset()
    void: dict[bytes, int] = field(default_factory=dict)
    refusal: str = ""
    leases_asked: int = 0  # behind lookups
    leases_ended: int = 0
    unconfirmed: int = 0
    counters: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Following:
    """An Acquire that is made as soon as a lookup is answered, if its answer is worth one.

    `make` runs on the session's thread; None: there is none. `done` as for any Acquire; where
    none is made it is never called.
    """

    lease_id: int
    make: Callable[[LocateReply], AcquireCall | None]
    timeout_seconds: float
    done: Callable[[Any], None]


@dataclass(slots=True)
class _Pending:
    """A call of the engine that has not been answered."""

    call: Call
    deadline: float
    done: Callable[[Any], None]
    following: Following | None = None
    attempts: int = 0


class SessionLoop:
    """See the module. Public methods but `post`, `start`, `end` and `join` run on the loop's thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        attachment: Attachment,
        completions: queue.SimpleQueue[Completion],
        world_size: int,
        clock: Callable[[], float],
        rng: random.Random,
        confirm_timeout_seconds: float,
        log: logging.Logger | None = None,
    ) -> None:
        self.state = LoopState()
        self._endpoint = endpoint
        self._attachment = attachment
        self._completions = completions
        self._clock = clock
        self._confirm_timeout_seconds = confirm_timeout_seconds
        self._log = log or logging.getLogger(__name__)
        self._inbox: Inbox[tuple[Callable[..., None], tuple[Any, ...]]] = Inbox()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._token: bytes | None = None
        self._declared = False
        self._channel: Channel | None = None
        self._leases = LeaseBook()
        self._endings = Endings()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._breaker = Breaker(UNANSWERED_MAX, UNANSWERED_SECONDS_MIN, clock)
        self._retry = Backoff(RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS, rng.random)
        self._resend_armed = False
        self._registrations = Registrations(self, world_size, Backoff(0.1, 2.0, rng.random))
        self._close_at: float | None = None
        self._working_on: int | None = None  # the engine's call that the current event is about
        self._error_logged = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-session", daemon=True)

    # --- any thread ---

    def post(self, event: Callable[..., None], *arguments: Any) -> None:
        """Have the loop's thread run `event(*arguments)`. Never blocks."""
        self._inbox.put((event, arguments))
        if self.state.ended:
            self._fail_posted()

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout_seconds: float) -> None:
        """Send what is queued, for at most `timeout_seconds`, then end the thread and the attachment. Never blocks."""
        self.post(self._close, self._clock() + timeout_seconds)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, for so long at most."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._close_at is None or (self._owes() and self._clock() < self._close_at):
                self._turn()
        except Exception:  # noqa: BLE001 - I3: whatever it is, it is said, and nobody is left waiting
            self._log.exception("kvdepot: the session with the daemon has ended: nothing is stored or loaded any more")
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait for the next event or timer, and run what is due."""
        due = self._watch_channel()
        if self._timers:
            due = min(due, self._timers[0][0])
        ready = self._inbox.wait(min(max(due - self._clock(), 0.0), SLEEP_SECONDS_MAX))
        if isinstance(self._channel, CallSocket):
            self._guarded(self._channel.work, ready)
        for _ in range(len(self._inbox)):
            posted = self._inbox.take()
            if posted is not None:
                self._guarded(posted[0], *posted[1])
        while self._timers and self._timers[0][0] <= self._clock():
            self._guarded(heapq.heappop(self._timers)[2])
        self._guarded(self._send_endings)

    def _watch_channel(self) -> float:
        """Wait for the call socket, too. Returns when one of its calls has waited for long enough."""
        channel = self._channel
        if not isinstance(channel, CallSocket) or not channel.open:
            return inf
        try:
            self._inbox.watch(channel.fileno(), writable=channel.unsent)
        except OSError:  # the kernel has no memory for it
            channel.end()
            return inf
        return inf if channel.deadline is None else channel.deadline

    def _guarded(self, event: Callable[..., None], *arguments: Any) -> None:
        """One event that goes wrong costs the call it is about, not the session."""
        try:
            event(*arguments)
        except Exception as error:  # noqa: BLE001 - I3: without this thread every request would wait for its timeouts
            self.count("errors")
            if not self._error_logged:
                self._error_logged = True
                self._log.exception("kvdepot: an event of the session failed; further ones are only counted")
            if self._working_on in self._pending:
                self._fail(self._working_on, CallFailure(FailureReason.UNAVAILABLE, "error", repr(error)))
        finally:
            self._working_on = None

    def _end(self) -> None:
        """Whatever ended the thread: say so, and leave nobody waiting."""
        self.state.attached = False
        self.state.ended = True
        for pending in self._pending.values():
            self._completions.put((pending.done, _ended_failure()))
        self._pending.clear()
        self._fail_posted()
        if self._channel is not None:
            self._channel.close()
        if self._close_at is not None:
            self._attachment.end()  # last: with it the daemon ends what has not been sent

    def _fail_posted(self) -> None:
        """Any thread, once the loop has ended: fail the calls that came too late for it, and detach if asked to."""
        while (posted := self._inbox.take()) is not None:
            event, arguments = posted
            if event == self.submit:
                self._completions.put((arguments[2], _ended_failure()))
            elif event == self.attachment_changed and arguments[1] is not None:
                arguments[1].close()
            elif event == self._close:
                self._attachment.end()

    def _close(self, close_at: float) -> None:
        self._close_at = close_at
        self.after(max(close_at - self._clock(), 0.0), lambda: None)
        for number in list(self._pending):
            self._fail(number, CallFailure(FailureReason.UNAVAILABLE, "closed", "the session is closed"))

    def _owes(self) -> bool:
        return self._declared and len(self._endings) > 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run `event` on this thread in `seconds`."""
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._timer_numbers), event))

    def count(self, name: str, amount: int = 1) -> None:
        self.state.counters[name] += amount

    # --- attaching ---

    def attachment_changed(self, token: bytes | None, connection: socket.socket | None) -> None:
        """An attach: its token, and a call socket, which is taken over; or a loss: None. Each, in order."""
        if token is None and self._token is None:
            return
        self._token = token
        self._declared = False
        self._registrations.detached()
        self._publish()
        if token is None:
            self.count("detached")
            return
        self.count("attached")
        # A channel of its own: calls made to the daemon before this one end with its channel.
        former, self._channel = self._channel, None
        if former is not None:
            former.close()
        self._channel = self._open_channel(connection)
        self._breaker.answered()
        self._declare()

    def _open_channel(self, connection: socket.socket | None) -> Channel:
        if connection is not None:
            return CallSocket(connection, self._clock, unwatch=self._inbox.unwatch, broken=self._call_socket_broke)
        try:
            return ControlChannel(self._endpoint)
        except Exception:  # no thread for it, perhaps
            self.after(self._retry.next_seconds(), lambda: self._reconnect(None))
            raise

    def _call_socket_broke(self) -> None:
        """With the attachment, which says so next, or by itself: what was sent is ended by attaching anew."""
        self.count("call_sockets_broken")
        self._declared = False
        self._publish()
        broken = self._channel
        self.after(self._retry.next_seconds(), lambda: self._reconnect(broken))

    def _reconnect(self, broken: Channel | None) -> None:
        if self._channel is broken and self._token is not None:
            self._attachment.reconnect()

    def _declare(self) -> None:
        """Of each channel the first call, which everything else waits for."""
        channel = self._channel
        if channel is not None and self._token is not None:
            self.call(
                DeclareCall(self._token, self._leases.ids()), lambda answer: self._declare_answered(channel, answer)
            )

    def _declare_answered(self, channel: Channel, answer: Answer) -> None:
        if self._token is None or channel is not self._channel:
            return
        if isinstance(answer, DeclareReply):
            # Lost leases stay in the book: their owner still ends them, and the daemon answers that they are lost.
            self.count("leases_lost", len(answer.lost))
            self._declared = True
            self._registrations.attached(self._token, answer.ranks_attached)
            self._publish()
            return
        self.noted(answer)
        self.after(self._retry.next_seconds(), lambda: self._declare_again(channel))

    def _declare_again(self, channel: Channel) -> None:
        if channel is self._channel:
            self._declare()

    def call(self, call: Any, done: Callable[[Answer], None]) -> None:
        """A call of the loop's own; `done` runs on this thread."""
        assert self._channel is not None
        self._channel.start(
            call, self._confirm_timeout_seconds, lambda answer: self.post(done, answer), wait_for_ready=True
        )

    def noted(self, answer: Answer, *, waits: bool = False) -> None:
        """Draw the consequences of an answer that concern the whole session.

        `waits`: the call may take its time where a disk has to be read first, and says nothing of the daemon.
        """
        if not isinstance(answer, CallFailure):
            self._answered()
            return
        self.count(f"failed_{answer.reason.value}")
        if answer.code == "unknown_session" and self._token is not None:
            self._attachment.renew(self._token)
        elif answer.code == "unknown_namespace":
            self._registrations.again()
        if answer.code == CALLS_UNSENT:
            pass
        elif answer.reason is not FailureReason.DEADLINE:
            self._breaker.answered()
        elif not waits and self._breaker.unanswered():
            self._log.warning("kvdepot: the daemon at %s does not answer", self._endpoint)
            self.count("breaker_opened")
            self._probe()
        self._publish()

    def _probe(self) -> None:
        if self._breaker.open and self._channel is not None:
            self._channel.start(ProbeCall(), PROBE_SECONDS, lambda answer: self.post(self._probed, answer))

    def _probed(self, answer: Answer) -> None:
        if isinstance(answer, CallFailure) and answer.reason in (FailureReason.DEADLINE, FailureReason.UNAVAILABLE):
            self.after(PROBE_SECONDS, self._probe)
            return
        self._answered()

    def _answered(self) -> None:
        if self._breaker.open:
            self._log.warning("kvdepot: the daemon at %s answers again", self._endpoint)
        self._breaker.answered()
        self._publish()

    def _publish(self) -> None:
        self.state.attached = self._declared and not self._breaker.open
        self.state.registered = self._registrations.accepted
        self.state.void = dict(self._registrations.void)
        self.state.refusal = self._registrations.refusal
        self.state.ranks_attached = self._registrations.ranks_attached

    def register(self, spec: NamespaceSpec, elements: Elements) -> None:
        self._registrations.add(spec, elements)
        self._publish()

    def forget(self, namespace: bytes) -> None:
        self._registrations.remove(namespace)
        self._publish()

    # --- calls of the engine ---

    def submit(
        self, call: Call, deadline: float, done: Callable[[Any], None], following: Following | None = None
    ) -> None:
        self.count("calls")
        number = self._working_on = next(self._numbers)
        self._pending[number] = _Pending(call, deadline, done, following)
        if not isinstance(call, LocateCall):
            self._leases.ask(call.lease_id)
        if not self.state.attached:
            self._not_sent(number, "not_attached", self._attachment.refusal or "no daemon answers")
        elif len(self._pending) > CALLS_IN_FLIGHT_MAX:
            self._not_sent(number, "too_many_calls", f"{CALLS_IN_FLIGHT_MAX} calls are in flight")
        else:
            self._attempt(number)

    def _not_sent(self, number: int, code: str, message: str) -> None:
        """Fail a call that the daemon cannot have seen: there is no lease to end."""
        pending = self._pending.pop(number)
        if not isinstance(pending.call, LocateCall):
            self._ended(pending.call.lease_id)
        self.count(code)
        self._completions.put((pending.done, CallFailure(FailureReason.UNAVAILABLE, code, message)))

    def _attempt(self, number: int) -> None:
        self._working_on = number
        pending = self._pending.get(number)
        if pending is None:
            return
        left = pending.deadline - self._clock()
        if not self._declared or self._token is None or self._channel is None:
            self._fail(number, CallFailure(FailureReason.UNAVAILABLE, "not_attached", "the daemon went away"))
            return
        pending.attempts += 1
        # The first half of the time is for the first attempt, so that a lost reply can be asked for again.
        repeatable = pending.attempts == 1 and not isinstance(pending.call, LocateCall)
        call = replace(pending.call, session=self._token)
        timeout_seconds = max(left / 2 if repeatable else left, REPEAT_SECONDS_MIN)
        self._channel.start(call, timeout_seconds, lambda answer: self.post(self._call_answered, number, answer))

    def _call_answered(self, number: int, answer: Answer) -> None:
        self._working_on = number
        pending = self._pending.get(number)
        if pending is None:
            return
        if isinstance(answer, CallFailure):
            self.noted(answer, waits=isinstance(pending.call, AcquireCall))
            left = pending.deadline - self._clock()
            lost = answer.reason in (FailureReason.DEADLINE, FailureReason.UNAVAILABLE)
            if lost and left > REPEAT_SECONDS_MIN and not isinstance(pending.call, LocateCall):
                self.count("repeated")
                pause = 0.0 if answer.reason is FailureReason.DEADLINE else min(RETRY_FIRST_SECONDS, left / 2)
                self.after(pause, lambda: self._attempt(number))
                return
            self._fail(number, answer)
            return
        self._answered()
        self._note_grant(pending, answer)
        following, call = pending.following, None
        if following is not None and isinstance(answer, LocateReply) and len(self._leases) < LEASES_PER_SESSION_MAX:
            call = following.make(answer)
        del self._pending[number]
        self._completions.put((pending.done, answer))
        if following is not None and call is not None:
            self.state.leases_asked += 1
            self.submit(call, self._clock() + following.timeout_seconds, following.done)

    def forgo(self, lease_id: int) -> None:
        """What was to follow a lookup is not made any more; what was made is released."""
        for pending in self._pending.values():
            if pending.following is not None and pending.following.lease_id == lease_id:
                pending.following = None
        if lease_id in self._leases:
            self._endings.release((lease_id,), used=False)

    def _fail(self, number: int, failure: CallFailure) -> None:
        """Fail a call whose lease the daemon may or may not have made: end it by its id."""
        pending = self._pending.pop(number)
        self._give_back(pending.call)
        self._completions.put((pending.done, failure))

    def _give_back(self, call: Call) -> None:
        if isinstance(call, AcquireCall):
            self._endings.release((call.lease_id,), used=False)
        elif isinstance(call, ReserveCall):
            self._endings.abandon(call.lease_id, ())

    def _note_grant(self, pending: _Pending, answer: Answer) -> None:
        call = pending.call
        if isinstance(call, AcquireCall) and isinstance(answer, AcquireReply):
            if answer.outcome is not AcquireOutcome.GRANTED:
                self._not_granted(pending, call.lease_id)
            if answer.outcome is AcquireOutcome.REFUSED:
                self._registrations.again()
        elif isinstance(call, ReserveCall) and isinstance(answer, ReserveReply):
            outcomes = np.frombuffer(answer.outcomes, dtype=np.uint8)
            granted = np.flatnonzero(outcomes == ReserveOutcome.GRANTED).tolist()
            if granted:
                self._leases.granted(call.lease_id, granted)
            else:
                self._not_granted(pending, call.lease_id)
            if (outcomes == ReserveOutcome.REFUSED).any():
                self._registrations.again()

    def _not_granted(self, pending: _Pending, lease_id: int) -> None:
        """An earlier attempt may have been, or may yet be: where its lease has expired or is an earlier daemon run's,
        a repeat is refused and the lease stays, and a call that was held up comes after its repeat.
        """
        if pending.attempts > 1:
            self._give_back(pending.call)
        else:
            self._ended(lease_id)

    # --- ends ---

    def release(self, lease_ids: tuple[int, ...], used: bool) -> None:
        self._endings.release(lease_ids, used=used)

    def commit(self, lease_id: int, indices: tuple[int, ...], done: CommitDone | None) -> None:
        self._endings.commit(lease_id, indices, done)

    def abandon(self, lease_id: int, indices: tuple[int, ...]) -> None:
        self._endings.abandon(lease_id, indices)

    def end_request(self, request_id: str, end: RequestEnd = RequestEnd()) -> None:  # noqa: B008 - frozen
        self._endings.end_request(request_id, end)

    def _send_endings(self) -> None:
        self.state.unconfirmed = len(self._endings)
        if not self._declared or self._token is None or self._resend_armed or not self.state.unconfirmed:
            return
        token = self._token
        for call in self._endings.next_calls(token):
            self.call(call, lambda answer, call=call: self._ending_answered(call, answer))  # type: ignore[misc]

    def _ending_answered(self, call: EndingCall, answer: Answer) -> None:
        kind = type(call)
        if isinstance(answer, CallFailure):
            self.noted(answer)
            if answer.reason is FailureReason.REFUSED:
                self._log.warning("kvdepot: %s refused: %s", kind.__name__, answer.message)
                self._close_book(self._endings.refused(kind))
                return
            self._endings.unconfirmed(kind)
            if not self._resend_armed:
                self._resend_armed = True
                self.after(self._retry.next_seconds(), self._resend)
            return
        self._close_book(self._endings.confirmed(kind, answer if isinstance(answer, CommitReply) else None))
        self._retry.reset()
        self._answered()

    def _resend(self) -> None:
        self._resend_armed = False

    def _close_book(self, ended: Ended) -> None:
        for lease_id in ended.leases:
            self._ended(lease_id)
        for lease_id, indices in ended.objects:
            if lease_id in self._leases:
                self._leases.settled(lease_id, indices)
                self._note_ended(lease_id)
        for done, outcomes in ended.committed:
            self._completions.put((done, outcomes))

    def _ended(self, lease_id: int) -> None:
        if lease_id in self._leases:
            self._leases.ended(lease_id)
            self.state.leases_ended += 1

    def _note_ended(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            self.state.leases_ended += 1


def _ended_failure() -> CallFailure:
    return CallFailure(FailureReason.UNAVAILABLE, "closed", "the session with the daemon is over")
