"""Control calls over gRPC: domain values in, domain values out, failures as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core import calls
from kvdepot.core.errors import KvDepotError, Retry
from kvdepot.core.limits import MESSAGE_BYTES_MAX, PROTOCOL_MAX, PROTOCOL_MIN
from kvdepot.proto import codec, codec_namespace, status
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.elements import Elements
    from kvdepot.core.keys import NamespaceSpec

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


_WATCH = "/grpc.health.v1.Health/Watch"
"""A call that lasts as long as its channel, or until the daemon is killed."""
_WATCHED = b"\n\x06engine"
"""Its request: the health of a service that has none. What is sent is one answer, which nobody reads."""


@dataclass(frozen=True, slots=True)
class RegisterCall:
    session: bytes
    spec: NamespaceSpec
    elements: Elements


@dataclass(frozen=True, slots=True)
class RegisterReply:
    namespace: bytes  # empty: it is void, and to be registered with ...
    ranks_attached: int
    bumps: int = 0  # ... this bump counter


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """Asks for the capabilities: any answer will do."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The answer of a call whose answer says nothing more."""


ControlCall = (
    calls.LocateCall
    | calls.AcquireCall
    | calls.ReleaseCall
    | calls.ReserveCall
    | calls.CommitCall
    | calls.AbandonCall
    | calls.EndRequestCall
    | calls.DeclareCall
    | RegisterCall
    | ProbeCall
)
ControlReply = (
    calls.LocateReply
    | calls.AcquireReply
    | calls.ReserveReply
    | calls.CommitReply
    | calls.DeclareReply
    | calls.Capabilities
    | RegisterReply
    | Confirmed
)
Answer = ControlReply | CallFailure
Method = tuple[str, Callable[[Any], Any], Callable[[Any], ControlReply]]


def _confirmed(_: object) -> Confirmed:
    return Confirmed()


METHODS: Final[dict[type[Any], Method]] = {
    calls.LocateCall: ("Locate", codec.encode_locate_call, codec.decode_locate_reply),
    calls.AcquireCall: ("Acquire", codec.encode_acquire_call, codec.decode_acquire_reply),
    calls.ReserveCall: ("Reserve", codec.encode_reserve_call, codec.decode_reserve_reply),
    calls.ReleaseCall: ("Release", codec.encode_release_call, _confirmed),
    calls.CommitCall: ("Commit", codec.encode_commit_call, codec.decode_commit_reply),
    calls.AbandonCall: ("Abandon", codec.encode_abandon_call, _confirmed),
    calls.EndRequestCall: ("EndRequest", codec.encode_end_request_call, _confirmed),
    calls.DeclareCall: ("Declare", codec.encode_declare_call, codec.decode_declare_reply),
    RegisterCall: (
        "RegisterNamespace",
        lambda call: codec_namespace.encode_register(call.session, call.spec, call.elements, follows_bumps=True),
        lambda message: RegisterReply(*codec_namespace.decode_registered(message), message.bumps),
    ),
    ProbeCall: (
        "GetCapabilities",
        lambda _: pb.GetCapabilitiesRequest(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX),
        codec.decode_capabilities,
    ),
}


class Channel(Protocol):
    """One connection's worth of calls. Nothing here blocks or raises for the daemon's sake."""

    def start(
        self, call: ControlCall, timeout_seconds: float, done: Callable[[Answer], None], *, wait_for_ready: bool = False
    ) -> None:
        """Start a call; `done` gets the answer, on any thread, at the deadline at the latest.

        `wait_for_ready`: a missing connection is waited for, instead of failing the call.
        """

    def close(self) -> None:
        """End the connection; calls in flight fail as unavailable."""


class ControlChannel:
    """A `Channel` over gRPC: of daemons that have no call sockets, and where none can be had.

    One call is always under way: grpc makes a thread for a call that begins beside no other, and waits
    until it runs, which takes an engine without work longer than the call (docs/adr/0041, 8).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS)
        stub = depot_pb2_grpc.DepotStub(self._channel)  # type: ignore[no-untyped-call]
        self._methods = {
            kind: (getattr(stub, name), encode, decode) for kind, (name, encode, decode) in METHODS.items()
        }
        # Ends with the channel, and when nobody holds it any more.
        self._watch = self._channel.unary_stream(_WATCH, None, None)(_WATCHED, wait_for_ready=True)

    def start(
        self, call: ControlCall, timeout_seconds: float, done: Callable[[Answer], None], *, wait_for_ready: bool = False
    ) -> None:
        method, encode, decode = self._methods[type(call)]
        try:
            message = encode(call)
        except ValueError as error:
            done(not_encodable(call, error))
            return
        try:
            future = method.future(message, timeout=timeout_seconds, wait_for_ready=wait_for_ready)
        except ValueError as error:  # the channel was closed
            done(CallFailure(FailureReason.UNAVAILABLE, "channel_closed", str(error)))
            return
        future.add_done_callback(lambda ended: done(_answer(ended, decode)))

    def close(self) -> None:
        self._channel.close()


def _answer(future: Any, decode: Callable[[Any], ControlReply]) -> Answer:
    code = future.code()
    if code is grpc.StatusCode.OK:
        return decoded(future.result(), decode)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallFailure(FailureReason.DEADLINE, code.name)
    return refused(status.from_status(code, future.details(), future.trailing_metadata()))


def decoded(message: Any, decode: Callable[[Any], ControlReply]) -> Answer:
    try:
        return decode(message)
    except KvDepotError as error:
        return CallFailure(FailureReason.REFUSED, "malformed_reply", str(error))


def refused(refusal: KvDepotError) -> CallFailure:
    """What a refusal of the daemon's means for the call."""
    retry = status.retry_of(refusal)
    if retry is Retry.AFTER_REATTACH:
        return CallFailure(FailureReason.LOST, refusal.code, str(refusal))
    reason = FailureReason.UNAVAILABLE if retry is Retry.LATER else FailureReason.REFUSED
    return CallFailure(reason, refusal.code, str(refusal))


def not_encodable(call: ControlCall, error: Exception) -> CallFailure:
    """A field does not fit the wire, and will not at the next attempt."""
    return CallFailure(FailureReason.REFUSED, "not_encodable", f"{type(call).__name__}: {error}")
