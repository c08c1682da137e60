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


async def watched(path: Path) -> list[list[int]]:
    """What a watch of a service that is there is told, and one of a service that is not, until the stop."""
    listener = GrpcListener((), ENGINES, sockets=1)
    await listener.listen([path], 0o600, -1)
    async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = (ENGINES[0], "no such service")
        calls = [stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=patient(30)) for name in names]
        told = [[(await call.read()).status] for call in calls]
        await listener.set_serving(True)
        told[0].append((await calls[0].read()).status)
        calls[0].cancel()  # else the stop gives it all of its time
        await listener.stop(patient(30))
        assert not isinstance(await calls[1].read(), STATUS), "it has ended: it would hold up the stop"
    return told


def test_a_watch_is_told_of_each_change_and_ends_with_the_daemon() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        told = asyncio.run(watched(Path(folder, "d.sock")))
    assert told == [[STATUS.NOT_SERVING, STATUS.SERVING], [STATUS.SERVICE_UNKNOWN]]
