"""Listings come back equal over the wire; what is malformed or too much is a named refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import errors, limits
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.listing import (
    CHUNKS_PER_PAGE_MAX,
    LOANS_MAX,
    NAMESPACES_PER_PAGE_MAX,
    PATH_KEYS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
    prefix_range,
)
from kvdepot.core.planner import GroupSpec
from kvdepot.proto import codec_listing
from kvdepot.proto.v1 import depot_pb2 as pb

ID = bytes(range(16))
CONTENTS = NamespaceContents(
    ID, "label", "tenant", "epoch", 256, 7, 2, 1.5,
    (TierContents("ram", {1: 3, 3: 1}, 99), TierContents("nvme", {}, 0)), 3,
)  # fmt: skip
CHUNK = Chunk(ID, ROOT_KEY, 512, True, (b"\x01\x03", b""), (12345, 0), b"\x02")
OBJECT = ObjectDescription(
    "ram", 1, 4096, "complete", bytes(15) + b"\x01", 4000, 17, 42, 2,
    (LoanDescription("engine-0", (12, 13), "read", 2**63),),
)  # fmt: skip
SPEC = NamespaceSpec(
    {"model": '"toy"'}, 32, (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(64,)),), {Kind.ATTENTION: 128}, "label"
)


def test_pages_and_descriptions_come_back_equal() -> None:
    page = NamespacePage((CONTENTS,), "ff")
    message = codec_listing.encode_namespace_page(page).SerializeToString()
    assert codec_listing.decode_namespace_page(pb.ListContentsResponse.FromString(message)) == page
    chunks = ChunkPage(("ram", "nvme"), (CHUNK, CHUNK), "1.5")
    message = codec_listing.encode_chunk_page(chunks).SerializeToString()
    assert codec_listing.decode_chunk_page(pb.ListChunksResponse.FromString(message)) == chunks
    for spec in (None, SPEC):
        namespace = NamespaceDescription(CONTENTS, spec, ("engine-0",))
        message = codec_listing.encode_namespace_description(namespace).SerializeToString()
        decoded = codec_listing.decode_namespace_description(pb.DescribeNamespaceResponse.FromString(message))
        assert decoded == namespace
    chunk = ChunkDescription(CHUNK, ("ram", "nvme"), (OBJECT,), (ID, ID), 9, 3, True)
    message = codec_listing.encode_chunk_description(chunk).SerializeToString()
    assert codec_listing.decode_chunk_description(pb.DescribeChunkResponse.FromString(message)) == chunk


def test_calls_come_back_equal_and_ask_for_no_more_than_a_page() -> None:
    def asked(page_size: int) -> tuple[int, int]:
        contents = codec_listing.decode_list_contents(codec_listing.encode_list_contents("0a", page_size, "t"))
        chunks = codec_listing.decode_list_chunks(codec_listing.encode_list_chunks(ID, "0a", page_size, "t"))
        assert (contents[0], contents[2]) == ("0a", "t")
        assert (chunks[0], chunks[1], chunks[3]) == (ID, "0a", "t")
        return contents[1], chunks[2]

    assert asked(3) == (3, 3)
    assert asked(0) == asked(2**32 - 1) == (NAMESPACES_PER_PAGE_MAX, CHUNKS_PER_PAGE_MAX)
    assert codec_listing.decode_describe_namespace(codec_listing.encode_describe_namespace(ID)) == ID
    assert codec_listing.decode_describe_chunk(codec_listing.encode_describe_chunk(ID, ROOT_KEY)) == (ID, ROOT_KEY)


def _chunk(**changed: object) -> pb.Chunk:
    fields: dict[str, object] = {"key": ID, "parent": ID, "kinds": [b"\x01"], "bytes": [1]} | changed
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
    fields: dict[str, object] = {"namespace": ID} | changed
    return pb.ListContentsResponse(namespaces=[pb.NamespaceContents(**fields)])  # type: ignore[arg-type]


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    ("decode", "message", "named"),
    [
        (codec_listing.decode_list_contents, pb.ListContentsRequest(prefix="0" * 33), "prefix bytes: 33"),
        (codec_listing.decode_list_contents, pb.ListContentsRequest(page_token="0" * 65), "page_token bytes: 65"),
        (codec_listing.decode_list_chunks, pb.ListChunksRequest(namespace=b"short"), "namespace: 5 bytes"),
        (codec_listing.decode_list_chunks, pb.ListChunksRequest(namespace=ID, prefix="0" * 33), "prefix bytes: 33"),
        (codec_listing.decode_list_chunks, pb.ListChunksRequest(namespace=ID, page_token="0" * 65), "page_token"),
        (codec_listing.decode_describe_namespace, pb.DescribeNamespaceRequest(), "namespace: 0 bytes"),
        (codec_listing.decode_describe_chunk, pb.DescribeChunkRequest(namespace=ID, key=b"1"), "key: 1 bytes"),
        (codec_listing.decode_chunk_page, _chunks(key=b""), "key: 0 bytes"),
        (codec_listing.decode_chunk_page, _chunks(parent=b"2" * 17), "parent: 17 bytes"),
        (codec_listing.decode_chunk_page, _chunks(kinds=[b"\x09"]), "kinds[]: 9 is none"),
        (codec_listing.decode_chunk_page, _chunks(kinds=[b"\x01" * 4]), "kinds[]: 4"),
        (codec_listing.decode_chunk_page, _chunks(kinds=[]), "kinds of 0 and bytes of 1 tiers, not of 1"),
        (codec_listing.decode_chunk_page, _chunks(bytes=[1, 2]), "bytes of 2 tiers"),
        (codec_listing.decode_chunk_page, _chunks(incomplete=b"\x00"), "incomplete: 0 is none"),
        (
            codec_listing.decode_chunk_page,
            pb.ListChunksResponse(chunks=[pb.Chunk()] * (CHUNKS_PER_PAGE_MAX + 1)),
            f"chunks: {CHUNKS_PER_PAGE_MAX + 1}",
        ),
        (codec_listing.decode_chunk_page, pb.ListChunksResponse(tiers=["t"] * 65), "tiers: 65"),
        (codec_listing.decode_chunk_page, pb.ListChunksResponse(tiers=["t" * 257]), "tier bytes: 257"),
        (codec_listing.decode_chunk_description, _described(path=[ID] * (PATH_KEYS_MAX + 1)), "path: 257"),
        (codec_listing.decode_chunk_description, _described(path=[b""]), "path[]: 0 bytes"),
        (codec_listing.decode_chunk_description, _described(objects=[pb.StoredObject()] * 193), "objects: 193"),
        (codec_listing.decode_chunk_description, _stored(kind=9), "kind: 9 is none"),
        (codec_listing.decode_chunk_description, _stored(state="x" * 65), "state bytes: 65"),
        (codec_listing.decode_chunk_description, _stored(checksum=b"1"), "checksum: 1 bytes"),
        (codec_listing.decode_chunk_description, _stored(loans=[pb.Loan()] * (LOANS_MAX + 1)), "loans: 65"),
        (codec_listing.decode_chunk_description, _stored(loans=[pb.Loan(pids=[1] * 129)]), "pids: 129"),
        (codec_listing.decode_chunk_description, _stored(loans=[pb.Loan(engine_id="x" * 257)]), "engine_id bytes"),
        (codec_listing.decode_namespace_page, _contents(namespace=b""), "namespace: 0 bytes"),
        (codec_listing.decode_namespace_page, _contents(label="x" * 97), "label bytes: 97"),
        (codec_listing.decode_namespace_page, _contents(tenant="x" * 129), "tenant bytes: 129"),
        (codec_listing.decode_namespace_page, _contents(epoch="x" * 129), "epoch bytes: 129"),
        (codec_listing.decode_namespace_page, _contents(chunk_tokens=limits.CHUNK_TOKENS_MAX + 1), "chunk_tokens"),
        (codec_listing.decode_namespace_page, _contents(tiers=[pb.TierContents(objects={9: 1})]), "kind: 9"),
        (codec_listing.decode_namespace_page, _contents(tiers=[pb.TierContents()] * 65), "tiers: 65"),
        (
            codec_listing.decode_namespace_description,
            pb.DescribeNamespaceResponse(contents=pb.NamespaceContents(namespace=ID), engines=["e"] * 1025),
            "engines: 1025",
        ),
    ],
)
def test_what_is_malformed_or_too_much_is_refused_by_name(
    decode: Callable[[Message], object], message: Message, named: str
) -> None:
    with pytest.raises((errors.InvalidArgument, errors.LimitExceeded)) as refused:
        decode(message)
    assert named in refused.value.message


DECODERS = [
    (codec_listing.decode_list_contents, pb.ListContentsRequest),
    (codec_listing.decode_list_chunks, pb.ListChunksRequest),
    (codec_listing.decode_describe_namespace, pb.DescribeNamespaceRequest),
    (codec_listing.decode_describe_chunk, pb.DescribeChunkRequest),
    (codec_listing.decode_namespace_page, pb.ListContentsResponse),
    (codec_listing.decode_chunk_page, pb.ListChunksResponse),
    (codec_listing.decode_namespace_description, pb.DescribeNamespaceResponse),
    (codec_listing.decode_chunk_description, pb.DescribeChunkResponse),
]


@given(data=st.binary(max_size=300), which=st.sampled_from(DECODERS))
def test_garbage_is_a_refusal_of_ours(data: bytes, which: tuple[Callable[[Message], object], type[Message]]) -> None:
    decode, message = which
    try:
        parsed = message.FromString(data)
    except DecodeError:
        return
    try:
        decode(parsed)
    except errors.KvDepotError:
        return


def test_a_prefix_is_the_range_of_ids_that_begin_so() -> None:
    assert prefix_range("prefix", "") == (bytes(16), b"\xff" * 16)
    assert prefix_range("prefix", "a") == (b"\xa0" + bytes(15), b"\xaf" + b"\xff" * 15)
    whole = "0123456789abcdef" * 2
    assert prefix_range("prefix", whole) == (bytes.fromhex(whole),) * 2
    for wrong in ("g", "A", "0" * 33, "0 ", "0x1"):
        with pytest.raises(errors.InvalidArgument, match="not the beginning of an id"):
            prefix_range("prefix", wrong)
