"""Random bytes to every method: each call gets an answer or an error of the catalogue, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from kvdepot.core.errors import InvalidArgument, KvDepotError
from kvdepot.proto.methods import BY_CALL
from kvdepot.proto.status import RefusedByDaemon, from_status

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.operators import methods
from tests.rigs.patience import patient
from tests.rigs.raw_client import CALL_SECONDS, CHUNK_TOKENS, RawEngine, dense_spec, keys_of, payload_of, status_of
from tests.rigs.seeds import drawn

_METHODS: Final[dict[str, MethodDescriptor]] = {
    f"/{method.containing_service.full_name}/{method.name}": method
    for method in (
        *(method.descriptor for method in BY_CALL.values()),
        *health_pb2.DESCRIPTOR.services_by_name["Health"].methods,
        *reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods,
    )
    if method.full_name != "grpc.health.v1.Health.List"  # not served
}
_OF_OPERATORS: Final = [*methods()]
_ENDS_THE_RUN: Final = "/kvdepot.v1.Control/SetDraining"
"""Whatever a message of it says, an honest engine may have to stop storing."""
_CALLS: Final = 100
"""Of each method."""


@pytest.fixture(scope="module")
def channels(daemon: DaemonProcess) -> Iterator[tuple[grpc.Channel, grpc.Channel]]:
    """Yield a channel of engines, and one of operators."""
    with (
        grpc.insecure_channel(f"unix:{daemon.socket}") as engines,
        grpc.insecure_channel(f"unix:{daemon.admin_socket}") as operators,
    ):
        yield engines, operators


def _first_answer(channels: tuple[Any, Any], path: str, data: bytes) -> KvDepotError | None:
    """Call a method with bytes. Return its refusal, or None for an answer."""
    method = _METHODS[path]
    channel = channels[method in _OF_OPERATORS]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path, None, None)
    try:
        answer = call(iter([data]) if method.client_streaming else data, timeout=patient(CALL_SECONDS))
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        metadata = [(entry.key, entry.value) for entry in error.trailing_metadata()]
        return from_status(error.code(), error.details(), metadata)
    return None


@pytest.mark.parametrize("path", list(_METHODS))
def test_bytes_that_are_no_message_are_an_invalid_argument(
    channels: tuple[grpc.Channel, grpc.Channel], path: str
) -> None:
    refusal = _first_answer(channels, path, b"\xff" * 9)
    assert isinstance(refusal, InvalidArgument), refusal
    assert "its 9 bytes are no" in refusal.message


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("seed", drawn(range(1)))
def test_random_bytes_get_answers_of_the_catalogue_and_harm_nobody(
    daemon: DaemonProcess, channels: tuple[grpc.Channel, grpc.Channel], seed: int
) -> None:
    random, keys = Random(seed), keys_of(f"fuzz {seed}", 2)
    with RawEngine(daemon.socket, "honest") as engine:
        engine.store(keys)
        tokens = [engine.session, engine.namespace]
        for path in random.sample(sorted(_METHODS.keys() - {_ENDS_THE_RUN}), len(_METHODS) - 1):
            for _ in range(_CALLS):
                refusal = _first_answer(channels, path, _drawn_bytes(random, tokens))
                if isinstance(refusal, RefusedByDaemon):  # of gRPC's own protocol
                    assert (path, refusal.status.name) == ("/grpc.health.v1.Health/Check", "NOT_FOUND"), refusal
                    continue
                assert refusal is None or refusal.code != "internal", f"{path}: {refusal}"
        assert engine.status().ready
    assert "Traceback" not in daemon.log and "call failed" not in daemon.log
    spec = replace(dense_spec("next"), bumps=status_of(daemon.socket).epochs.bump)  # a bump of all is an empty message
    with RawEngine(daemon.socket, "next", spec=spec) as engine:
        again = keys_of(f"next {seed}", 2)
        engine.store(again)
        assert engine.locate(again) == 2 * CHUNK_TOKENS
        assert engine.load(again) == [payload_of(key) for key in again]


def _drawn_bytes(random: Random, tokens: list[bytes]) -> bytes:
    """Return bytes without a form, or fields of a message with anything in them."""
    if random.random() < 0.3:
        return random.randbytes(random.randrange(64))
    fields = []
    for _ in range(random.randrange(6)):
        number, kind = random.randrange(1, 12), random.choice((0, 1, 2, 2, 2, 5))
        if kind == 2:
            value = random.choice([*tokens, b"", random.randbytes(16), random.randbytes(random.randrange(40))])
            body = bytes([len(value)]) + value
        else:
            body = {0: bytes([random.randrange(128)]), 1: random.randbytes(8), 5: random.randbytes(4)}[kind]
        fields.append(bytes([number << 3 | kind]) + body)
    return b"".join(fields)
