"""Control calls over gRPC: domain values in, domain values out, failures as values."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.errors import KvDepotError, Retry
from kvdepot.core.limits import MESSAGE_BYTES_MAX
from kvdepot.proto import status
from kvdepot.proto.methods import BY_CALL, DEPOT, Method, encode

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.client.inbox import Inbox

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),  # an engine's environment may name one
    ("grpc.enable_retries", 0),  # repeated here, with the same lease id and a deadline
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long a connection may take: a daemon that has no CPU says hello late
    ("grpc.max_reconnect_backoff_ms", 1000),
)


Answer = object
"""The reply of a call, a value of the type that its method names, or a CallFailure."""


class Channel(Protocol):
    """One connection's worth of calls. Nothing here blocks or raises for the daemon's sake."""

    def start(self, call: object, timeout_seconds: float, done: Callable[[Answer], None]) -> None:
        """Start a call; `done` gets the answer, on any thread, at the deadline at the latest."""

    def watch(self, inbox: Inbox[Any]) -> float:
        """Have `inbox` wait for this channel, too. Return when `work` is due at the latest."""

    def work(self, ready: bool) -> None:
        """Send, receive and expire, on the thread that waits. `ready`: the inbox said that the channel is."""

    def close(self) -> None:
        """End the connection; calls in flight fail as unavailable."""


class ControlChannel:
    """A `Channel` over gRPC: of daemons that have no call sockets, and where none can be had. gRPC has its own threads.

    An idle engine's call takes 0.2 ms more than it would next to another one: grpc makes a thread for a call that
    begins alone (docs/adr/0056).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS)
        self._calls = {
            method.call_type: self._channel.unary_unary(method.path, None, None) for method in DEPOT.values()
        }

    def start(self, call: object, timeout_seconds: float, done: Callable[[Answer], None]) -> None:
        method = BY_CALL[type(call)]
        try:
            message = encode(call).SerializeToString()
        except ValueError as error:
            done(not_encodable(call, error))
            return
        try:
            future = self._calls[type(call)].future(message, timeout=timeout_seconds)
        except ValueError as error:  # the channel was closed
            done(CallFailure(FailureReason.UNAVAILABLE, "channel_closed", str(error)))
            return
        future.add_done_callback(lambda ended: done(_answer(ended, method)))

    def watch(self, inbox: Inbox[Any]) -> float:
        del inbox
        return inf

    def work(self, ready: bool) -> None:
        pass

    def close(self) -> None:
        self._channel.close()


def _answer(future: Any, method: Method[Any, Any]) -> Answer:
    code = future.code()
    if code is grpc.StatusCode.OK:
        return decoded(future.result(), method)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallFailure(FailureReason.DEADLINE, code.name)
    return refused(status.from_status(code, future.details(), future.trailing_metadata()))


def decoded(message: bytes, method: Method[Any, Any]) -> Answer:
    try:
        return method.reply.parse(message)
    except KvDepotError as error:
        return CallFailure(FailureReason.REFUSED, "malformed_reply", str(error))


def refused(refusal: KvDepotError) -> CallFailure:
    """Return what a refusal of the daemon means for the call."""
    retry = status.retry_of(refusal)
    if retry is Retry.AFTER_REATTACH:
        return CallFailure(FailureReason.LOST, refusal.code, str(refusal))
    reason = FailureReason.UNAVAILABLE if retry is Retry.LATER else FailureReason.REFUSED
    return CallFailure(reason, refusal.code, str(refusal))


def not_encodable(call: object, error: Exception) -> CallFailure:
    """Return the failure of a call that does not fit the wire, now or at the next attempt."""
    return CallFailure(FailureReason.REFUSED, "not_encodable", f"{type(call).__name__}: {error}")
