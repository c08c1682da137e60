"""The health of gRPC's listener before anybody has told it."""

import asyncio
import tempfile
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvdepot.server.rpc.listener import ENGINES, GrpcListener

from tests.rigs.patience import patient

STATUS = health_pb2.HealthCheckResponse


async def statuses(path: Path, told: bool | None) -> set[int]:
    listener = GrpcListener((), ENGINES, sockets=1)
    await listener.listen([path], 0o600, -1)
    if told is not None:
        await listener.set_serving(told)
    try:
        async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            requests = [health_pb2.HealthCheckRequest(service=service) for service in ("", *ENGINES)]
            return {(await stub.Check(request, timeout=patient(30))).status for request in requests}
    finally:
        await listener.stop(0)


def test_nothing_is_served_before_it_is_told() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        path = Path(folder, "d.sock")
        assert asyncio.run(statuses(path, None)) == {STATUS.NOT_SERVING}
        assert asyncio.run(statuses(path, True)) == {STATUS.SERVING}
