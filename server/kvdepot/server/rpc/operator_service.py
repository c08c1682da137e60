"""Operators' queries: this module adapts calls, and decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.errors import InvalidArgument
from kvdepot.core.listing import (
    CHUNKS_PER_PAGE_MAX,
    NAMESPACES_PER_PAGE_MAX,
    ChunkDescription,
    ChunkPage,
    DescribeChunkCall,
    DescribeNamespaceCall,
    ListChunksCall,
    ListContentsCall,
    NamespaceDescription,
    NamespacePage,
)
from kvdepot.core.records import ExplainCall, ExplainReply, ListRequestsCall, RequestList
from kvdepot.core.report import DaemonStatus, GetStatusCall, ListNamespacesCall, NamespaceStatus, NamespaceStatusPage
from kvdepot.core.traces import RecordTraceCall, TracePart
from kvdepot.proto.codec import codec_of
from kvdepot.proto.methods import OPERATOR
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.server.depot.loads.records import Records
from kvdepot.server.depot.operators.listing import Listing
from kvdepot.server.rpc.operator_calls import OperatorCalls
from kvdepot.server.rpc.service import Service, operators_service

PAGE_SIZE_MAX: Final = 64
"""Namespaces a page."""
_TRACE_SECONDS: Final = 0.5
PAGE_BYTES_MAX: Final = 2 << 20
"""An identity has some 50 KiB, at most 1 MiB, and a message 4 MiB: a page ends with the namespace that passes this."""


class _Operator:
    def __init__(self, status: Callable[[], DaemonStatus], listing: Listing, records: Records) -> None:
        self._status = status
        self._listing = listing
        self._records = records

    async def status(self, _: GetStatusCall) -> DaemonStatus:
        """Return the status without the identities of namespaces, which `ListNamespaces` pages through."""
        status = self._status()
        brief = tuple(replace(namespace, identity={}) for namespace in status.namespaces)
        return replace(status, namespaces=brief)

    async def namespaces(self, call: ListNamespacesCall) -> NamespaceStatusPage:
        namespaces = sorted(self._status().namespaces, key=lambda one: one.namespace_id)
        after = _token(call.page_token)
        rest = [one for one in namespaces if one.namespace_id > after]
        page = _page(rest[: _size(call.page_size, PAGE_SIZE_MAX)])
        return NamespaceStatusPage(page, page[-1].namespace_id.hex() if len(page) < len(rest) else "")

    async def contents(self, call: ListContentsCall) -> NamespacePage:
        size = _size(call.page_size, NAMESPACES_PER_PAGE_MAX)
        return self._listing.namespaces(call.prefix, size, call.page_token)

    async def chunks(self, call: ListChunksCall) -> ChunkPage:
        size = _size(call.page_size, CHUNKS_PER_PAGE_MAX)
        return self._listing.chunks(call.namespace_id, call.prefix, size, call.page_token)

    async def describe_namespace(self, call: DescribeNamespaceCall) -> NamespaceDescription:
        return self._listing.describe_namespace(call.namespace_id)

    async def describe_chunk(self, call: DescribeChunkCall) -> ChunkDescription:
        return self._listing.describe_chunk(call.namespace_id, call.key)

    async def explain(self, call: ExplainCall) -> ExplainReply:
        return ExplainReply(self._records.explain(call.request_id))

    async def requests(self, call: ListRequestsCall) -> RequestList:
        return RequestList(self._records.latest(call.last, misses=call.misses))

    async def trace(self, _: RecordTraceCall) -> AsyncGenerator[TracePart, None]:
        with self._records.traces.recording() as recorder:
            while True:  # until it is closed, because the caller is gone or the daemon stops
                part = recorder.take()
                yield part
                if not part.requests:
                    await asyncio.sleep(_TRACE_SECONDS)


def operator_service(
    status: Callable[[], DaemonStatus], listing: Listing, records: Records, calls: OperatorCalls, log: logging.Logger
) -> Service:
    """Return the handlers of service Operator."""
    operator = _Operator(status, listing, records)
    handlers: dict[str, Callable[..., Any]] = {
        "GetStatus": operator.status,
        "ListNamespaces": operator.namespaces,
        "ListContents": operator.contents,
        "ListChunks": operator.chunks,
        "DescribeNamespace": operator.describe_namespace,
        "DescribeChunk": operator.describe_chunk,
        "ExplainRequest": operator.explain,
        "RecordTrace": operator.trace,
        "ListRequests": operator.requests,
    }
    return operators_service(OPERATOR, handlers, calls, log)


def _size(wanted: int, maximum: int) -> int:
    """Return the number of entries of a page. 0: the maximum."""
    return min(wanted or maximum, maximum)


def _page(namespaces: Iterable[NamespaceStatus]) -> tuple[NamespaceStatus, ...]:
    """Return as many namespaces as a message has room for."""
    codec = codec_of(NamespaceStatus, pb.NamespaceStatus)
    page: list[NamespaceStatus] = []
    page_bytes = 0
    for namespace in namespaces:
        page.append(namespace)
        page_bytes += codec.encode(namespace).ByteSize()
        if page_bytes > PAGE_BYTES_MAX:
            break
    return tuple(page)


def _token(text: str) -> bytes:
    """Return the id of the last namespace of the previous page."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"page_token: {text[:64]!r} is none that was answered") from None
