"""How a call is answered: decode, ask, encode; every refusal becomes a status in one place."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from kvdepot.core.errors import KvDepotError
from kvdepot.proto.status import to_status

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


async def answer(context: Context, log: logging.Logger, run: Callable[[], Reply]) -> Reply:
    """Run one call on the loop's thread; a domain error ends it with its status."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001
        await refuse(context, domain_error(error, log))


async def answer_when_done(context: Context, log: logging.Logger, run: Callable[[], Awaitable[Reply]]) -> Reply:
    """Likewise for a call that waits, for a file or for many slices of work."""
    try:
        return await run()
    except Exception as error:  # noqa: BLE001
        await refuse(context, domain_error(error, log))


def domain_error(error: Exception, log: logging.Logger) -> KvDepotError:
    """Any other error is a bug: the caller gets a clean INTERNAL, the log the traceback, the daemon stays up."""
    if isinstance(error, KvDepotError):
        return error
    log.error("call failed", exc_info=error)
    return KvDepotError("the daemon failed on this call")


async def refuse(context: Context, error: KvDepotError) -> NoReturn:
    status, details, metadata = to_status(error)
    await context.abort(status, details, metadata)
    raise AssertionError("abort returned")
