"""gRPC services made from the table of methods: messages are bytes here, and values in the daemon.

So one codec (`kvdepot.proto.codec`) is between the wire and the daemon, on either lane.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from kvdepot.proto.methods import Method
from kvdepot.server.rpc.answer import Context, domain_error, refuse
from kvdepot.server.rpc.operator_calls import OperatorCalls

Service: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"
Handler = Callable[[Any], Any]
"""Gets the call. Returns the reply, to be awaited; or an async generator of replies, closed when the caller goes."""


def service(
    methods: Mapping[str, Method[Any, Any]], answering: Callable[[Method[Any, Any]], Callable[..., Any]]
) -> Service:
    """Return all methods of one service. `answering` builds what gRPC calls with a request's bytes and its context."""
    handlers = {}
    for name, method in methods.items():
        handler = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        handlers[name] = handler(answering(method), None, None)
    (full_name,) = {method.descriptor.containing_service.full_name for method in methods.values()}
    return grpc.method_handlers_generic_handler(full_name, handlers)


def operators_service(
    methods: Mapping[str, Method[Any, Any]], handlers: Mapping[str, Handler], calls: OperatorCalls, log: logging.Logger
) -> Service:
    """Return a service whose methods are answered by `handlers`, one for each method by name.

    `calls` says who may call them, and writes the audit log.
    """
    assert handlers.keys() == methods.keys()

    def answering(method: Method[Any, Any]) -> Callable[..., Any]:
        handler = handlers[method.name]

        async def answer_one(request: bytes, context: Context) -> bytes:
            try:
                async with calls.call(method, context) as call:
                    return _encoded(method, await handler(call.decode(request)))
            except Exception as error:  # noqa: BLE001 - a refusal, or whatever it is: the caller hears of it
                await refuse(context, domain_error(error, log))

        async def answer_many(request: bytes, context: Context) -> None:
            try:
                async with calls.call(method, context) as call:
                    value = call.decode(request)
                    await calls.started(call)
                    async with aclosing(handler(value)) as replies:
                        async for reply in replies:
                            calls.check(call)
                            await context.write(_encoded(method, reply))
            except Exception as error:  # noqa: BLE001 - as above
                await refuse(context, domain_error(error, log))

        return answer_many if method.streams else answer_one

    return service(methods, answering)


def _encoded(method: Method[Any, Any], reply: Any) -> bytes:
    return method.reply.encode(reply).SerializeToString()  # type: ignore[no-any-return]
