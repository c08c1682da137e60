"""Between the wire and `kvdepot.core.records`."""

from __future__ import annotations

from typing import Final

from kvdepot.core import limits
from kvdepot.core.calls import KEY_BYTES, RequestEnd
from kvdepot.core.records import (
    DIFFERENCES_MAX,
    LOADS_PER_RECORD_MAX,
    RECORDS_PER_ANSWER_MAX,
    LoadRecord,
    Lookup,
    RequestRecord,
)
from kvdepot.proto.bounds import check_at_most, check_bytes, check_seconds, check_text
from kvdepot.proto.v1 import depot_pb2 as pb

_NAMES_MAX: Final = 64
"""Tiers, or outcomes."""
_TEXT_BYTES_MAX: Final = 256
_DIFFERENCE_BYTES_MAX: Final = 1 << 16


def encode_explain(request_id: str) -> pb.ExplainRequestRequest:
    return pb.ExplainRequestRequest(request_id=request_id)


def decode_explain(message: pb.ExplainRequestRequest) -> str:
    check_text("request_id", message.request_id, limits.REQUEST_ID_BYTES_MAX)
    return message.request_id


def encode_records(records: tuple[RequestRecord, ...]) -> pb.ExplainRequestResponse:
    return pb.ExplainRequestResponse(records=[_encode_record(record) for record in records])


def decode_records(message: pb.ExplainRequestResponse) -> tuple[RequestRecord, ...]:
    check_at_most("records", len(message.records), RECORDS_PER_ANSWER_MAX)
    return tuple(_decode_record(record) for record in message.records)


def _encode_record(record: RequestRecord) -> pb.RequestRecord:
    end = record.end or RequestEnd()
    return pb.RequestRecord(
        engine_id=record.engine_id,
        request_id=record.request_id,
        namespace=record.namespace_id,
        began_seconds_ago=record.began_seconds_ago,
        lookups=record.lookups,
        looked_up_seconds_ago=record.looked_up_seconds_ago,
        lookup=_encode_lookup(record.lookup) if record.lookup is not None else None,
        differences=[line[: _DIFFERENCE_BYTES_MAX // 4] for line in record.differences],
        loads=[
            pb.LoadRecord(
                outcome=load.outcome, objects=load.objects, asked_seconds_ago=load.asked_seconds_ago,
                seconds=load.seconds,
            )
            for load in record.loads
        ],
        reserved=record.reserved,
        ended_seconds_ago=record.ended_seconds_ago,
        local_tokens=end.local_tokens,
        loaded_tokens=end.loaded_tokens,
        miss=end.miss,
    )  # fmt: skip


def _encode_lookup(lookup: Lookup) -> pb.LookupRecord:
    return pb.LookupRecord(
        chunks=lookup.chunks,
        chunk_tokens=lookup.chunk_tokens,
        high_tokens=lookup.high_tokens,
        path_chunks=lookup.path_chunks,
        held=lookup.held,
        boundary_tokens=lookup.boundary_tokens,
        offered_tokens=lookup.offered_tokens,
        offered_tier=lookup.offered_tier,
        estimate_seconds=lookup.estimate_seconds,
        miss=lookup.miss,
        missing_chunk=lookup.missing_chunk,
        missing_key=lookup.missing_key,
        other_namespace=lookup.other_namespace,
    )


def _decode_record(message: pb.RequestRecord) -> RequestRecord:
    check_text("engine_id", message.engine_id, limits.ENGINE_ID_BYTES_MAX)
    check_text("request_id", message.request_id, limits.REQUEST_ID_BYTES_MAX)
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    check_at_most("differences", len(message.differences), DIFFERENCES_MAX)
    for line in message.differences:
        check_text("differences[]", line, _DIFFERENCE_BYTES_MAX)
    check_at_most("loads", len(message.loads), LOADS_PER_RECORD_MAX)
    check_at_most("reserved", len(message.reserved), _NAMES_MAX)
    check_text("miss", message.miss, _TEXT_BYTES_MAX)
    ended = message.HasField("ended_seconds_ago")
    return RequestRecord(
        engine_id=message.engine_id,
        request_id=message.request_id,
        namespace_id=message.namespace,
        began_seconds_ago=check_seconds("began_seconds_ago", message.began_seconds_ago),
        lookups=message.lookups,
        looked_up_seconds_ago=check_seconds("looked_up_seconds_ago", message.looked_up_seconds_ago),
        lookup=_decode_lookup(message.lookup) if message.HasField("lookup") else None,
        differences=tuple(message.differences),
        loads=tuple(_decode_load(load) for load in message.loads),
        reserved=dict(message.reserved),
        ended_seconds_ago=check_seconds("ended_seconds_ago", message.ended_seconds_ago) if ended else None,
        end=RequestEnd(message.local_tokens, message.loaded_tokens, message.miss) if ended else None,
    )


def _decode_load(message: pb.LoadRecord) -> LoadRecord:
    check_text("outcome", message.outcome, _TEXT_BYTES_MAX)
    return LoadRecord(
        message.outcome,
        message.objects,
        check_seconds("asked_seconds_ago", message.asked_seconds_ago),
        check_seconds("seconds", message.seconds),
    )


def _decode_lookup(message: pb.LookupRecord) -> Lookup:
    check_at_most("held", len(message.held), _NAMES_MAX)
    for name in message.held:
        check_text("held", name, _TEXT_BYTES_MAX)
    check_text("offered_tier", message.offered_tier, _TEXT_BYTES_MAX)
    check_text("miss", message.miss, _TEXT_BYTES_MAX)
    check_bytes("missing_key", message.missing_key, KEY_BYTES)
    if message.other_namespace:
        check_bytes("other_namespace", message.other_namespace, limits.NAMESPACE_ID_BYTES)
    return Lookup(
        chunks=message.chunks,
        chunk_tokens=message.chunk_tokens,
        high_tokens=message.high_tokens,
        path_chunks=message.path_chunks,
        held=dict(message.held),
        boundary_tokens=message.boundary_tokens,
        offered_tokens=message.offered_tokens,
        offered_tier=message.offered_tier,
        estimate_seconds=check_seconds("estimate_seconds", message.estimate_seconds),
        miss=message.miss,
        missing_chunk=message.missing_chunk,
        missing_key=message.missing_key,
        other_namespace=message.other_namespace,
    )
