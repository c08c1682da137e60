"""The gRPC socket: refusals carry code, advice and retry; health, reflection, metrics answer; nothing kills it."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from kvdepot.core import errors, limits
from kvdepot.core.calls import CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.registration import RegisterCall
from kvdepot.proto.methods import encode
from kvdepot.proto.status import from_status
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc
from kvdepot.server.observe.metric_families import FAMILIES

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient
from tests.rigs.raw_client import CALL_SECONDS, CHUNK_TOKENS, RawEngine, dense_spec, keys_of, payload_of, status_of


@pytest.fixture(scope="module")
def engine(daemon: DaemonProcess) -> Iterator[RawEngine]:
    with RawEngine(daemon.socket, "rpc") as attached:
        yield attached


def _refusal(call: Callable[[], object]) -> errors.KvDepotError:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    metadata = [(entry.key, entry.value) for entry in raised.value.trailing_metadata()]
    return from_status(raised.value.code(), raised.value.details(), metadata)


def test_what_is_stored_comes_back(engine: RawEngine) -> None:
    keys = keys_of("round trip", 3)
    assert engine.locate(keys) == 0
    engine.store(keys)
    assert engine.locate(keys) == 3 * CHUNK_TOKENS
    assert engine.load(keys) == [payload_of(key) for key in keys]


def test_an_unknown_session_is_told_to_attach(engine: RawEngine) -> None:
    request = pb.LocateRequest(session=os.urandom(16), namespace_id=engine.namespace)
    error = _refusal(lambda: engine.stub.Locate(request))
    assert isinstance(error, errors.UnknownSession)
    assert "attach first" in error.advice
    assert error.retry is errors.Retry.AFTER_REATTACH


def test_an_unknown_namespace_is_told_to_register(engine: RawEngine) -> None:
    request = pb.LocateRequest(session=engine.session, namespace_id=os.urandom(16))
    assert isinstance(_refusal(lambda: engine.stub.Locate(request)), errors.UnknownNamespace)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("session", b"short", "session: 5 bytes, not 16"),
        ("namespace_id", b"", "namespace_id: 0 bytes, not 16"),
        ("lease_id", 0, "lease_id: 0 is not a lease id"),
        ("keys", b"x" * 17, "keys: 17 bytes are no multiple"),
        ("keys", b"x" * 16 * (limits.OBJECTS_PER_LEASE_MAX + 1), "more than 16384"),
        ("parents", b"x" * 15, "parents: 15 bytes, not 16"),
        ("kinds", b"\x09", "kinds: 9 is none of"),
        ("kinds", b"", "kinds: 0 bytes, not 1"),
        ("boundaries", b"123", "boundaries: 3 bytes, not 4"),
        ("request_id", "r" * (limits.REQUEST_ID_BYTES_MAX + 1), "more than 512"),
    ],
)
def test_malformed_fields_are_named(engine: RawEngine, field: str, value: object, found: str) -> None:
    good: dict[str, Any] = {
        "session": engine.session,
        "lease_id": 1,
        "namespace_id": engine.namespace,
        "keys": b"k" * 16,
        "parents": bytes(16),
        "kinds": bytes([Kind.ATTENTION]),
        "boundaries": CHUNK_TOKENS.to_bytes(4, "little"),
    }
    error = _refusal(lambda: engine.stub.Reserve(pb.ReserveRequest(**{**good, field: value})))
    assert found in error.message
    assert error.retry is errors.Retry.NEVER


def test_oversized_messages_are_refused_and_nothing_is_lost(daemon: DaemonProcess, engine: RawEngine) -> None:
    keys = keys_of("before size", 1)
    engine.store(keys)
    request = pb.LocateRequest(session=engine.session, namespace_id=engine.namespace, keys=bytes(5 << 20))
    with pytest.raises(grpc.RpcError) as raised:
        engine.stub.Locate(request)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limits.MESSAGE_BYTES_MAX) in str(raised.value.details())
    assert engine.locate(keys) == CHUNK_TOKENS


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096]
)
def test_garbage_on_the_grpc_socket_harms_nobody(daemon: DaemonProcess, engine: RawEngine, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(patient(5))
        stranger.connect(str(daemon.socket))
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert engine.status().ready


@pytest.mark.requirement("P2")
def test_a_spec_that_lies_about_sizes_is_refused_with_the_numbers(engine: RawEngine) -> None:
    honest = dense_spec("liar")
    lie = replace(honest, object_bytes={Kind.ATTENTION: honest.object_bytes[Kind.ATTENTION] - 4096})
    register = encode(RegisterCall(engine.session, lie))
    error = _refusal(lambda: engine.stub.RegisterNamespace(register))
    assert isinstance(error, errors.NamespaceRefused)
    assert str(honest.object_bytes[Kind.ATTENTION]) in error.message
    assert str(lie.object_bytes[Kind.ATTENTION]) in error.message
    assert all(namespace.label != "liar" for namespace in engine.status().namespaces)


def test_a_spec_of_an_unknown_kind_is_refused(engine: RawEngine) -> None:
    request = encode(RegisterCall(engine.session, dense_spec("odd")))
    request.spec.groups[0].kind = 9
    error = _refusal(lambda: engine.stub.RegisterNamespace(request))
    assert "groups[0].kind: 9 is none of" in error.message


def test_another_protocol_version_is_told_both_ranges(daemon: DaemonProcess, engine: RawEngine) -> None:
    request = pb.GetCapabilitiesRequest(protocol_min=7, protocol_max=9)
    error = _refusal(lambda: engine.stub.GetCapabilities(request))
    assert isinstance(error, errors.ProtocolMismatch)
    assert "7 to 9" in error.message


def test_capabilities_name_the_arena_and_the_limits(engine: RawEngine) -> None:
    found = engine.stub.GetCapabilities(pb.GetCapabilitiesRequest(protocol_min=1, protocol_max=1))
    assert found.arena_id == engine.reply.arena_id
    assert 0 < found.ready_bytes <= engine.reply.arena_bytes
    assert dict(found.limits) == limits.advertised()


def test_commits_of_unknown_leases_are_lost(engine: RawEngine) -> None:
    assert engine.commit(12345, 2) == [CommitOutcome.LOST, CommitOutcome.LOST]


def test_a_repeated_reserve_repeats_its_answer(engine: RawEngine) -> None:
    keys = keys_of("repeated", 2)
    first = engine.reserve(keys)
    assert set(first[1]) == {ReserveOutcome.GRANTED}
    assert engine.reserve(keys, lease_id=first[0]) == first
    assert set(engine.commit(first[0], 2)) == {CommitOutcome.COMMITTED}


def test_health_and_reflection_answer(engine: RawEngine) -> None:
    beside = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    for channel, own in (
        (engine.channel, {"kvdepot.v1.Depot"}),
        (engine.admin_channel, {"kvdepot.v1.Operator", "kvdepot.v1.Control"}),
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *own):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=patient(CALL_SECONDS))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == own | beside


@pytest.mark.requirement("T4")
def test_a_stop_waits_for_no_watch_of_an_unknown_service() -> None:
    status = health_pb2.HealthCheckResponse
    with DaemonProcess() as process, grpc.insecure_channel(process.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="engine"), timeout=patient(60))
        assert next(watch).status == status.SERVICE_UNKNOWN
        assert process.stop() == 0
        assert list(watch) == []
        assert watch.code() is grpc.StatusCode.OK, "it was ended, not broken off at the end of the grace"


def test_everybody_who_watches_the_health_is_told_of_a_stop() -> None:
    status = health_pb2.HealthCheckResponse
    with DaemonProcess() as process, grpc.insecure_channel(process.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=patient(60)) for _ in range(4)]
        assert [next(watch).status for watch in watches] == [status.SERVING] * 4
        assert process.stop() == 0
        assert [next(watch).status for watch in watches] == [status.NOT_SERVING] * 4


def test_namespaces_are_listed_by_pages(daemon: DaemonProcess, engine: RawEngine) -> None:
    for label in ("page-a", "page-b", "page-c"):
        engine.stub.RegisterNamespace(encode(RegisterCall(engine.session, dense_spec(label))))
    labels, token = [], ""
    while True:
        page = engine.operator.ListNamespaces(pb.ListNamespacesRequest(page_size=2, page_token=token))
        assert len(page.namespaces) <= 2
        labels += [namespace.label for namespace in page.namespaces]
        token = page.next_page_token
        if not token:
            break
    assert {"page-a", "page-b", "page-c", "dense"} <= set(labels)
    assert len(labels) == len(set(labels))
    error = _refusal(lambda: engine.operator.ListNamespaces(pb.ListNamespacesRequest(page_token="no hex")))
    assert "page_token" in error.message


@pytest.mark.requirement("I4")
def test_identities_of_any_size_break_neither_status_nor_listing(engine: RawEngine) -> None:
    for number in range(6):
        spec = replace(dense_spec(f"big-{number}"), identity={"model": f'"{"x" * 900_000}"'})
        engine.stub.RegisterNamespace(encode(RegisterCall(engine.session, spec)))
    labels = {namespace.label for namespace in engine.status().namespaces}
    listed: dict[str, int] = {}
    token = ""
    while True:
        page = engine.operator.ListNamespaces(pb.ListNamespacesRequest(page_token=token))
        listed |= {namespace.label: len(namespace.identity["model"]) for namespace in page.namespaces}
        token = page.next_page_token
        if not token:
            break
    assert listed.keys() == labels
    assert [listed[f"big-{number}"] for number in range(6)] == [900_002] * 6


@pytest.mark.requirement("P10")
def test_metrics_and_health_over_http(daemon: DaemonProcess, engine: RawEngine) -> None:
    engine.store(keys := keys_of("metrics", 1))
    assert engine.locate(keys) == CHUNK_TOKENS
    with urllib.request.urlopen(f"{daemon.metrics}/metrics") as answer:
        text = answer.read().decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["kvdepot_ready"]) == 1
    assert float(figures['kvdepot_tier_objects{tier="ram"}']) >= 1
    assert float(figures['kvdepot_tier_capacity_bytes{tier="ram"}']) == 320 << 20
    for name, value in status_of(daemon.socket).counters.items():
        family, _, key = name.partition(".")
        (declared,) = [one for one in FAMILIES if one.name == family]
        labels = f'{{{declared.labels[0]}="{key}"}}' if key else ""
        assert float(figures[declared.full_name + labels]) <= value
    assert float(figures['kvdepot_call_seconds_count{method="Commit"}']) >= 1
    assert float(figures["kvdepot_loop_lag_seconds_count"]) >= 1
    assert float(figures["process_open_fds"]) >= 1
    with urllib.request.urlopen(f"{daemon.metrics}/metrics/summary") as answer:
        assert re.fullmatch(
            r"kvdepotd \S+ ready, up \d+ \w+; ram [^;]+; 1 engine; hit rate .+\n", answer.read().decode()
        )
    with urllib.request.urlopen(f"{daemon.metrics}/healthz") as answer:
        assert json.load(answer) == {"ready": True, "reason": ""}
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"{daemon.metrics}/else")


def test_http_garbage_harms_nobody(daemon: DaemonProcess) -> None:
    host, port = daemon.metrics.removeprefix("http://").split(":")
    for garbage in (b"\xff" * 20000, b"POST /metrics HTTP/1.1\r\n\r\n", b"\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=patient(10)) as stranger:
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass  # it did not read to the end of that
    with urllib.request.urlopen(f"{daemon.metrics}/healthz") as answer:
        assert answer.status == 200


def test_every_method_of_the_proto_is_served(engine: RawEngine) -> None:
    """No call falls back to the generated UNIMPLEMENTED."""
    for service, stub in (("Depot", engine.stub), ("Operator", engine.operator)):
        for method in pb.DESCRIPTOR.services_by_name[service].methods:
            request = getattr(pb, method.input_type.name)()
            try:
                getattr(stub, method.name)(request, timeout=patient(5))
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, method.name
                assert error.code() is not grpc.StatusCode.INTERNAL, method.name
    assert pb_grpc.DepotStub is type(engine.stub)
