"""The engines' calls over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvdepot.core.errors import KvDepotError
from kvdepot.proto.methods import DEPOT, Method
from kvdepot.server.rpc.answer import Context, refuse
from kvdepot.server.rpc.depot_calls import DepotCalls
from kvdepot.server.rpc.service import Service, service


def depot_service(calls: DepotCalls) -> Service:
    """Return the handlers of service Depot."""

    def answering(method: Method[Any, Any]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        return partial(answer_call, calls, method)

    return service(DEPOT, answering)


async def answer_call(calls: DepotCalls, method: Method[Any, Any], request: bytes, context: Context) -> bytes:
    """Make one call with the bytes of its request. A caller that goes cancels this."""
    settled: asyncio.Future[bytes | KvDepotError] = asyncio.get_running_loop().create_future()

    def done(answer: bytes | KvDepotError) -> None:
        if not settled.done():  # its caller has not gone
            settled.set_result(answer)

    calls.start(method, request, done)
    try:
        answer = await settled
    except asyncio.CancelledError:
        calls.abandoned()
        raise
    if isinstance(answer, KvDepotError):
        await refuse(context, answer)
    return answer
