"""The only translator between the wire (`depot_pb2`) and the domain (`kvdepot.core.calls`).

`encode_*` never fails on what the domain allows. `decode_*` believes nothing: every
length, count and enum is checked against `kvdepot.core.limits`. What is too many or too
long raises `LimitExceeded`, what is malformed `InvalidArgument`, both naming the field and
the bound, on either side of the wire.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from kvdepot.core import limits
from kvdepot.core.calls import (
    EXTENT_WORDS,
    KEY_BYTES,
    AbandonCall,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    AttachCall,
    AttachReply,
    Capabilities,
    CommitCall,
    CommitItem,
    CommitOutcome,
    CommitReply,
    DeclareCall,
    DeclareReply,
    EndRequestCall,
    Kind,
    LocateCall,
    LocateReply,
    ReleaseCall,
    RequestEnd,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.proto.bounds import (
    bad,
    check_at_most,
    check_bytes,
    check_packed,
    check_seconds,
    check_text,
    check_values,
)
from kvdepot.proto.v1 import depot_pb2 as pb

_M = TypeVar("_M", bound=Message)
_KINDS = bytes(Kind)
_RESERVE_OUTCOMES = bytes(ReserveOutcome)
_COMMIT_OUTCOMES = bytes(CommitOutcome)
_LIMIT_NAMES_MAX = 256
_EXTENT_BYTES = 8 * EXTENT_WORDS
_STREAM = re.compile(r"stream-[0-9]{1,4}")


# --- attachment datagrams ---


def encode_attach_call(call: AttachCall) -> bytes:
    return pb.AttachRequest(
        protocol_min=call.protocol_min,
        protocol_max=call.protocol_max,
        client_version=call.client_version,
        engine_id=call.engine_id,
        scheduler=call.scheduler,
        rank=call.rank,
        world_size=call.world_size,
        stream=call.stream,
        calls=call.calls,
    ).SerializeToString()


def decode_attach_call(datagram: bytes) -> AttachCall:
    message = _parse(pb.AttachRequest(), datagram)
    check_text("client_version", message.client_version, limits.VERSION_BYTES_MAX)
    check_text("engine_id", message.engine_id, limits.ENGINE_ID_BYTES_MAX)
    if not message.engine_id:
        raise bad("engine_id", "it is empty")
    if not 1 <= message.world_size <= limits.RANKS_MAX:
        raise bad("world_size", f"{message.world_size} is not between 1 and {limits.RANKS_MAX}")
    if not -1 <= message.rank < message.world_size:
        raise bad("rank", f"{message.rank} is not between -1 and world_size - 1 = {message.world_size - 1}")
    if not message.scheduler and message.rank < 0:
        raise bad("rank", "a process that is neither scheduler nor worker has nothing to attach")
    if message.stream and message.scheduler:
        raise bad("stream", "a scheduler attaches by itself: the proxy stands for the rank alone")
    if message.calls and not message.scheduler:
        raise bad("calls", "only a scheduler makes calls")
    return AttachCall(
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
        engine_id=message.engine_id,
        scheduler=message.scheduler,
        rank=message.rank,
        world_size=message.world_size,
        client_version=message.client_version,
        stream=message.stream,
        calls=message.calls,
    )


def encode_attach_reply(reply: AttachReply) -> bytes:
    return pb.AttachResponse(
        protocol=reply.protocol,
        error=reply.error,
        session=reply.session,
        arena_id=reply.arena_id,
        arena_bytes=reply.arena_bytes,
        daemon_version=reply.daemon_version,
        stream=reply.stream,
        calls=reply.calls,
    ).SerializeToString()


def decode_attach_reply(datagram: bytes) -> AttachReply:
    message = _parse(pb.AttachResponse(), datagram)
    check_text("error", message.error, limits.REASON_BYTES_MAX)
    check_text("daemon_version", message.daemon_version, limits.VERSION_BYTES_MAX)
    if message.protocol:
        _session(message.session)
    if message.stream and not _STREAM.fullmatch(message.stream):
        raise bad("stream", f"{message.stream[:32]!r} is no name of a proxy's socket")
    return AttachReply(
        protocol=message.protocol,
        error=message.error,
        session=message.session,
        arena_id=message.arena_id,
        arena_bytes=message.arena_bytes,
        daemon_version=message.daemon_version,
        stream=message.stream,
        calls=message.calls,
    )


# --- capabilities ---


def encode_capabilities(value: Capabilities) -> pb.GetCapabilitiesResponse:
    return pb.GetCapabilitiesResponse(
        protocol_min=value.protocol_min,
        protocol_max=value.protocol_max,
        daemon_version=value.version,
        arena_id=value.arena_id,
        ready_bytes=value.ready_bytes,
        limits=value.limits,
    )


def decode_capabilities(message: pb.GetCapabilitiesResponse) -> Capabilities:
    check_text("daemon_version", message.daemon_version, limits.VERSION_BYTES_MAX)
    check_at_most("limits", len(message.limits), _LIMIT_NAMES_MAX)
    return Capabilities(
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
        version=message.daemon_version,
        arena_id=message.arena_id,
        ready_bytes=message.ready_bytes,
        limits=dict(message.limits),
    )


# --- declare ---


def encode_declare_call(call: DeclareCall) -> pb.DeclareRequest:
    return pb.DeclareRequest(session=call.session, lease_ids=call.lease_ids)


def decode_declare_call(message: pb.DeclareRequest) -> DeclareCall:
    return DeclareCall(_session(message.session), _leases(message.lease_ids, limits.LEASES_PER_SESSION_MAX))


def encode_declare_reply(reply: DeclareReply) -> pb.DeclareResponse:
    return pb.DeclareResponse(lost=reply.lost, ranks_attached=reply.ranks_attached)


def decode_declare_reply(message: pb.DeclareResponse) -> DeclareReply:
    return DeclareReply(_leases(message.lost, limits.LEASES_PER_SESSION_MAX, "lost"), message.ranks_attached)


# --- locate ---


def encode_locate_call(call: LocateCall) -> pb.LocateRequest:
    return pb.LocateRequest(
        session=call.session,
        namespace=call.namespace,
        keys=call.keys,
        high_tokens=call.high_tokens,
        request_id=call.request_id,
        budget_seconds=call.budget_seconds,
        wait_seconds=call.wait_seconds,
        local_tokens=call.local_tokens,
        token_seconds=call.token_seconds,
    )


def decode_locate_call(message: pb.LocateRequest) -> LocateCall:
    check_packed("keys", message.keys, KEY_BYTES, limits.KEYS_PER_CALL_MAX)
    return LocateCall(
        session=_session(message.session),
        namespace=_namespace(message.namespace),
        keys=message.keys,
        high_tokens=message.high_tokens,
        request_id=_request_id(message.request_id),
        budget_seconds=check_seconds("budget_seconds", message.budget_seconds),
        wait_seconds=check_seconds("wait_seconds", message.wait_seconds),
        local_tokens=message.local_tokens,
        token_seconds=check_seconds("token_seconds", message.token_seconds),
    )


def encode_locate_reply(reply: LocateReply) -> pb.LocateResponse:
    return pb.LocateResponse(
        boundary_tokens=reply.boundary_tokens,
        tier=reply.tier,
        attention_tokens=reply.attention_tokens,
        estimate_seconds=reply.estimate_seconds,
        miss=reply.miss,
    )


def decode_locate_reply(message: pb.LocateResponse) -> LocateReply:
    check_text("tier", message.tier, limits.REASON_BYTES_MAX)
    estimate_seconds = check_seconds("estimate_seconds", message.estimate_seconds)
    check_text("miss", message.miss, limits.REASON_BYTES_MAX)
    return LocateReply(message.boundary_tokens, message.tier, message.attention_tokens, estimate_seconds, message.miss)


# --- acquire and release ---


def encode_acquire_call(call: AcquireCall) -> pb.AcquireRequest:
    return pb.AcquireRequest(
        session=call.session,
        lease_id=call.lease_id,
        namespace=call.namespace,
        keys=call.keys,
        kinds=call.kinds,
        request_id=call.request_id,
        no_use=call.no_use,
    )


def decode_acquire_call(message: pb.AcquireRequest) -> AcquireCall:
    count = check_packed("keys", message.keys, KEY_BYTES, limits.OBJECTS_PER_LEASE_MAX)
    _kinds(message.kinds, count)
    return AcquireCall(
        session=_session(message.session),
        lease_id=_lease(message.lease_id),
        namespace=_namespace(message.namespace),
        keys=message.keys,
        kinds=message.kinds,
        request_id=_request_id(message.request_id),
        no_use=message.no_use,
    )


def encode_acquire_reply(reply: AcquireReply) -> pb.AcquireResponse:
    return pb.AcquireResponse(
        outcome=int(reply.outcome), extents=reply.extents, arena_id=reply.arena_id, reason=reply.reason
    )


def decode_acquire_reply(message: pb.AcquireResponse) -> AcquireReply:
    if message.outcome not in AcquireOutcome.__members__.values():
        raise bad("outcome", f"{message.outcome} is none of {[int(value) for value in AcquireOutcome]}")
    check_packed("extents", message.extents, _EXTENT_BYTES, limits.FRAGMENTS_PER_REPLY_MAX)
    return AcquireReply(AcquireOutcome(message.outcome), message.extents, message.arena_id, message.reason)


def encode_release_call(call: ReleaseCall) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(session=call.session, lease_ids=call.lease_ids, unused=call.unused)


def decode_release_call(message: pb.ReleaseRequest) -> ReleaseCall:
    return ReleaseCall(
        _session(message.session),
        _leases(message.lease_ids, limits.LEASES_PER_CALL_MAX),
        _leases(message.unused, limits.LEASES_PER_CALL_MAX, "unused"),
    )


# --- reserve ---


def encode_reserve_call(call: ReserveCall) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        session=call.session,
        lease_id=call.lease_id,
        namespace=call.namespace,
        keys=call.keys,
        parents=call.parents,
        kinds=call.kinds,
        boundaries=call.boundaries,
        request_id=call.request_id,
    )


def decode_reserve_call(message: pb.ReserveRequest) -> ReserveCall:
    count = check_packed("keys", message.keys, KEY_BYTES, limits.OBJECTS_PER_LEASE_MAX)
    check_bytes("parents", message.parents, count * KEY_BYTES)
    check_bytes("boundaries", message.boundaries, count * 4)
    _kinds(message.kinds, count)
    return ReserveCall(
        session=_session(message.session),
        lease_id=_lease(message.lease_id),
        namespace=_namespace(message.namespace),
        keys=message.keys,
        parents=message.parents,
        kinds=message.kinds,
        boundaries=message.boundaries,
        request_id=_request_id(message.request_id),
    )


def encode_reserve_reply(reply: ReserveReply) -> pb.ReserveResponse:
    return pb.ReserveResponse(
        outcomes=reply.outcomes, extents=reply.extents, arena_id=reply.arena_id, reason=reply.reason
    )


def decode_reserve_reply(message: pb.ReserveResponse) -> ReserveReply:
    check_at_most("outcomes", len(message.outcomes), limits.OBJECTS_PER_LEASE_MAX)
    check_values("outcomes", message.outcomes, _RESERVE_OUTCOMES)
    check_packed("extents", message.extents, _EXTENT_BYTES, limits.FRAGMENTS_PER_REPLY_MAX)
    check_text("reason", message.reason, limits.REASON_BYTES_MAX)
    return ReserveReply(message.outcomes, message.extents, message.arena_id, message.reason)


# --- commit, abandon, end of request ---


def encode_commit_call(call: CommitCall) -> pb.CommitRequest:
    return pb.CommitRequest(session=call.session, items=_encode_items(call.items))


def decode_commit_call(message: pb.CommitRequest) -> CommitCall:
    return CommitCall(_session(message.session), _items(message.items))


def encode_commit_reply(reply: CommitReply) -> pb.CommitResponse:
    return pb.CommitResponse(outcomes=reply.outcomes)


def decode_commit_reply(message: pb.CommitResponse) -> CommitReply:
    check_at_most("outcomes", len(message.outcomes), limits.LEASES_PER_CALL_MAX)
    for outcomes in message.outcomes:
        check_at_most("outcomes[]", len(outcomes), limits.OBJECTS_PER_LEASE_MAX)
        check_values("outcomes[]", outcomes, _COMMIT_OUTCOMES)
    return CommitReply(tuple(message.outcomes))


def encode_abandon_call(call: AbandonCall) -> pb.AbandonRequest:
    return pb.AbandonRequest(session=call.session, items=_encode_items(call.items))


def decode_abandon_call(message: pb.AbandonRequest) -> AbandonCall:
    return AbandonCall(_session(message.session), _items(message.items))


def encode_end_request_call(call: EndRequestCall) -> pb.EndRequestRequest:
    end = call.end
    return pb.EndRequestRequest(
        session=call.session,
        request_id=call.request_id,
        local_tokens=end.local_tokens,
        loaded_tokens=end.loaded_tokens,
        miss=end.miss,
    )


def decode_end_request_call(message: pb.EndRequestRequest) -> EndRequestCall:
    check_text("miss", message.miss, limits.REASON_BYTES_MAX)
    end = RequestEnd(message.local_tokens, message.loaded_tokens, message.miss)
    return EndRequestCall(_session(message.session), _request_id(message.request_id), end)


# --- parts ---


def _parse(message: _M, datagram: bytes) -> _M:
    check_at_most("datagram", len(datagram), limits.ATTACH_DATAGRAM_BYTES_MAX)
    try:
        message.ParseFromString(datagram)
    except DecodeError as error:
        raise bad("datagram", f"its {len(datagram)} bytes are no {message.DESCRIPTOR.name}") from error
    return message


def _session(token: bytes) -> bytes:
    check_bytes("session", token, limits.SESSION_TOKEN_BYTES)
    return token


def _namespace(namespace: bytes) -> bytes:
    check_bytes("namespace", namespace, limits.NAMESPACE_ID_BYTES)
    return namespace


def _request_id(text: str) -> str:
    check_text("request_id", text, limits.REQUEST_ID_BYTES_MAX)
    return text


def _lease(lease_id: int) -> int:
    if lease_id == 0:
        raise bad("lease_id", "0 is not a lease id; draw a random 64-bit number")
    return lease_id


def _leases(lease_ids: Iterable[int], count_max: int, field: str = "lease_ids") -> tuple[int, ...]:
    found = tuple(lease_ids)
    check_at_most(field, len(found), count_max)
    return found


def _kinds(kinds: bytes, count: int) -> None:
    check_bytes("kinds", kinds, count)
    check_values("kinds", kinds, _KINDS)


def _encode_items(items: Iterable[CommitItem]) -> list[pb.CommitItem]:
    return [pb.CommitItem(lease_id=item.lease_id, indices=item.indices) for item in items]


def _items(items: Iterable[pb.CommitItem]) -> tuple[CommitItem, ...]:
    found = tuple(items)
    check_at_most("items", len(found), limits.LEASES_PER_CALL_MAX)
    return tuple(CommitItem(_lease(item.lease_id), _indices(item.indices)) for item in found)


def _indices(packed: bytes) -> bytes:
    """Indices are u32; one above the largest call's size cannot belong to any reservation."""
    check_packed("indices", packed, 4, limits.OBJECTS_PER_LEASE_MAX)
    if packed and int(np.frombuffer(packed, dtype="<u4").max()) >= limits.OBJECTS_PER_LEASE_MAX:
        raise bad("indices", f"an index is not below {limits.OBJECTS_PER_LEASE_MAX}, the most objects of a call")
    return packed
