"""The operator's calls: pages put together, prefixes turned into whole ids, refusals into kvdepot's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.core.errors import InvalidArgument, KvDepotError, NotFound
from kvdepot.core.listing import (
    PREFIX_DIGITS_MAX,
    Chunk,
    ChunkDescription,
    ChunkPage,
    NamespaceContents,
    NamespaceDescription,
    NamespacePage,
    prefix_range,
)
from kvdepot.proto import codec_listing
from kvdepot.proto.status import CODE_KEY, from_status
from kvdepot.proto.v1 import depot_pb2_grpc

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint

_CANDIDATES_SHOWN: Final = 8

Reply = TypeVar("Reply")


@contextmanager
def connect(endpoint: Endpoint, timeout_seconds: float) -> Iterator[Operator]:
    """`timeout_seconds` is each call's."""
    with grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS) as channel:
        yield Operator(depot_pb2_grpc.OperatorStub(channel), timeout_seconds)  # type: ignore[no-untyped-call]


class Operator:
    """All methods raise NotFound, InvalidArgument, or grpc.RpcError when the daemon does not answer."""

    def __init__(self, stub: Any, timeout_seconds: float) -> None:
        self._stub = stub
        self._timeout_seconds = timeout_seconds

    def namespaces(self, prefix: str, limit: int, cursor: str = "") -> NamespacePage:
        """At most `limit`, and where to go on."""
        found: list[NamespaceContents] = []
        while len(found) < limit:
            request = codec_listing.encode_list_contents(prefix, limit - len(found), cursor)
            page = codec_listing.decode_namespace_page(self._call(self._stub.ListContents, request))
            found += page.namespaces
            cursor = page.next_token
            if not cursor:
                break
        return NamespacePage(tuple(found), cursor)

    def chunks(self, namespace_id: bytes, prefix: str, limit: int, cursor: str = "") -> ChunkPage:
        """At most `limit`, and where to go on."""
        found: list[Chunk] = []
        tiers: tuple[str, ...] = ()
        while len(found) < limit:
            request = codec_listing.encode_list_chunks(namespace_id, prefix, limit - len(found), cursor)
            page = codec_listing.decode_chunk_page(self._call(self._stub.ListChunks, request))
            found += page.chunks
            tiers, cursor = page.tiers, page.next_token
            if not cursor:
                break
        return ChunkPage(tiers, tuple(found), cursor)

    def describe_namespace(self, namespace_id: bytes) -> NamespaceDescription:
        request = codec_listing.encode_describe_namespace(namespace_id)
        return codec_listing.decode_namespace_description(self._call(self._stub.DescribeNamespace, request))

    def describe_chunk(self, namespace_id: bytes, key: bytes) -> ChunkDescription:
        request = codec_listing.encode_describe_chunk(namespace_id, key)
        return codec_listing.decode_chunk_description(self._call(self._stub.DescribeChunk, request))

    # Names

    def find_namespace(self, prefix: str) -> bytes:
        """The one id that begins with these digits. Raises NotFound or InvalidArgument, naming candidates."""
        prefix = _digits("NAMESPACE", prefix)
        found = self.namespaces(prefix, _CANDIDATES_SHOWN + 1).namespaces
        if len(found) == 1:
            return found[0].namespace_id
        if found:
            raise _ambiguous("namespaces", prefix, [_named(one) for one in found])
        others = [_named(one) for one in self.namespaces("", _CANDIDATES_SHOWN + 1).namespaces]
        raise NotFound(
            f"no namespace begins with {prefix}", advice=f"there are {_some(others)}" if others else "there is none"
        )

    def find_chunk(self, namespace_id: bytes, prefix: str) -> bytes:
        """The one key that begins with these digits. Raises NotFound or InvalidArgument, naming candidates."""
        prefix = _digits("KEY", prefix)
        if len(prefix) == PREFIX_DIGITS_MAX:
            return bytes.fromhex(prefix)
        found = self.chunks(namespace_id, prefix, _CANDIDATES_SHOWN + 1).chunks
        if len(found) == 1:
            return found[0].key
        if found:
            raise _ambiguous("chunks", prefix, [chunk.key.hex() for chunk in found])
        shown = namespace_id.hex()[:12]
        raise NotFound(
            f"no chunk of namespace {shown} begins with {prefix}",
            advice=f"`kvdepotctl ls {shown}` shows what there is",
        )

    def _call(self, method: Callable[..., Reply], request: object) -> Reply:
        try:
            return method(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            metadata = [(entry.key, entry.value) for entry in error.trailing_metadata() or ()]
            if CODE_KEY in dict(metadata):
                raise from_status(error.code(), error.details(), metadata) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise KvDepotError(
                    "this kvdepotd does not know the call", advice="upgrade it: it is older than kvdepotctl"
                ) from None
            raise


def _digits(what: str, text: str) -> str:
    text = text.lower()
    if not text:
        raise InvalidArgument(f"{what} is empty", advice="give at least one hexadecimal digit")
    prefix_range(what, text)
    return text


def _named(namespace: NamespaceContents) -> str:
    shown = namespace.namespace_id.hex()[:12]
    return f"{shown} ({namespace.label})" if namespace.label else shown


def _some(names: list[str]) -> str:
    more = " and more" if len(names) > _CANDIDATES_SHOWN else ""
    return ", ".join(names[:_CANDIDATES_SHOWN]) + more


def _ambiguous(what: str, prefix: str, names: list[str]) -> InvalidArgument:
    return InvalidArgument(f"several {what} begin with {prefix}", advice=f"give more digits of one of {_some(names)}")
