"""The one table between error classes and gRPC statuses, used by daemon and client.

A refused call ends with the class's status code, the message as details, and three
trailing metadata entries: `kvdepot-code`, `kvdepot-retry` and `kvdepot-advice-bin`
(UTF-8), so that a client raises the same class again with the same advice. Over a call
socket a `CallRefusal` says the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from kvdepot.core import errors
from kvdepot.proto.v1 import depot_pb2 as pb

Metadata = tuple[tuple[str, str | bytes], ...]

CODE_KEY = "kvdepot-code"
RETRY_KEY = "kvdepot-retry"
ADVICE_KEY = "kvdepot-advice-bin"

STATUS: dict[type[errors.KvDepotError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EngineIdInUse: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotScheduler: grpc.StatusCode.PERMISSION_DENIED,
    errors.NamespaceRefused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotLent: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LoadsOff: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StoresOff: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ArenaInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PlannerError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
}
_BY_CODE = {error.code: error for error in STATUS}
_RETRY_BY_STATUS = {
    grpc.StatusCode.UNAVAILABLE: errors.Retry.LATER,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Retry.LATER,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Retry.LATER,
    grpc.StatusCode.CANCELLED: errors.Retry.LATER,
    grpc.StatusCode.UNAUTHENTICATED: errors.Retry.AFTER_REATTACH,
}


class RefusedByDaemon(errors.KvDepotError):
    """A status without kvdepot's metadata: from gRPC itself, or from a daemon that knows more errors."""

    code = "refused_by_daemon"
    default_advice = "see the daemon's log"

    def __init__(self, status: grpc.StatusCode, message: str, retry: errors.Retry) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.how_to_retry = retry


def to_status(error: errors.KvDepotError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return status code, details and trailing metadata of a refused call."""
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), grpc.StatusCode.INTERNAL)
    metadata: Metadata = (
        (CODE_KEY, error.code),
        (RETRY_KEY, error.retry.value),
        (ADVICE_KEY, error.advice.encode("utf-8", "replace")),
    )
    return status, error.message, metadata


def from_status(
    status: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, str | bytes]] | None
) -> errors.KvDepotError:
    """Return the error of a refused call; never raise.

    The error has the class that the daemon named, with message and advice alone: attributes that its constructor
    would set are absent. Without a known name it is `RefusedByDaemon`.
    """
    found = dict(metadata or ())
    message = details or ""
    kind = _BY_CODE.get(_text(found.get(CODE_KEY, "")))
    if kind is None:
        return RefusedByDaemon(status, message, _RETRY_BY_STATUS.get(status, errors.Retry.NEVER))
    error = kind.__new__(kind)
    errors.KvDepotError.__init__(error, message, advice=_text(found[ADVICE_KEY]) if ADVICE_KEY in found else None)
    return error


def to_refusal(error: errors.KvDepotError) -> pb.CallRefusal:
    """Return the refusal of a call socket, as `to_status` does for gRPC."""
    status, message, _ = to_status(error)
    return pb.CallRefusal(
        status=status.name,
        message=_encodable(message),
        code=error.code,
        advice=_encodable(error.advice),
    )


def from_refusal(refusal: pb.CallRefusal) -> errors.KvDepotError:
    """Return the error of a refusal, as `from_status` does; never raise."""
    status = grpc.StatusCode.__members__.get(refusal.status, grpc.StatusCode.UNKNOWN)
    return from_status(status, refusal.message, ((CODE_KEY, refusal.code), (ADVICE_KEY, refusal.advice)))


def retry_of(error: errors.KvDepotError) -> errors.Retry:
    """Return whether the refused call can succeed if repeated."""
    return error.how_to_retry if isinstance(error, RefusedByDaemon) else error.retry


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
