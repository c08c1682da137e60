"""The operators' calls: adapt, never decide."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvdepot.core.errors import InvalidArgument
from kvdepot.core.report import DaemonStatus
from kvdepot.proto import codec_report
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc
from kvdepot.server.rpc.answer import Context, answer

PAGE_SIZE_MAX = 64
"""Namespaces a page: an identity has some 100 KiB, a message 4 MiB."""


class OperatorService(pb_grpc.OperatorServicer):
    def __init__(self, status: Callable[[], DaemonStatus], log: logging.Logger) -> None:
        self._status = status
        self._log = log

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:  # noqa: N802, ARG002
        return await answer(context, self._log, lambda: codec_report.encode_status(self._status()))

    async def ListNamespaces(  # noqa: N802
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> pb.ListNamespacesResponse:
        def run() -> pb.ListNamespacesResponse:
            namespaces = sorted(self._status().namespaces, key=lambda one: one.namespace_id)
            after = _token(request.page_token)
            rest = [one for one in namespaces if one.namespace_id > after]
            page = rest[: min(request.page_size or PAGE_SIZE_MAX, PAGE_SIZE_MAX)]
            return pb.ListNamespacesResponse(
                namespaces=[codec_report.encode_namespace_status(one) for one in page],
                next_page_token=page[-1].namespace_id.hex() if len(page) < len(rest) else "",
            )

        return await answer(context, self._log, run)


def _token(text: str) -> bytes:
    """The id of the last namespace of the page before."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"page_token: {text[:64]!r} is none that was answered") from None
