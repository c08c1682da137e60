"""The operators' calls: adapt, never decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvdepot.core.errors import InvalidArgument
from kvdepot.core.report import DaemonStatus, NamespaceStatus
from kvdepot.proto import codec_listing, codec_records, codec_report, codec_trace
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc
from kvdepot.server.engine.listing import Listing
from kvdepot.server.engine.records import Records
from kvdepot.server.rpc.answer import Context, answer, answer_when_done

PAGE_SIZE_MAX = 64
"""Namespaces a page."""
_TRACE_SECONDS = 0.5
PAGE_BYTES_MAX = 2 << 20
"""An identity has some 50 KiB, at most 1 MiB, and a message 4 MiB: a page ends with the namespace that passes this."""


class OperatorService(pb_grpc.OperatorServicer):
    def __init__(
        self, status: Callable[[], DaemonStatus], listing: Listing, records: Records, log: logging.Logger
    ) -> None:
        self._status = status
        self._listing = listing
        self._records = records
        self._log = log

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:  # noqa: N802, ARG002
        """Without the identities of the namespaces, which `ListNamespaces` pages through."""

        def run() -> pb.GetStatusResponse:
            status = self._status()
            brief = tuple(replace(namespace, identity={}) for namespace in status.namespaces)
            return codec_report.encode_status(replace(status, namespaces=brief))

        return await answer(context, self._log, run)

    async def ListNamespaces(  # noqa: N802
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> pb.ListNamespacesResponse:
        def run() -> pb.ListNamespacesResponse:
            namespaces = sorted(self._status().namespaces, key=lambda one: one.namespace_id)
            after = _token(request.page_token)
            rest = [one for one in namespaces if one.namespace_id > after]
            page = _page(rest[: min(request.page_size or PAGE_SIZE_MAX, PAGE_SIZE_MAX)])
            return pb.ListNamespacesResponse(
                namespaces=page, next_page_token=page[-1].namespace.hex() if len(page) < len(rest) else ""
            )

        return await answer(context, self._log, run)

    async def ListContents(  # noqa: N802
        self, request: pb.ListContentsRequest, context: Context
    ) -> pb.ListContentsResponse:
        def run() -> pb.ListContentsResponse:
            page = self._listing.namespaces(*codec_listing.decode_list_contents(request))
            return codec_listing.encode_namespace_page(page)

        return await answer(context, self._log, run)

    async def ListChunks(self, request: pb.ListChunksRequest, context: Context) -> pb.ListChunksResponse:  # noqa: N802
        def run() -> pb.ListChunksResponse:
            page = self._listing.chunks(*codec_listing.decode_list_chunks(request))
            return codec_listing.encode_chunk_page(page)

        return await answer(context, self._log, run)

    async def DescribeNamespace(  # noqa: N802
        self, request: pb.DescribeNamespaceRequest, context: Context
    ) -> pb.DescribeNamespaceResponse:
        def run() -> pb.DescribeNamespaceResponse:
            description = self._listing.describe_namespace(codec_listing.decode_describe_namespace(request))
            return codec_listing.encode_namespace_description(description)

        return await answer(context, self._log, run)

    async def DescribeChunk(  # noqa: N802
        self, request: pb.DescribeChunkRequest, context: Context
    ) -> pb.DescribeChunkResponse:
        def run() -> pb.DescribeChunkResponse:
            description = self._listing.describe_chunk(*codec_listing.decode_describe_chunk(request))
            return codec_listing.encode_chunk_description(description)

        return await answer(context, self._log, run)

    async def ExplainRequest(  # noqa: N802
        self, request: pb.ExplainRequestRequest, context: Context
    ) -> pb.ExplainRequestResponse:
        def run() -> pb.ExplainRequestResponse:
            return codec_records.encode_records(self._records.explain(codec_records.decode_explain(request)))

        return await answer(context, self._log, run)

    async def RecordTrace(self, request: pb.RecordTraceRequest, context: Context) -> None:  # noqa: N802, ARG002
        async def run() -> None:
            with self._records.traces.recording() as recorder:
                while True:  # until gRPC cancels it, because the caller is gone or the daemon stops
                    part = recorder.take()
                    await context.write(codec_trace.encode_part(part))
                    if not part.requests:
                        await asyncio.sleep(_TRACE_SECONDS)

        await answer_when_done(context, self._log, run)


def _page(namespaces: Iterable[NamespaceStatus]) -> list[pb.NamespaceStatus]:
    """As many of them as a message has room for."""
    page: list[pb.NamespaceStatus] = []
    page_bytes = 0
    for namespace in namespaces:
        page.append(codec_report.encode_namespace_status(namespace))
        page_bytes += page[-1].ByteSize()
        if page_bytes > PAGE_BYTES_MAX:
            break
    return page


def _token(text: str) -> bytes:
    """The id of the last namespace of the page before."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"page_token: {text[:64]!r} is none that was answered") from None
