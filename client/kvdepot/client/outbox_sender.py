"""Sends what is in the outbox, and repeats it until the daemon confirms it. On the session's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.calls import CommitReply

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from kvdepot.client.backoff import Backoff
    from kvdepot.client.outbox import Confirmed, Outbox, OutboxCall
    from kvdepot.client.transports.control import Answer


class Loop(Protocol):
    """The session's loop, as the sender uses it."""

    @property
    def session_token(self) -> bytes | None:
        """The token with which calls can be sent now; None if there is no declared session."""

    def call(self, call: Any, done: Callable[[Answer], None]) -> None:
        """Send a call over the channel. Its answer comes as an event."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run an event in `seconds`."""

    def noted(self, answer: Answer) -> None:
        """Draw the consequences of an answer that concern the whole session."""

    def complete(self, done: Callable[[Any], None], value: Any) -> None:
        """Have the engine's thread call `done(value)`."""

    def lease_ended(self, lease_id: int) -> None:
        """Close a lease in the book."""

    def objects_ended(self, lease_id: int, indices: tuple[int, ...]) -> None:
        """Close objects of a reservation in the book."""


class OutboxSender:
    """Sends the calls of one outbox. After a failure, nothing is sent until a pause is over."""

    def __init__(self, loop: Loop, outbox: Outbox, retry: Backoff, log: logging.Logger) -> None:
        self._loop = loop
        self._outbox = outbox
        self._retry = retry
        self._log = log
        self._paused = False

    def send(self) -> None:
        """Send what is queued, if the session can send."""
        token = self._loop.session_token
        if token is None or self._paused or not self._outbox:
            return
        for call in self._outbox.next_calls(token):
            self._loop.call(call, lambda answer, call=call: self._answered(call, answer))  # type: ignore[misc]

    def _answered(self, call: OutboxCall, answer: Answer) -> None:
        kind = type(call)
        if isinstance(answer, CallFailure):
            self._loop.noted(answer)
            if answer.reason is FailureReason.REFUSED:
                self._log.warning("kvdepot: %s refused: %s", kind.__name__, answer.message)
                self._close(self._outbox.refused(kind))
                return
            self._outbox.unconfirmed(kind)
            if not self._paused:
                self._paused = True
                self._loop.after(self._retry.next_seconds(), self._resume)
            return
        self._close(self._outbox.confirmed(kind, answer if isinstance(answer, CommitReply) else None))
        self._retry.reset()
        self._loop.noted(answer)

    def _resume(self) -> None:
        self._paused = False

    def _close(self, ended: Confirmed) -> None:
        """Close in the book what a call has ended, and report it to the engine."""
        for lease_id in ended.leases:
            self._loop.lease_ended(lease_id)
        for lease_id, indices in ended.objects:
            self._loop.objects_ended(lease_id, indices)
        for done, outcomes in ended.committed:
            self._loop.complete(done, outcomes)
