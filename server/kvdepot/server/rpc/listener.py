"""A gRPC server: services, health, reflection and its unix sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from kvdepot.core import limits
from kvdepot.proto.methods import CONTROL, DEPOT, OPERATOR, Method
from kvdepot.server.platform.grpc_guards import address, connections_max, guards
from kvdepot.server.rpc.service import Service
from kvdepot.server.rpc.standard_services import standard_services

_STREAMS_MAX = 256
"""Calls in flight a connection; further ones wait at the client."""
_OPTIONS = (
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", _STREAMS_MAX),
    ("grpc.so_reuseport", 0),
)


def _names(*services: Mapping[str, Method[Any, Any]]) -> tuple[str, ...]:
    return tuple(next(iter(methods.values())).descriptor.containing_service.full_name for methods in services)


ENGINES: Final = _names(DEPOT)
"""Services of the engines' sockets."""
OPERATORS: Final = _names(OPERATOR, CONTROL)
"""Services of the operators' sockets."""


class _Health(health_aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """A watch of a service that has no health has no end of its own: a stop ends it, or would wait for its grace."""

    def __init__(self, services: Sequence[str]) -> None:
        super().__init__()
        self._services = services
        self._stopped = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        if request.service in self._services:
            await super().Watch(request, context)
        else:
            await context.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))
            await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


class GrpcListener:
    """Owns a grpc.aio server. The caller holds the lock of every socket path."""

    def __init__(self, services: Sequence[Service], names: Sequence[str], *, sockets: int) -> None:
        """`names`: the full names of the services, for health and reflection."""
        self._server = grpc.aio.server(options=(*_OPTIONS, *guards(connections_max(sockets))))
        self._names = ("", *names)
        self._health = _Health(self._names)
        shown = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._server.add_generic_rpc_handlers((*services, *standard_services(self._health, shown)))

    async def listen(self, paths: Sequence[Path], mode: int, group_id: int) -> None:
        """Bind, give the socket files mode and group, and serve. Raises OSError.

        The process's umask keeps other users out until the mode is set.
        """
        for path in paths:
            path.unlink(missing_ok=True)
            try:
                self._server.add_insecure_port(address(path))
            except RuntimeError as error:
                raise OSError(f"cannot listen on {path}: {error}") from error
        await self.set_serving(False)  # or the health of "" is good from the first call on
        await self._server.start()
        for path in paths:
            os.chown(path, -1, group_id)
            path.chmod(mode)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._names:
            await self._health.set(service, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and give calls in flight `grace_seconds` to end."""
        self._health.stop()
        await self._server.stop(grace_seconds)
