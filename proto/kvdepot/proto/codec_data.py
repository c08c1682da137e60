"""The translator of the data service's messages (`data_pb2`): payload between a process and its proxy."""

from __future__ import annotations

from kvdepot.core import limits
from kvdepot.core.calls import EXTENT_WORDS, DataCall
from kvdepot.proto.bounds import bad, check_at_most, check_bytes, check_packed
from kvdepot.proto.v1 import data_pb2 as pb

_EXTENT_BYTES = 8 * EXTENT_WORDS


def encode_load_call(call: DataCall) -> pb.LoadRequest:
    return pb.LoadRequest(session=call.session, extents=call.extents)


def decode_load_call(message: pb.LoadRequest) -> DataCall:
    return _call(message)


def encode_store_call(call: DataCall) -> pb.StoreRequest:
    return pb.StoreRequest(session=call.session, extents=call.extents)


def decode_store_call(message: pb.StoreRequest) -> DataCall:
    """Of the first message of a store."""
    if message.data:
        raise bad("data", "the first message of a store has none")
    return _call(message)


def encode_store_piece(data: bytes) -> pb.StoreRequest:
    return pb.StoreRequest(data=data)


def decode_store_piece(message: pb.StoreRequest) -> bytes:
    """Of the messages after the first one."""
    if message.session or message.extents:
        raise bad("extents", "only the first message of a store names any")
    return _piece(message.data)


def encode_load_piece(data: bytes) -> pb.LoadResponse:
    return pb.LoadResponse(data=data)


def encode_load_end() -> pb.LoadResponse:
    return pb.LoadResponse(complete=True)


def decode_load_piece(message: pb.LoadResponse) -> bytes | None:
    """None: the end, and every byte before it is right."""
    if not message.complete:
        return _piece(message.data)
    if message.data:
        raise bad("data", "the last message of a load has none")
    return None


def _call(message: pb.LoadRequest | pb.StoreRequest) -> DataCall:
    check_bytes("session", message.session, limits.SESSION_TOKEN_BYTES)
    if not check_packed("extents", message.extents, _EXTENT_BYTES, limits.FRAGMENTS_PER_REPLY_MAX):
        raise bad("extents", "there are none")
    return DataCall(message.session, message.extents)


def _piece(data: bytes) -> bytes:
    if not data:
        raise bad("data", "there is none")
    check_at_most("bytes of a piece", len(data), limits.PIECE_BYTES_MAX)
    return data
