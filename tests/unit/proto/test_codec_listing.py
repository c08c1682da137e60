"""Listings come back equal over the wire; what is malformed or too much is a named refusal."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from kvdepot.core import errors, limits
from kvdepot.core.calls import ROOT_KEY, Kind, RequestEnd
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.listing import (
    CHUNKS_PER_PAGE_MAX,
    LOANS_MAX,
    PATH_KEYS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    DescribeChunkCall,
    DescribeNamespaceCall,
    ListChunksCall,
    ListContentsCall,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
    prefix_range,
)
from kvdepot.core.planner import GroupSpec
from kvdepot.core.records import (
    ExplainCall,
    ExplainReply,
    ListRequestsCall,
    LoadRecord,
    Lookup,
    RequestList,
    RequestRecord,
)
from kvdepot.core.report import GetStatusCall, ListNamespacesCall, NamespaceStatus, NamespaceStatusPage
from kvdepot.core.traces import RecordTraceCall, TracedNamespace, TracedRequest, TracePart
from kvdepot.proto.codec import Codec
from kvdepot.proto.methods import BY_CALL, OPERATOR
from kvdepot.proto.v1 import depot_pb2 as pb

ID = bytes(range(16))
CONTENTS = NamespaceContents(
    ID, "label", "tenant", "epoch", 256, 7, 2, 1.5,
    (TierContents("ram", {Kind.ATTENTION: 3, Kind.STATE: 1}, 99), TierContents("nvme", {}, 0)), 3,
)  # fmt: skip
CHUNK = Chunk(ID, ROOT_KEY, 512, True, (b"\x01\x03", b""), (12345, 0), b"\x02")
OBJECT = ObjectDescription(
    "ram", Kind.ATTENTION, 4096, "complete", bytes(15) + b"\x01", 4000, 17, 42, 2,
    (LoanDescription("engine-0", (12, 13), "read", 2**63),),
)  # fmt: skip
SPEC = NamespaceSpec(
    {"model": '"toy"'}, 32, (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(64,)),), {Kind.ATTENTION: 128}, "label"
)


CALLS: list[object] = [
    ListContentsCall("0a", 3, "t"),
    ListChunksCall(ID, "0a", 3, "t"),
    DescribeNamespaceCall(ID),
    DescribeChunkCall(ID, ROOT_KEY),
    GetStatusCall(),
    ListNamespacesCall(3, "t"),
    ExplainCall("request"),
    RecordTraceCall(),
    ListRequestsCall(7, True),
]
LOOKUP = Lookup(9, 16, 100, 7, {"ram": 3, "nvme": 7}, 64, 32, "nvme", 0.5, "later", 7, ID, ID)
RECORD = RequestRecord(
    "e", "r", ID, 3.5, 2, 1.5, LOOKUP, ("a != b",), (LoadRecord("granted", 3, 1.0, 0.25),), {"granted": 2}, 0.5,
    RequestEnd(16, 32, "later", 99, "nvme", 0.25, 0.05), 16,
)  # fmt: skip
REPLIES: list[tuple[str, object]] = [
    ("ListContents", NamespacePage((CONTENTS,), "ff")),
    ("ListChunks", ChunkPage(("ram", "nvme"), (CHUNK, CHUNK), "1.5")),
    ("DescribeNamespace", NamespaceDescription(CONTENTS, None, ("engine-0",))),
    ("DescribeNamespace", NamespaceDescription(CONTENTS, SPEC, ("engine-0",))),
    ("DescribeChunk", ChunkDescription(CHUNK, ("ram", "nvme"), (OBJECT,), (ID, ID), 9, 3, True)),
    (
        "ListNamespaces",
        NamespaceStatusPage((NamespaceStatus(ID, "l", objects={Kind.ATTENTION: 7}, size_bytes=9),), "ff"),
    ),
    ("ExplainRequest", ExplainReply((RECORD, RequestRecord("e", "r", ID, 3.5)))),
    ("ListRequests", RequestList((RECORD, RequestRecord("e", "r", ID, 3.5)))),
    ("RecordTrace", TracePart((TracedNamespace(ID, SPEC),), (TracedRequest(1.5, ID, ID * 2, 512),), 3)),
]


@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_a_call_comes_back_equal(call: object) -> None:
    wire = BY_CALL[type(call)].call
    assert wire.parse(wire.encode(call).SerializeToString()) == call


@pytest.mark.parametrize(("method", "reply"), REPLIES)
def test_pages_and_descriptions_come_back_equal(method: str, reply: object) -> None:
    wire = OPERATOR[method].reply
    assert wire.parse(wire.encode(reply).SerializeToString()) == reply


def test_every_call_and_every_reply_was_tried() -> None:
    assert {type(call) for call in CALLS} == {method.call_type for method in OPERATOR.values()}
    assert {method for method, _ in REPLIES} == set(OPERATOR) - {"GetStatus"}, "test_codec.py has that one"


def _chunk(**changed: object) -> pb.Chunk:
    fields: dict[str, object] = {"key": ID, "parent": ID, "kinds": [b"\x01"], "size_bytes": [1]} | changed
    return pb.Chunk(**fields)  # type: ignore[arg-type]


def _chunks(**changed: object) -> pb.ListChunksResponse:
    return pb.ListChunksResponse(tiers=["ram"], chunks=[_chunk(**changed)])


def _described(**changed: object) -> pb.DescribeChunkResponse:
    fields: dict[str, object] = {"chunk": _chunk(), "tiers": ["ram"]} | changed
    return pb.DescribeChunkResponse(**fields)  # type: ignore[arg-type]


def _stored(**changed: object) -> pb.DescribeChunkResponse:
    fields: dict[str, object] = {"tier": "ram", "kind": 1} | changed
    return _described(objects=[pb.StoredObject(**fields)])  # type: ignore[arg-type]


def _contents(**changed: object) -> pb.ListContentsResponse:
    fields: dict[str, object] = {"namespace_id": ID} | changed
    return pb.ListContentsResponse(namespaces=[pb.NamespaceContents(**fields)])  # type: ignore[arg-type]


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    ("wire", "message", "named"),
    [
        (OPERATOR["ListContents"].call, pb.ListContentsRequest(prefix="0" * 33), "prefix bytes: 33"),
        (OPERATOR["ListContents"].call, pb.ListContentsRequest(page_token="0" * 65), "page_token bytes: 65"),
        (OPERATOR["ListChunks"].call, pb.ListChunksRequest(namespace_id=b"short"), "namespace_id: 5 bytes"),
        (OPERATOR["ListChunks"].call, pb.ListChunksRequest(namespace_id=ID, prefix="0" * 33), "prefix bytes: 33"),
        (OPERATOR["ListChunks"].call, pb.ListChunksRequest(namespace_id=ID, page_token="0" * 65), "page_token"),
        (OPERATOR["DescribeNamespace"].call, pb.DescribeNamespaceRequest(), "namespace_id: 0 bytes"),
        (OPERATOR["DescribeChunk"].call, pb.DescribeChunkRequest(namespace_id=ID, key=b"1"), "key: 1 bytes"),
        (OPERATOR["ListChunks"].reply, _chunks(key=b""), "key: 0 bytes"),
        (OPERATOR["ListChunks"].reply, _chunks(parent=b"2" * 17), "parent: 17 bytes"),
        (OPERATOR["ListChunks"].reply, _chunks(kinds=[b"\x09"]), "kinds[]: 9 is none"),
        (OPERATOR["ListChunks"].reply, _chunks(kinds=[b"\x01" * 4]), "kinds[]: 4"),
        (OPERATOR["ListChunks"].reply, _chunks(kinds=[]), "kinds of 0 and size_bytes of 1 tiers, not of 1"),
        (OPERATOR["ListChunks"].reply, _chunks(size_bytes=[1, 2]), "size_bytes of 2 tiers"),
        (OPERATOR["ListChunks"].reply, _chunks(incomplete=b"\x00"), "incomplete: 0 is none"),
        (
            OPERATOR["ListChunks"].reply,
            pb.ListChunksResponse(chunks=[pb.Chunk()] * (CHUNKS_PER_PAGE_MAX + 1)),
            f"chunks: {CHUNKS_PER_PAGE_MAX + 1}",
        ),
        (OPERATOR["ListChunks"].reply, pb.ListChunksResponse(tiers=["t"] * 65), "tiers: 65"),
        (OPERATOR["ListChunks"].reply, pb.ListChunksResponse(tiers=["t" * 257]), "tiers[] bytes: 257"),
        (OPERATOR["DescribeChunk"].reply, _described(path=[ID] * (PATH_KEYS_MAX + 1)), "path: 257"),
        (OPERATOR["DescribeChunk"].reply, _described(path=[b""]), "path[]: 0 bytes"),
        (OPERATOR["DescribeChunk"].reply, _described(objects=[pb.StoredObject()] * 193), "objects: 193"),
        (OPERATOR["DescribeChunk"].reply, _stored(kind=9), "kind: 9 is none"),
        (OPERATOR["DescribeChunk"].reply, _stored(state="x" * 65), "state bytes: 65"),
        (OPERATOR["DescribeChunk"].reply, _stored(checksum=b"1"), "checksum: 1 bytes"),
        (OPERATOR["DescribeChunk"].reply, _stored(loans=[pb.Loan()] * (LOANS_MAX + 1)), "loans: 65"),
        (OPERATOR["DescribeChunk"].reply, _stored(loans=[pb.Loan(pids=[1] * 129)]), "pids: 129"),
        (OPERATOR["DescribeChunk"].reply, _stored(loans=[pb.Loan(engine_id="x" * 257)]), "engine_id bytes"),
        (OPERATOR["ListContents"].reply, _contents(namespace_id=b""), "namespace_id: 0 bytes"),
        (OPERATOR["ListContents"].reply, _contents(label="x" * 97), "label bytes: 97"),
        (OPERATOR["ListContents"].reply, _contents(tenant="x" * 129), "tenant bytes: 129"),
        (OPERATOR["ListContents"].reply, _contents(epoch="x" * 129), "epoch bytes: 129"),
        (OPERATOR["ListContents"].reply, _contents(chunk_tokens=limits.CHUNK_TOKENS_MAX + 1), "chunk_tokens"),
        (OPERATOR["ListContents"].reply, _contents(tiers=[pb.TierContents(objects={9: 1})]), "objects: 9"),
        (OPERATOR["ListContents"].reply, _contents(tiers=[pb.TierContents()] * 65), "tiers: 65"),
        (
            OPERATOR["DescribeNamespace"].reply,
            pb.DescribeNamespaceResponse(contents=pb.NamespaceContents(namespace_id=ID), engines=["e"] * 1025),
            "engines: 1025",
        ),
    ],
)
def test_what_is_malformed_or_too_much_is_refused_by_name(wire: Codec[Any], message: Message, named: str) -> None:
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refused:
        wire.decode(message)
    assert named in refused.value.message


def test_a_prefix_is_the_range_of_ids_that_begin_so() -> None:
    assert prefix_range("prefix", "") == (bytes(16), b"\xff" * 16)
    assert prefix_range("prefix", "a") == (b"\xa0" + bytes(15), b"\xaf" + b"\xff" * 15)
    whole = "0123456789abcdef" * 2
    assert prefix_range("prefix", whole) == (bytes.fromhex(whole),) * 2
    for wrong in ("g", "A", "0" * 33, "0 ", "0x1"):
        with pytest.raises(errors.InvalidArgument, match="not the beginning of an id"):
            prefix_range("prefix", wrong)
