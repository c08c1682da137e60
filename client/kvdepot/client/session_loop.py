"""The session's own thread: it owns everything about the daemon that changes.

All events (calls of the engine, answers, changes of the attachment, timers) come through one queue, or the call
socket. They run here one after the other, so nothing needs a lock. Other threads read `LoopState`, plain fields that
only this thread writes.

    detached --attach--> declaring --Declare answered--> attached --silence--> disabled --any answer--> attached
        ^________________________ loss of the attachment ______________________|

The parts are `EngineCalls` (calls in flight), `Outbox` (ends that the daemon has not confirmed) with its
`OutboxSender`, `Registrations` (namespaces) and `LivenessBreaker` (a daemon that accepts and does not answer). No event
may wait.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from kvdepot.client.attachment import Miss
from kvdepot.client.backoff import Backoff
from kvdepot.client.calls import RETRY_FIRST_SECONDS, EngineCalls
from kvdepot.client.credentials import peer_credentials
from kvdepot.client.daemon_log import DaemonLog
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.inbox import Inbox
from kvdepot.client.leases import LeaseBook
from kvdepot.client.liveness import LivenessBreaker
from kvdepot.client.outbox import Outbox
from kvdepot.client.outbox_sender import OutboxSender
from kvdepot.client.registrations import Registrations
from kvdepot.client.transports.call_socket import CALLS_UNSENT, CallSocket
from kvdepot.client.transports.control import Channel, ControlChannel
from kvdepot.core.calls import DeclareCall, DeclareReply, GetCapabilitiesCall
from kvdepot.core.limits import PROTOCOL_MAX, PROTOCOL_MIN

if TYPE_CHECKING:
    import queue
    import random
    import socket

    from kvdepot.client.attachment import Attachment
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.client.transports.control import Answer
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec
    from kvdepot.core.registration import RegisterReply

Completion = tuple[Callable[[Any], None], Any]

CONFIRM_SECONDS_MAX = 2.0
"""Deadline of one Release, Commit, Abandon, EndRequest or Declare. After it the call is sent again."""
RETRY_MAX_SECONDS = 1.0
UNANSWERED_MAX = 3
UNANSWERED_SECONDS_MIN = 1.0
PROBE_SECONDS = 0.5
NAMESPACE_SECONDS = 5.0
"""After so long an attachment is logged without a namespace."""
SLEEP_SECONDS_MAX = 3600.0
"""The longest sleep that epoll takes."""


@dataclass(slots=True)
class LoopState:
    """What other threads may read without a lock, and a moment late."""

    attached: bool = False
    daemon_pid: int = 0  # 0: no daemon, or one in a namespace of pids that is not seen here
    ended: bool = False  # the loop's thread is over: nothing is sent or answered any more
    ranks_attached: int = 0
    registered: frozenset[bytes] = frozenset()
    bumps_wanted: dict[bytes, int] = field(default_factory=dict)  # by invalidated namespace
    refusal: str = ""
    leases_asked: int = 0  # by chained Acquires
    leases_ended: int = 0
    unconfirmed: int = 0
    counters: Counter[str] = field(default_factory=Counter)


class SessionLoop:
    """See the module. Public methods run on the loop's thread, except those of "any thread"."""

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
        self.daemon_log = DaemonLog(endpoint, self._log, clock)
        self._inbox: Inbox[tuple[Callable[..., None], tuple[Any, ...]]] = Inbox()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._token: bytes | None = None
        self._declared = False
        self._channel: Channel | None = None
        self._leases = LeaseBook()
        self.outbox = Outbox()
        self.calls = EngineCalls(self, self._leases, self.outbox, clock)
        self._breaker = LivenessBreaker(UNANSWERED_MAX, UNANSWERED_SECONDS_MIN, clock)
        self._retry = Backoff(RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS, rng.random)
        self._sender = OutboxSender(self, self.outbox, self._retry, self._log)
        self._registrations = Registrations(self, world_size, Backoff(0.1, 2.0, rng.random))
        self._close_at: float | None = None
        self._error_logged = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-session", daemon=True)

    # --- any thread ---

    @property
    def threads(self) -> tuple[int, int]:
        """Return the kernel's ids of this thread and of the daemon's loop; 0 for one that is not there, or not seen."""
        return self._thread.native_id or 0, self.state.daemon_pid

    def post(self, event: Callable[..., None], *arguments: Any) -> None:
        """Have the loop's thread run `event(*arguments)`. Never blocks."""
        self._inbox.put((event, arguments))
        if self.state.ended:
            self._fail_posted()

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout_seconds: float) -> None:
        """Send what is queued for at most `timeout_seconds`, then end the thread and the attachment. Never blocks."""
        self.post(self._close, self._clock() + timeout_seconds)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, for at most `timeout_seconds`."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._close_at is None or (self._owes() and self._clock() < self._close_at):
                self._turn()
        except Exception:  # noqa: BLE001 - I3: log it, and leave nobody waiting
            self._log.exception("kvdepot: session with the daemon ended: nothing is stored or loaded any more")
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait for the next event or timer, and run what is due."""
        due = inf if self._channel is None else self._channel.watch(self._inbox)
        if self._timers:
            due = min(due, self._timers[0][0])
        ready = self._inbox.wait(min(max(due - self._clock(), 0.0), SLEEP_SECONDS_MAX))
        if self._channel is not None:
            self._guarded(self._channel.work, ready)
        for _ in range(len(self._inbox)):
            posted = self._inbox.take()
            if posted is not None:
                self._guarded(posted[0], *posted[1])
        while self._timers and self._timers[0][0] <= self._clock():
            self._guarded(heapq.heappop(self._timers)[2])
        self.state.unconfirmed = len(self.outbox)
        self._guarded(self._sender.send)

    def _guarded(self, event: Callable[..., None], *arguments: Any) -> None:
        """Run an event. An exception costs the call that the event is about, not the session."""
        try:
            event(*arguments)
        except Exception as error:  # noqa: BLE001 - I3: without this thread every request would wait for its timeouts
            self.count("errors")
            if not self._error_logged:
                self._error_logged = True
                self._log.exception("kvdepot: an event of the session failed; further ones are only counted")
            self.calls.event_ended(error)
        else:
            self.calls.event_ended()

    def _end(self) -> None:
        """Publish the end of the thread, and leave nobody waiting."""
        self.state.attached = False
        self.state.ended = True
        self.calls.abandon_all(_ended_failure())
        self._fail_posted()
        if self._channel is not None:
            self._channel.close()
        if self._close_at is not None:
            self._attachment.end()  # last: with it the daemon ends what has not been sent

    def _fail_posted(self) -> None:
        """Fail the calls that came too late for the loop, and detach if asked to. On any thread, after the end."""
        while (posted := self._inbox.take()) is not None:
            event, arguments = posted
            if event == self.calls.submit:
                self._completions.put((arguments[2], _ended_failure()))
            elif event == self.attachment_changed and arguments[1] is not None:
                arguments[1].close()
            elif event == self._close:
                self._attachment.end()

    def _close(self, close_at: float) -> None:
        self._close_at = close_at
        self.after(max(close_at - self._clock(), 0.0), lambda: None)
        self.calls.fail_all(CallFailure(FailureReason.UNAVAILABLE, "closed", "the session is closed"))

    def _owes(self) -> bool:
        return self._declared and len(self.outbox) > 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run `event` on this thread in `seconds`."""
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._timer_numbers), event))

    def count(self, name: str, amount: int = 1) -> None:
        """Count events by name."""
        self.state.counters[name] += amount

    # --- attaching ---

    def attachment_changed(self, token: bytes | None, connection: socket.socket | None) -> None:
        """Take over an attach (its token, and a call socket if the daemon gave one), or note a loss (None)."""
        if token is None and self._token is None:
            return
        self._token = token
        self._declared = False
        self.state.daemon_pid = 0 if connection is None else peer_credentials(connection).pid
        self._registrations.detached()
        self._publish()
        if token is None:
            self.count("detached")
            return
        self.count("attached")
        # A channel of its own: calls to a former daemon end with the former channel.
        former, self._channel = self._channel, None
        if former is not None:
            former.close()
        self._channel = self._open_channel(connection)
        self._breaker.answered()
        self._declare()

    def attachment_missed(self, reason: str, miss: Miss) -> None:
        """Note an attempt to attach that failed."""
        if miss is Miss.SILENT:
            self.daemon_log.silent()
        else:
            (self.daemon_log.refused if miss is Miss.REFUSED else self.daemon_log.absent)(reason)

    def _open_channel(self, connection: socket.socket | None) -> Channel:
        if connection is not None:
            return CallSocket(connection, self._clock, unwatch=self._inbox.unwatch, broken=self._call_socket_broke)
        try:
            return ControlChannel(self._endpoint)
        except Exception:  # gRPC may not get a thread
            self.after(self._retry.next_seconds(), lambda: self._reconnect(None))
            raise

    def _call_socket_broke(self) -> None:
        """Attach again, unless the attachment is lost too and does so itself. A new attachment ends what was sent."""
        self.count("call_sockets_broken")
        self._declared = False
        self._publish()
        broken = self._channel
        self.after(self._retry.next_seconds(), lambda: self._reconnect(broken))

    def _reconnect(self, broken: Channel | None) -> None:
        if self._channel is broken and self._token is not None:
            self._attachment.reconnect()

    def _declare(self) -> None:
        """Make the first call of a channel. Everything else waits for its answer."""
        channel = self._channel
        if channel is not None and self._token is not None:
            self.call(
                DeclareCall(self._token, self._leases.ids()), lambda answer: self._declare_answered(channel, answer)
            )

    def _declare_answered(self, channel: Channel, answer: Answer) -> None:
        if self._token is None or channel is not self._channel:
            return
        if isinstance(answer, DeclareReply):
            # Lost leases stay in the book: their owner still ends them, and the daemon answers LOST.
            self.count("leases_lost", len(answer.lost))
            self._declared = True
            self._registrations.attached(self._token, answer.ranks_attached)
            self._publish()
            self.daemon_log.answered()
            self.after(NAMESPACE_SECONDS, lambda: self._unregistered(channel))
            return
        self.noted(answer)
        self.after(self._retry.next_seconds(), lambda: self._declare_again(channel))

    def _unregistered(self, channel: Channel) -> None:
        """Log the attachment of an engine that takes long to identify its weights."""
        if self._declared and channel is self._channel and not self.state.registered:
            self._log_attached(None, {})

    def registered(self, spec: NamespaceSpec, reply: RegisterReply) -> None:
        """Log what the engine is attached to: the daemon has accepted this namespace."""
        self._log_attached(spec, reply.tier_bytes)

    def _log_attached(self, spec: NamespaceSpec | None, tier_bytes: Mapping[str, int]) -> None:
        version = self._attachment.daemon_version
        if version:  # else the attachment has ended, and this thread hears of it next
            self.daemon_log.attached(version, spec, tier_bytes)

    def _declare_again(self, channel: Channel) -> None:
        if channel is self._channel:
            self._declare()

    def call(self, call: Any, done: Callable[[Answer], None], timeout_seconds: float | None = None) -> None:
        """Send a call over the channel. `done` runs on this thread, within the timeout (default: of confirmations)."""
        assert self._channel is not None
        seconds = self._confirm_timeout_seconds if timeout_seconds is None else timeout_seconds
        self._channel.start(call, seconds, lambda answer: self.post(done, answer))

    def noted(self, answer: Answer, *, waits: bool = False) -> None:
        """Draw the consequences of an answer that concern the whole session.

        `waits`: the call may have to wait for a disk, so its deadline says nothing about the daemon.
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
            self.daemon_log.silent()
            self.count("breaker_opened")
            self._probe()
        self._publish()

    def _probe(self) -> None:
        if self._breaker.open and self._channel is not None:
            call = GetCapabilitiesCall(PROTOCOL_MIN, PROTOCOL_MAX)  # any answer will do
            self._channel.start(call, PROBE_SECONDS, lambda answer: self.post(self._probed, answer))

    def _probed(self, answer: Answer) -> None:
        if isinstance(answer, CallFailure) and answer.reason in (FailureReason.DEADLINE, FailureReason.UNAVAILABLE):
            self.daemon_log.silent()
            self.after(PROBE_SECONDS, self._probe)
            return
        self._answered()

    def _answered(self) -> None:
        if self._breaker.open:
            self.daemon_log.answered()
        self._breaker.answered()
        self._publish()

    def _publish(self) -> None:
        self.state.attached = self._declared and not self._breaker.open
        self.state.registered = self._registrations.accepted
        self.state.bumps_wanted = dict(self._registrations.bumps_wanted)
        self.state.refusal = self._registrations.refusal
        self.state.ranks_attached = self._registrations.ranks_attached

    def register(self, spec: NamespaceSpec, elements: Elements) -> None:
        """Register a namespace now, and after every attach."""
        self._registrations.add(spec, elements)
        self._publish()

    def forget(self, namespace: bytes) -> None:
        """Stop registering a namespace."""
        self._registrations.remove(namespace)
        self._publish()

    # --- what the engine's calls need ---

    @property
    def refusal(self) -> str:
        """Why the daemon refused the last attach; empty if it did not."""
        return self._attachment.refusal

    @property
    def attached(self) -> bool:
        """Whether calls are sent at all: the session is declared, and the daemon answers."""
        return self.state.attached

    @property
    def session_token(self) -> bytes | None:
        """The token with which calls can be sent now; None if there is no declared session."""
        return self._token if self._declared and self._channel is not None else None

    def register_again(self) -> None:
        """Register the namespaces again: the daemon may not know them."""
        self._registrations.again()

    def complete(self, done: Callable[[Any], None], value: Any) -> None:
        """Have the engine's thread call `done(value)`."""
        self._completions.put((done, value))

    def lease_ended(self, lease_id: int) -> None:
        """Close a lease in the book: it has ended, or was never made."""
        if lease_id in self._leases:
            self._leases.ended(lease_id)
            self.state.leases_ended += 1

    def objects_ended(self, lease_id: int, indices: tuple[int, ...]) -> None:
        """Close objects of a reservation in the book, and the lease with its last one."""
        if lease_id in self._leases:
            self._leases.confirmed(lease_id, indices)
            self.state.leases_ended += lease_id not in self._leases

    def count_chained(self) -> None:
        """Count the lease of a chained Acquire that is asked for."""
        self.state.leases_asked += 1


def _ended_failure() -> CallFailure:
    return CallFailure(FailureReason.UNAVAILABLE, "closed", "the session with the daemon is over")
