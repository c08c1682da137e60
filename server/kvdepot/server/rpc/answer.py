"""How a call is answered: decode, ask, encode; every refusal becomes a status in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NoReturn, TypeVar

import grpc
from kvdepot.core.errors import KvDepotError
from kvdepot.proto.status import to_status

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


class Settled(Generic[Reply]):
    """An answer that the engine gives later, or at once; a caller that went away does not hear it."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def settle(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


async def answer(context: Context, log: logging.Logger, run: Callable[[], Reply]) -> Reply:
    """Run one call on the loop's thread; a domain error ends it with its status."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001
        await _refuse(context, log, error)


async def answer_when_done(context: Context, log: logging.Logger, run: Callable[[], Awaitable[Reply]]) -> Reply:
    """Likewise for a call that waits, for a file or for many slices of work."""
    try:
        return await run()
    except Exception as error:  # noqa: BLE001
        await _refuse(context, log, error)


async def _refuse(context: Context, log: logging.Logger, error: Exception) -> NoReturn:
    """Any other error is a bug: the caller gets a clean INTERNAL, the log the traceback, the daemon stays up."""
    if not isinstance(error, KvDepotError):
        log.error("call failed", exc_info=error)
        error = KvDepotError("the daemon failed on this call")
    status, details, metadata = to_status(error)
    await context.abort(status, details, metadata)
    raise AssertionError("abort returned")
