"""Between the wire and `kvdepot.core.traces`."""

from __future__ import annotations

from kvdepot.core import limits
from kvdepot.core.calls import KEY_BYTES
from kvdepot.core.traces import PART_REQUESTS_MAX, TracedRequest, TracePart
from kvdepot.proto.bounds import bad, check_at_most, check_bytes, check_seconds
from kvdepot.proto.codec_namespace import decode_namespace_spec, encode_namespace_spec
from kvdepot.proto.v1 import depot_pb2 as pb


def encode_part(part: TracePart) -> pb.RecordTraceResponse:
    return pb.RecordTraceResponse(
        namespaces=[
            pb.TracedNamespace(namespace=namespace_id, spec=encode_namespace_spec(spec))
            for namespace_id, spec in part.namespaces
        ],
        requests=[
            pb.TracedRequest(
                seconds=one.seconds, namespace=one.namespace_id, keys=one.keys, boundary_tokens=one.boundary_tokens
            )
            for one in part.requests
        ],
        lost=part.lost,
    )


def decode_part(message: pb.RecordTraceResponse) -> TracePart:
    check_at_most("requests", len(message.requests), PART_REQUESTS_MAX)
    for named in message.namespaces:
        check_bytes("namespaces[].namespace", named.namespace, limits.NAMESPACE_ID_BYTES)
    return TracePart(
        tuple((named.namespace, decode_namespace_spec(named.spec)) for named in message.namespaces),
        tuple(_decode_request(request) for request in message.requests),
        message.lost,
    )


def _decode_request(message: pb.TracedRequest) -> TracedRequest:
    check_bytes("requests[].namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    check_seconds("requests[].seconds", message.seconds)
    if len(message.keys) % KEY_BYTES:
        raise bad("requests[].keys", f"{len(message.keys)} bytes are no multiple of {KEY_BYTES}")
    check_at_most("requests[].keys", len(message.keys) // KEY_BYTES, limits.KEYS_PER_CALL_MAX)
    return TracedRequest(message.seconds, message.namespace, message.keys, message.boundary_tokens)
