"""Listings and descriptions for operators, between the wire and `kvdepot.core.listing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvdepot.core import limits
from kvdepot.core.arena import NAMESPACES_MAX, SESSIONS_MAX
from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.core.listing import (
    CHUNKS_PER_PAGE_MAX,
    LOANS_MAX,
    NAMESPACES_PER_PAGE_MAX,
    PATH_KEYS_MAX,
    PREFIX_DIGITS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    LoanDescription,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    ObjectDescription,
    TierContents,
)
from kvdepot.proto.bounds import bad, check_at_most, check_bytes, check_text, check_values
from kvdepot.proto.codec_namespace import decode_namespace_spec, encode_namespace_spec
from kvdepot.proto.v1 import depot_pb2 as pb

_KINDS = bytes(Kind)
_TIERS_MAX = 64
_OBJECTS_MAX = _TIERS_MAX * len(Kind)
_TIER_BYTES_MAX = 256
_STATE_BYTES_MAX = 64
_TOKEN_BYTES_MAX = 64
_PIDS_MAX = 2 * limits.RANKS_MAX
_SUM_BYTES = 16


# --- calls ---


def encode_list_contents(prefix: str, page_size: int, page_token: str) -> pb.ListContentsRequest:
    return pb.ListContentsRequest(prefix=prefix, page_size=page_size, page_token=page_token)


def decode_list_contents(message: pb.ListContentsRequest) -> tuple[str, int, str]:
    """(prefix of ids, namespaces wanted, token); no number wanted: as many as a page has."""
    return (
        _prefix(message.prefix),
        min(message.page_size or NAMESPACES_PER_PAGE_MAX, NAMESPACES_PER_PAGE_MAX),
        _page_token(message.page_token),
    )


def encode_list_chunks(namespace_id: bytes, prefix: str, page_size: int, page_token: str) -> pb.ListChunksRequest:
    return pb.ListChunksRequest(namespace=namespace_id, prefix=prefix, page_size=page_size, page_token=page_token)


def decode_list_chunks(message: pb.ListChunksRequest) -> tuple[bytes, str, int, str]:
    """(namespace id, prefix of keys, chunks wanted, token)."""
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    return (
        message.namespace,
        _prefix(message.prefix),
        min(message.page_size or CHUNKS_PER_PAGE_MAX, CHUNKS_PER_PAGE_MAX),
        _page_token(message.page_token),
    )


def encode_describe_namespace(namespace_id: bytes) -> pb.DescribeNamespaceRequest:
    return pb.DescribeNamespaceRequest(namespace=namespace_id)


def decode_describe_namespace(message: pb.DescribeNamespaceRequest) -> bytes:
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    return message.namespace


def encode_describe_chunk(namespace_id: bytes, key: bytes) -> pb.DescribeChunkRequest:
    return pb.DescribeChunkRequest(namespace=namespace_id, key=key)


def decode_describe_chunk(message: pb.DescribeChunkRequest) -> tuple[bytes, bytes]:
    """(namespace id, chunk key)."""
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    check_bytes("key", message.key, KEY_BYTES)
    return message.namespace, message.key


def _prefix(text: str) -> str:
    check_text("prefix", text, PREFIX_DIGITS_MAX)
    return text


def _page_token(text: str) -> str:
    check_text("page_token", text, _TOKEN_BYTES_MAX)
    return text


# --- namespaces ---


def encode_namespace_page(page: NamespacePage) -> pb.ListContentsResponse:
    return pb.ListContentsResponse(
        namespaces=[_encode_contents(one) for one in page.namespaces], next_page_token=page.next_token
    )


def decode_namespace_page(message: pb.ListContentsResponse) -> NamespacePage:
    check_at_most("namespaces", len(message.namespaces), NAMESPACES_MAX)
    return NamespacePage(
        tuple(_decode_contents(one) for one in message.namespaces), _page_token(message.next_page_token)
    )


def encode_namespace_description(description: NamespaceDescription) -> pb.DescribeNamespaceResponse:
    return pb.DescribeNamespaceResponse(
        contents=_encode_contents(description.contents),
        spec=None if description.spec is None else encode_namespace_spec(description.spec),
        engines=description.engines,
    )


def decode_namespace_description(message: pb.DescribeNamespaceResponse) -> NamespaceDescription:
    check_at_most("engines", len(message.engines), SESSIONS_MAX)
    for engine_id in message.engines:
        check_text("engines[]", engine_id, limits.ENGINE_ID_BYTES_MAX)
    return NamespaceDescription(
        _decode_contents(message.contents),
        decode_namespace_spec(message.spec) if message.HasField("spec") else None,
        tuple(message.engines),
    )


def _encode_contents(contents: NamespaceContents) -> pb.NamespaceContents:
    return pb.NamespaceContents(
        namespace=contents.namespace_id,
        label=contents.label,
        tenant=contents.tenant,
        epoch=contents.epoch,
        bumps=contents.bumps,
        chunk_tokens=contents.chunk_tokens,
        chunks=contents.chunks,
        sessions=contents.sessions,
        idle_seconds=contents.idle_seconds,
        tiers=[pb.TierContents(tier=one.tier, objects=one.objects, bytes=one.size_bytes) for one in contents.tiers],
    )


def _decode_contents(message: pb.NamespaceContents) -> NamespaceContents:
    check_bytes("namespace", message.namespace, limits.NAMESPACE_ID_BYTES)
    check_text("label", message.label, limits.LABEL_BYTES_MAX)
    check_text("tenant", message.tenant, limits.TENANT_BYTES_MAX)
    check_text("epoch", message.epoch, limits.EPOCH_BYTES_MAX)
    check_at_most("chunk_tokens", message.chunk_tokens, limits.CHUNK_TOKENS_MAX)
    check_at_most("tiers", len(message.tiers), _TIERS_MAX)
    return NamespaceContents(
        namespace_id=message.namespace,
        label=message.label,
        tenant=message.tenant,
        epoch=message.epoch,
        bumps=message.bumps,
        chunk_tokens=message.chunk_tokens,
        chunks=message.chunks,
        sessions=message.sessions,
        idle_seconds=message.idle_seconds,
        tiers=tuple(TierContents(_tier(one.tier), _objects(one.objects), one.bytes) for one in message.tiers),
    )


def _objects(objects: Mapping[int, int]) -> dict[int, int]:
    check_at_most("objects", len(objects), len(Kind))
    return {_kind(kind): count for kind, count in objects.items()}


# --- chunks ---


def encode_chunk_page(page: ChunkPage) -> pb.ListChunksResponse:
    return pb.ListChunksResponse(
        tiers=page.tiers, chunks=[_encode_chunk(chunk) for chunk in page.chunks], next_page_token=page.next_token
    )


def decode_chunk_page(message: pb.ListChunksResponse) -> ChunkPage:
    check_at_most("chunks", len(message.chunks), CHUNKS_PER_PAGE_MAX)
    tiers = _tiers(message.tiers)
    return ChunkPage(
        tiers,
        tuple(_decode_chunk(chunk, len(tiers)) for chunk in message.chunks),
        _page_token(message.next_page_token),
    )


def encode_chunk_description(description: ChunkDescription) -> pb.DescribeChunkResponse:
    return pb.DescribeChunkResponse(
        chunk=_encode_chunk(description.chunk),
        tiers=description.tiers,
        objects=[_encode_object(one) for one in description.objects],
        path=description.path,
        depth=description.depth,
        children=description.children,
        more_children=description.more_children,
    )


def decode_chunk_description(message: pb.DescribeChunkResponse) -> ChunkDescription:
    check_at_most("objects", len(message.objects), _OBJECTS_MAX)
    check_at_most("path", len(message.path), PATH_KEYS_MAX)
    for key in message.path:
        check_bytes("path[]", key, KEY_BYTES)
    tiers = _tiers(message.tiers)
    return ChunkDescription(
        _decode_chunk(message.chunk, len(tiers)),
        tiers,
        tuple(_decode_object(one) for one in message.objects),
        tuple(message.path),
        message.depth,
        message.children,
        message.more_children,
    )


def _encode_chunk(chunk: Chunk) -> pb.Chunk:
    return pb.Chunk(
        key=chunk.key,
        parent=chunk.parent,
        boundary_tokens=chunk.boundary_tokens,
        usable=chunk.usable,
        kinds=chunk.kinds,
        bytes=chunk.size_bytes,
        incomplete=chunk.incomplete,
    )


def _decode_chunk(message: pb.Chunk, tiers: int) -> Chunk:
    check_bytes("key", message.key, KEY_BYTES)
    check_bytes("parent", message.parent, KEY_BYTES)
    check_values("incomplete", message.incomplete, _KINDS)
    check_at_most("incomplete", len(message.incomplete), len(Kind))
    if len(message.kinds) != tiers or len(message.bytes) != tiers:
        raise bad("chunk", f"kinds of {len(message.kinds)} and bytes of {len(message.bytes)} tiers, not of {tiers}")
    for kinds in message.kinds:
        check_values("kinds[]", kinds, _KINDS)
        check_at_most("kinds[]", len(kinds), len(Kind))
    return Chunk(
        key=message.key,
        parent=message.parent,
        boundary_tokens=message.boundary_tokens,
        usable=message.usable,
        kinds=tuple(message.kinds),
        size_bytes=tuple(message.bytes),
        incomplete=message.incomplete,
    )


def _encode_object(found: ObjectDescription) -> pb.StoredObject:
    return pb.StoredObject(
        tier=found.tier,
        kind=found.kind,
        bytes=found.size_bytes,
        state=found.state,
        checksum=found.checksum,
        stored_bytes=found.stored_bytes,
        sequence=found.sequence,
        generation=found.generation,
        extents=found.extents,
        loans=[
            pb.Loan(engine_id=loan.engine_id, pids=loan.pids, mode=loan.mode, lease_id=loan.lease_id)
            for loan in found.loans
        ],
        pinned=found.pinned,
    )


def _decode_object(message: pb.StoredObject) -> ObjectDescription:
    check_text("state", message.state, _STATE_BYTES_MAX)
    check_at_most("loans", len(message.loans), LOANS_MAX)
    if message.checksum:
        check_bytes("checksum", message.checksum, _SUM_BYTES)
    return ObjectDescription(
        tier=_tier(message.tier),
        kind=_kind(message.kind),
        size_bytes=message.bytes,
        state=message.state,
        checksum=message.checksum,
        stored_bytes=message.stored_bytes,
        sequence=message.sequence,
        generation=message.generation,
        extents=message.extents,
        loans=tuple(_decode_loan(loan) for loan in message.loans),
        pinned=message.pinned,
    )


def _decode_loan(message: pb.Loan) -> LoanDescription:
    check_text("engine_id", message.engine_id, limits.ENGINE_ID_BYTES_MAX)
    check_text("mode", message.mode, _STATE_BYTES_MAX)
    check_at_most("pids", len(message.pids), _PIDS_MAX)
    return LoanDescription(message.engine_id, tuple(message.pids), message.mode, message.lease_id)


def _tiers(names: Iterable[str]) -> tuple[str, ...]:
    tiers = tuple(_tier(name) for name in names)
    check_at_most("tiers", len(tiers), _TIERS_MAX)
    return tiers


def _tier(name: str) -> str:
    check_text("tier", name, _TIER_BYTES_MAX)
    return name


def _kind(value: int) -> int:
    if value not in _KINDS:
        raise bad("kind", f"{value} is none of {list(_KINDS)}")
    return value
