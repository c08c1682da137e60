"""Health and reflection as gRPC's own packages serve them, but with our refusal of what is no message.

gRPC answers such bytes with UNKNOWN "DecodeError", and the catalogue of errors does not have that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import _async as reflection_aio
from grpc_reflection.v1alpha import reflection_pb2_grpc
from kvdepot.core.bounds import bad
from kvdepot.server.rpc.answer import Context, refuse
from kvdepot.server.rpc.service import Service

_SERVED: Final = frozenset({"Check", "Watch", "ServerReflectionInfo"})
"""The packages declare more (`List`), and have no behaviour for it: a call would leave a traceback in the log."""
Handler = Any
"""grpc.RpcMethodHandler; its stubs know no behaviour of an aio server."""


def standard_services(health: object, names: Sequence[str]) -> tuple[Service, ...]:
    """Return the services of a health servicer, and of reflection about `names`."""
    generated = _Generated()
    health_pb2_grpc.add_HealthServicer_to_server(health, generated)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection_aio.ReflectionServicer(names), generated)
    return tuple(
        grpc.method_handlers_generic_handler(
            service, {name: _refusing(f"{service}/{name}", handlers[name]) for name in _SERVED & handlers.keys()}
        )
        for service, handlers in generated.services.items()
    )


class _Generated:
    """What the generated code takes for a server."""

    def __init__(self) -> None:
        self.services: dict[str, Mapping[str, Handler]] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: the same handlers come with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self.services[service] = handlers


def _refusing(method: str, handler: Handler) -> Handler:
    """Return the handler with a behaviour that gets bytes, and refuses what its message cannot be."""
    parse: Callable[[bytes], Any] = handler.request_deserializer

    async def answer(data: bytes, context: Context) -> Any:
        try:
            request = parse(data)
        except DecodeError:
            await _refuse(method, len(data), context)
        return await (handler.unary_stream if handler.response_streaming else handler.unary_unary)(request, context)

    async def answer_each(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async for data in requests:
            try:
                request = parse(data)
            except DecodeError:
                await _refuse(method, len(data), context)
            async for reply in handler.stream_stream(_one(request), context):
                yield reply

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(answer_each, None, handler.response_serializer)
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(answer, None, handler.response_serializer)


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


async def _refuse(method: str, length: int, context: Context) -> NoReturn:
    await refuse(context, bad("message", f"its {length} bytes are no request of {method}"))
