"""A call of an operator with many replies ends with the right to it, however open its connection is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvdepot.core.control import VerifyCall, VerifyReply
from kvdepot.core.traces import RecordTraceCall, TracePart
from kvdepot.proto.methods import CONTROL, OPERATOR
from kvdepot.server.config.operators import Operators, resolve
from kvdepot.server.platform.audit_log import AuditLog
from kvdepot.server.platform.peers import Peer
from kvdepot.server.rpc.operator_calls import OperatorCalls
from kvdepot.server.rpc.service import operators_service

LOG = logging.getLogger("tests.audit")
ADMIN, READER, NOBODY = resolve(["61001"], ()), resolve((), ["61001"]), resolve((), ())


@pytest.mark.requirement("S3")
@pytest.mark.parametrize(
    ("name", "before", "after", "ends"),
    [
        ("RecordTrace", READER, NOBODY, True),
        ("RecordTrace", ADMIN, READER, False),
        ("Verify", ADMIN, READER, True),
        ("Verify", ADMIN, NOBODY, True),
    ],
)
def test_a_reload_takes_the_right_away_from_a_stream_that_is_open(
    name: str, before: Operators, after: Operators, ends: bool, tmp_path: Path
) -> None:
    audit = tmp_path / "audit"
    methods = OPERATOR if name in OPERATOR else CONTROL
    method = methods[name]
    request = method.call.encode(RecordTraceCall() if name in OPERATOR else VerifyCall(1)).SerializeToString()
    closed: list[str] = []

    async def replies(_: object) -> AsyncIterator[TracePart | VerifyReply]:
        try:
            while True:
                yield TracePart() if name in OPERATOR else VerifyReply(())
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def read(stream: Any, count: int) -> str:
        try:
            for _ in range(count):
                await stream.read()
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return ""

    async def run() -> str:
        peer = Peer(7, 61001, 61001, frozenset({61001}))
        calls = OperatorCalls(lambda _: peer, before, AuditLog(str(audit), LOG, lambda _: None))
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((operators_service(methods, dict.fromkeys(methods, replies), calls, LOG),))
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
                path = f"/{method.descriptor.containing_service.full_name}/{name}"
                stream = channel.unary_stream(path, None, None)(request)
                assert await read(stream, 1) == ""
                calls.operators = after
                return await asyncio.wait_for(read(stream, 2_000), 60.0)
        finally:
            await server.stop(None)

    assert asyncio.run(run()) == ("PERMISSION_DENIED" if ends else "")
    assert closed == [name], "what it did has ended"
    if ends:
        assert [json.loads(line)["outcome"] for line in audit.read_text().splitlines()] == [
            "started", "permission_denied",
        ]  # fmt: skip
