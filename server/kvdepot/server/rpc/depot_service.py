"""The engines' calls over gRPC."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kvdepot.core.errors import KvDepotError
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc
from kvdepot.server.metric_families import METHODS
from kvdepot.server.rpc.answer import Context, refuse
from kvdepot.server.rpc.depot_calls import DepotCalls


class DepotService(pb_grpc.DepotServicer):
    """Every method of the service."""

    def __init__(self, calls: DepotCalls) -> None:
        self._calls = calls
        for method in METHODS:
            setattr(self, method, partial(self._answer, method))

    async def _answer(self, method: str, request: Any, context: Context) -> Any:
        settled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(answer: Any) -> None:
            if not settled.done():  # its caller has not gone
                settled.set_result(answer)

        self._calls.start(method, request, done)
        try:
            answer = await settled
        except asyncio.CancelledError:
            self._calls.abandoned()
            raise
        if isinstance(answer, KvDepotError):
            await refuse(context, answer)
        return answer
