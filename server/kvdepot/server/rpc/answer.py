"""How a call is answered: decode, ask, encode; every refusal becomes a status in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    except KvDepotError as error:
        await _abort(context, error)
    except Exception:  # a bug: the caller gets a clean INTERNAL, the log gets the traceback, the daemon stays up
        log.exception("call failed")
        await _abort(context, KvDepotError("the daemon failed on this call"))


async def _abort(context: Context, error: KvDepotError) -> NoReturn:
    status, details, metadata = to_status(error)
    await context.abort(status, details, metadata)
    raise AssertionError("abort returned")
