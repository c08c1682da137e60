"""Frames of a call socket: a head of 13 bytes, then a protobuf message of service Depot.

The head has the length of the message (u32), the number of the call (u64), and one byte: the number of the method
(`kvdepot.proto.methods`), or `REFUSAL` in an answer with a CallRefusal. All are little-endian. Both ends check the
bounds of a frame before they read it. After bytes that are no frame, the start of the next one is unknown, so the
socket is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from kvdepot.core.bounds import bad
from kvdepot.core.errors import KvDepotError
from kvdepot.core.limits import MESSAGE_BYTES_MAX, check_limit
from kvdepot.proto.status import from_refusal, to_refusal
from kvdepot.proto.v1 import depot_pb2 as pb

REFUSAL: Final = 0
_LENGTH: Final = struct.Struct("<I")
_CALL: Final = struct.Struct("<QB")
FRAME_BYTES_MAX: Final = MESSAGE_BYTES_MAX + _CALL.size


class Frame(NamedTuple):
    """One frame of a call socket."""

    number: int  # drawn by the client; the answer has the same
    method: int
    body: bytes


def encode_frame(number: int, method: int, body: bytes) -> bytes:
    """Raise LimitExceeded."""
    check_limit("frame bytes", _CALL.size + len(body), FRAME_BYTES_MAX)
    return _LENGTH.pack(_CALL.size + len(body)) + _CALL.pack(number, method) + body


def encode_refusal(number: int, error: KvDepotError) -> bytes:
    return encode_frame(number, REFUSAL, to_refusal(error).SerializeToString())


def decode_refusal(body: bytes) -> KvDepotError:
    """Raise InvalidArgument."""
    refusal = pb.CallRefusal()
    try:
        refusal.ParseFromString(body)
    except DecodeError as error:
        raise bad("refusal", f"no CallRefusal: {error}") from None
    return from_refusal(refusal)


class Frames:
    """The frames in what a stream brings. At most one frame waits here, and what came with it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[Frame]:
        """Take the frames that are whole. Raise LimitExceeded or InvalidArgument for a length that none has."""
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            check_limit("frame bytes", length, FRAME_BYTES_MAX)
            if length < _CALL.size:
                raise bad("frame bytes", f"{length} is less than a head's {_CALL.size}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            number, method = _CALL.unpack_from(self._buffer, _LENGTH.size)
            body = bytes(self._buffer[_LENGTH.size + _CALL.size : end])
            del self._buffer[:end]
            yield Frame(number, method, body)
