"""The messages of the data service (`data_pb2`): payload between a process and its proxy."""

from __future__ import annotations

from kvdepot.core import limits
from kvdepot.core.bounds import bad
from kvdepot.core.calls import DataCall
from kvdepot.core.limits import check_limit
from kvdepot.proto.codec import codec_of
from kvdepot.proto.v1 import data_pb2 as pb


def encode_load_call(call: DataCall) -> pb.LoadRequest:
    return pb.LoadRequest(session=call.session, extents=call.extents)


def decode_load_call(message: pb.LoadRequest) -> DataCall:
    return codec_of(DataCall, pb.LoadRequest).decode(message)


def encode_store_call(call: DataCall) -> pb.StoreRequest:
    return pb.StoreRequest(session=call.session, extents=call.extents)


def decode_store_call(message: pb.StoreRequest) -> DataCall:
    """Return the call in the first message of a store."""
    if message.data:
        raise bad("data", "the first message of a store has none")
    return decode_load_call(pb.LoadRequest(session=message.session, extents=message.extents))


def encode_store_piece(data: bytes) -> pb.StoreRequest:
    return pb.StoreRequest(data=data)


def decode_store_piece(message: pb.StoreRequest) -> bytes:
    """Return the data in a later message of a store."""
    if message.session or message.extents:
        raise bad("extents", "only the first message of a store names any")
    return _piece(message.data)


def encode_load_piece(data: bytes) -> pb.LoadResponse:
    return pb.LoadResponse(data=data)


def encode_load_end() -> pb.LoadResponse:
    return pb.LoadResponse(complete=True)


def decode_load_piece(message: pb.LoadResponse) -> bytes | None:
    """Return the data in a message of a load; None at the end, when all bytes before it are valid."""
    if not message.complete:
        return _piece(message.data)
    if message.data:
        raise bad("data", "the last message of a load has none")
    return None


def _piece(data: bytes) -> bytes:
    if not data:
        raise bad("data", "there is none")
    check_limit("bytes of a piece", len(data), limits.PIECE_BYTES_MAX)
    return data
