"""How long calls take and how they fail, around the methods of a service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from kvdepot.server.engine.counters import Counters
from kvdepot.server.rpc.answer import Context

_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
_Method = Callable[[Any, Context], Awaitable[Any]]


def measure(service: object, methods: Iterable[str], counters: Counters) -> None:
    """Count every call of these methods from now on: `call_seconds.METHOD`, and `failed_calls.CODE`."""
    for name in methods:
        setattr(service, name, _measured(name, getattr(service, name), counters))


def _measured(name: str, method: _Method, counters: Counters) -> _Method:
    async def run(request: Any, context: Context) -> Any:
        began = time.monotonic()
        try:
            return await method(request, context)
        except asyncio.CancelledError:
            counters.add("failed_calls.CANCELLED")
            raise
        except BaseException:
            counters.add(f"failed_calls.{_code_name(context)}")
            raise
        finally:
            counters.observe(f"call_seconds.{name}", time.monotonic() - began)

    return run


def _code_name(context: Context) -> str:
    """What the call was aborted with; grpc.aio keeps it as a number."""
    code: object = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _NAMES.get(number, "UNKNOWN") if number else "UNKNOWN"
