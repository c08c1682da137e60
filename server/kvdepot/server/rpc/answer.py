"""The answer of a failed call: this is the one place that turns errors into statuses."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
from kvdepot.core.errors import KvDepotError
from kvdepot.proto.status import to_status

Context = grpc.aio.ServicerContext[Any, Any]


def domain_error(error: Exception, log: logging.Logger) -> KvDepotError:
    """Return the error to answer with. Any other error is a bug: the caller gets INTERNAL, the log a traceback."""
    if isinstance(error, KvDepotError):
        return error
    log.error("call failed", exc_info=error)
    return KvDepotError("the daemon failed on this call")


async def refuse(context: Context, error: KvDepotError) -> NoReturn:
    status, details, metadata = to_status(error)
    await context.abort(status, details, metadata)
    raise AssertionError("abort returned")
