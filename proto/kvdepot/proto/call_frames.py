"""Frames of a call socket: a little-endian u32 of length, then one CallRequest or CallResponse.

Both ends bound what they take in before they take it in. What goes wrong in here leaves the
stream without a place to go on at: it is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError, Message
from kvdepot.core.errors import KvDepotError
from kvdepot.core.limits import MESSAGE_BYTES_MAX
from kvdepot.proto.bounds import bad, check_at_most
from kvdepot.proto.status import from_refusal, to_refusal
from kvdepot.proto.v1 import depot_pb2 as pb

_LENGTH: Final = struct.Struct("<I")
_ENVELOPE_BYTES: Final = 32
"""At most, around the message: number, field and length."""
FRAME_BYTES_MAX: Final = MESSAGE_BYTES_MAX + _ENVELOPE_BYTES


def _fields(message: type[Message], oneof: str, suffix: str) -> dict[str, str]:
    """Names of the oneof's fields by method of service Depot."""
    fields = message.DESCRIPTOR.oneofs_by_name[oneof].fields
    kinds = [(field.name, field.message_type.name) for field in fields if field.message_type is not None]
    return {kind.removesuffix(suffix): field for field, kind in kinds if kind.endswith(suffix)}


_REQUEST_FIELDS: Final = _fields(pb.CallRequest, "call", "Request")
_RESPONSE_FIELDS: Final = _fields(pb.CallResponse, "answer", "Response")
_METHODS: Final = {field: method for fields in (_REQUEST_FIELDS, _RESPONSE_FIELDS) for method, field in fields.items()}


def encode_request(number: int, method: str, message: Message) -> bytes:
    """Raises LimitExceeded."""
    request = pb.CallRequest(number=number)
    getattr(request, _REQUEST_FIELDS[method]).CopyFrom(message)
    # An empty message has nothing that would set its field.
    getattr(request, _REQUEST_FIELDS[method]).SetInParent()
    return _frame(request)


def decode_request(body: bytes) -> tuple[int, str, Message | None]:
    """Number, method and message. A method that is not known here is "", without one. Raises InvalidArgument."""
    request = pb.CallRequest()
    _parse(request, body)
    field = request.WhichOneof("call")
    if field is None:
        return request.number, "", None
    return request.number, _METHODS[field], getattr(request, field)


def encode_response(number: int, method: str, answer: Message | KvDepotError) -> bytes:
    """Raises LimitExceeded."""
    response = pb.CallResponse(number=number)
    if isinstance(answer, KvDepotError):
        response.refusal.CopyFrom(to_refusal(answer))
    else:
        getattr(response, _RESPONSE_FIELDS[method]).CopyFrom(answer)
        getattr(response, _RESPONSE_FIELDS[method]).SetInParent()
    return _frame(response)


def decode_response(body: bytes) -> tuple[int, str, Message | KvDepotError | None]:
    """Number, method and response; the method is "" of a refusal, and of what is not known. Raises InvalidArgument."""
    response = pb.CallResponse()
    _parse(response, body)
    field = response.WhichOneof("answer")
    if field == "refusal":
        return response.number, "", from_refusal(response.refusal)
    if field is None:
        return response.number, "", None
    return response.number, _METHODS[field], getattr(response, field)


def _frame(message: Message) -> bytes:
    body = message.SerializeToString()
    check_at_most("frame bytes", len(body), FRAME_BYTES_MAX)
    return _LENGTH.pack(len(body)) + body


def _parse(message: Message, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise bad("frame", f"no {message.DESCRIPTOR.name}: {error}") from None


class Frames:
    """The bodies in what a stream brings. What is not taken yet waits here: a frame at most, and what came with it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[bytes]:
        """Those that are whole; each is gone with being taken. Raises LimitExceeded for one that is too long."""
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            check_at_most("frame bytes", length, FRAME_BYTES_MAX)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
