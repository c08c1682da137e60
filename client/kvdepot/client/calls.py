"""The engine's calls in flight: Locate, FindTiers, Acquire and Reserve, from `submit` to the answer or the deadline.

    submitted --sent--> in flight --answered--> completed
        |                  | ^
        | not attached     +-+ repeated once: the reply was lost, and time is left (Acquire, Reserve)
        v                  +--deadline, refusal, closed--> failed, and its lease is ended
      failed: the daemon cannot have seen it, and there is no lease to end

Every call is completed exactly once. Everything runs on the session's own thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    FindTiersCall,
    LocateCall,
    LocateReply,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.limits import LEASES_PER_SESSION_MAX

if TYPE_CHECKING:
    from kvdepot.client.leases import LeaseBook
    from kvdepot.client.outbox import Outbox
    from kvdepot.client.transports.control import Answer

LeaseCall = AcquireCall | ReserveCall
"""Makes a lease. It is repeated once with the same lease id, because its reply may be lost."""
Call = LocateCall | FindTiersCall | LeaseCall

CALLS_IN_FLIGHT_MAX: Final = 256
RETRY_FIRST_SECONDS: Final = 0.02
REPEAT_SECONDS_MIN: Final = 0.005
"""With less time left, a call whose reply was lost is not repeated."""


@dataclass(frozen=True, slots=True)
class ChainedAcquire:
    """An Acquire that is made as soon as a lookup is answered, if the answer is worth one.

    `make` runs on the session's thread; it returns None if there is nothing to acquire. `done` is called as for any
    Acquire, and never if none was made.
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
    then: ChainedAcquire | None = None
    attempts: int = 0


class Loop(Protocol):
    """The session's loop, as its calls use it."""

    @property
    def refusal(self) -> str:
        """Why the daemon refused the last attach; empty if it did not."""

    @property
    def session_token(self) -> bytes | None:
        """The token with which calls can be sent now; None if there is no declared session."""

    @property
    def attached(self) -> bool:
        """Whether calls are sent at all: the session is declared, and the daemon answers."""

    def call(self, call: Any, done: Callable[[Answer], None], timeout_seconds: float | None = None) -> None:
        """Send a call over the channel. Its answer comes as an event."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run an event in `seconds`."""

    def noted(self, answer: Answer, *, waits: bool = False) -> None:
        """Draw the consequences of an answer that concern the whole session."""

    def register_again(self) -> None:
        """Register the namespaces again: the daemon may not know them."""

    def complete(self, done: Callable[[Any], None], value: Any) -> None:
        """Have the engine's thread call `done(value)`."""

    def lease_ended(self, lease_id: int) -> None:
        """Close a lease in the book: it has ended, or was never made."""

    def count(self, name: str) -> None:
        """Count an event."""

    def count_chained(self) -> None:
        """Count the lease of a chained Acquire that is asked for."""


class EngineCalls:
    """The calls of one session. See the module."""

    def __init__(self, loop: Loop, leases: LeaseBook, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._leases = leases
        self._outbox = outbox
        self._clock = clock
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._current: int | None = None  # the call that the present event is about

    def submit(
        self, call: Call, deadline: float, done: Callable[[Any], None], then: ChainedAcquire | None = None
    ) -> None:
        """Send a call, or fail it if it cannot be sent. `deadline` by the session's clock, in seconds."""
        self._loop.count("calls")
        number = self._current = next(self._numbers)
        self._pending[number] = _Pending(call, deadline, done, then)
        if isinstance(call, LeaseCall):
            self._leases.ask(call.lease_id)
        if not self._loop.attached:
            self._not_sent(number, "not_attached", self._loop.refusal or "no daemon answers")
        elif len(self._pending) > CALLS_IN_FLIGHT_MAX:
            self._not_sent(number, "too_many_calls", f"{CALLS_IN_FLIGHT_MAX} calls are in flight")
        else:
            self._attempt(number)

    def cancel(self, lease_id: int) -> None:
        """Do not make a chained Acquire any more, or release its lease if it was made."""
        for pending in self._pending.values():
            if pending.then is not None and pending.then.lease_id == lease_id:
                pending.then = None
        if lease_id in self._leases:
            self._outbox.release((lease_id,), used=False)

    def fail_all(self, failure: CallFailure) -> None:
        """Fail every call in flight."""
        for number in list(self._pending):
            self._fail(number, failure)

    def abandon_all(self, failure: CallFailure) -> None:
        """Fail every call in flight and end no lease: the loop's thread is over, and so is the session."""
        for pending in self._pending.values():
            self._loop.complete(pending.done, failure)
        self._pending.clear()

    def event_ended(self, error: Exception | None = None) -> None:
        """Note the end of an event of the loop. If it raised, fail the call that it was about."""
        if error is not None and self._current in self._pending:
            self._fail(self._current, CallFailure(FailureReason.UNAVAILABLE, "error", repr(error)))
        self._current = None

    def _not_sent(self, number: int, code: str, message: str) -> None:
        """Fail a call that the daemon cannot have seen, so there is no lease to end."""
        pending = self._pending.pop(number)
        if isinstance(pending.call, LeaseCall):
            self._loop.lease_ended(pending.call.lease_id)
        self._loop.count(code)
        self._loop.complete(pending.done, CallFailure(FailureReason.UNAVAILABLE, code, message))

    def _attempt(self, number: int) -> None:
        self._current = number
        pending = self._pending.get(number)
        if pending is None:
            return
        left = pending.deadline - self._clock()
        token = self._loop.session_token
        if token is None:
            self._fail(number, CallFailure(FailureReason.UNAVAILABLE, "not_attached", "the daemon went away"))
            return
        pending.attempts += 1
        # The first attempt gets half of the time, so that a call with a lost reply can be repeated.
        repeatable = pending.attempts == 1 and isinstance(pending.call, LeaseCall)
        timeout_seconds = max(left / 2 if repeatable else left, REPEAT_SECONDS_MIN)
        call = replace(pending.call, session=token)
        self._loop.call(call, lambda answer: self._answered(number, answer), timeout_seconds)

    def _answered(self, number: int, answer: Answer) -> None:
        self._current = number
        pending = self._pending.get(number)
        if pending is None:
            return
        self._loop.noted(answer, waits=isinstance(pending.call, AcquireCall))
        if isinstance(answer, CallFailure):
            left = pending.deadline - self._clock()
            lost = answer.reason in (FailureReason.DEADLINE, FailureReason.UNAVAILABLE)
            if lost and left > REPEAT_SECONDS_MIN and isinstance(pending.call, LeaseCall):
                self._loop.count("repeated")
                pause = 0.0 if answer.reason is FailureReason.DEADLINE else min(RETRY_FIRST_SECONDS, left / 2)
                self._loop.after(pause, lambda: self._attempt(number))
                return
            self._fail(number, answer)
            return
        self._note_grant(pending, answer)
        then, call = pending.then, None
        if then is not None and isinstance(answer, LocateReply) and len(self._leases) < LEASES_PER_SESSION_MAX:
            call = then.make(answer)
        del self._pending[number]
        self._loop.complete(pending.done, answer)
        if then is not None and call is not None:
            self._loop.count_chained()
            self.submit(call, self._clock() + then.timeout_seconds, then.done)

    def _fail(self, number: int, failure: CallFailure) -> None:
        """Fail a call. The daemon may have made its lease, so the lease is ended by its id."""
        pending = self._pending.pop(number)
        self._end_lease(pending.call)
        self._loop.complete(pending.done, failure)

    def _end_lease(self, call: Call) -> None:
        if isinstance(call, AcquireCall):
            self._outbox.release((call.lease_id,), used=False)
        elif isinstance(call, ReserveCall):
            self._outbox.abandon(call.lease_id, ())

    def _note_grant(self, pending: _Pending, answer: Answer) -> None:
        call = pending.call
        if isinstance(call, AcquireCall) and isinstance(answer, AcquireReply):
            if answer.outcome is not AcquireOutcome.GRANTED:
                self._not_granted(pending, call.lease_id)
            if answer.outcome is AcquireOutcome.REFUSED:
                self._loop.register_again()
        elif isinstance(call, ReserveCall) and isinstance(answer, ReserveReply):
            outcomes = np.frombuffer(answer.outcomes, dtype=np.uint8)
            granted = np.flatnonzero(outcomes == ReserveOutcome.GRANTED).tolist()
            if granted:
                self._leases.granted(call.lease_id, granted)
            else:
                self._not_granted(pending, call.lease_id)
            if (outcomes == ReserveOutcome.REFUSED).any():
                self._loop.register_again()

    def _not_granted(self, pending: _Pending, lease_id: int) -> None:
        """End the lease of a repeated call that was not granted: its first attempt may have been granted.

        The lease of the first attempt may have expired, or belong to an earlier run of the daemon. Then the repeat is
        refused and the lease stays. A call that was held up may also arrive after its repeat.
        """
        if pending.attempts > 1:
            self._end_lease(pending.call)
        else:
            self._loop.lease_ended(lease_id)
