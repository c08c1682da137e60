"""Traces of requests, as a collector gets them from a real daemon; and what a bad collector costs (nothing)."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.core.records import RequestRecord
from kvdepot.server.observe.tracing import COMPLAINT_SECONDS, Complaints, Tracing
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patience, wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of

RECORD = RequestRecord("engine", "request", bytes(16), 1.0, ended_seconds_ago=0.0)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it has got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _values(attributes: Any) -> dict[str, object]:
    def value(one: KeyValue) -> object:
        return getattr(one.value, one.value.WhichOneof("value") or "string_value")

    return {one.key.removeprefix("kvdepot."): value(one) for one in attributes}


def _daemon(endpoint: str, sample: float = 1.0) -> DaemonProcess:
    return DaemonProcess(config=f'[trace]\nendpoint = "{endpoint}"\nsample = {sample}\n')


@pytest.mark.requirement("P10")
def test_a_request_that_has_ended_is_traced_with_its_lookup_and_its_loads() -> None:
    keys = keys_of("traced", 3)
    with collector() as (endpoint, spans), _daemon(endpoint) as daemon:
        with RawEngine(daemon.socket, "one") as engine:
            engine.store(keys, "stored-1")
            engine.end_request("stored-1")
            assert engine.locate(keys, "loaded-2")
            assert engine.load(keys, "loaded-2") == [payload_of(key) for key in keys]
            engine.end_request("loaded-2")
            engine.locate(keys, "not-ended")
        began = time.time_ns()
        assert daemon.stop() == 0
        by_name: dict[str, list[Any]] = {}
        for span in spans:
            by_name.setdefault(span.name, []).append(span)
        stored, loaded = sorted(by_name["request"], key=lambda span: int(span.start_time_unix_nano))
        (acquire,) = by_name["acquire"]
        assert _values(stored.attributes)["request_id"] == "stored-1"
        assert _values(stored.attributes)["reserved.granted"] == len(keys)
        said = _values(loaded.attributes)
        assert (said["engine_id"], said["request_id"], said["lookups"]) == ("one", "loaded-2", 1)
        assert (acquire.parent_span_id, acquire.trace_id) == (loaded.span_id, loaded.trace_id)
        assert _values(acquire.attributes) == {"outcome": "granted", "objects": len(keys)}
        (located,) = loaded.events
        assert (located.name, _values(located.attributes)["offered_tier"]) == ("located", "ram")
        assert 0 < loaded.start_time_unix_nano <= acquire.start_time_unix_nano <= loaded.end_time_unix_nano <= began


@pytest.mark.requirement("P10")
def test_a_sample_is_traced_and_without_an_endpoint_nothing() -> None:
    with collector() as (endpoint, spans):
        for daemon in (_daemon(endpoint, 0.2), DaemonProcess()):
            with daemon, RawEngine(daemon.socket, "one") as engine:
                for number in range(200):
                    engine.locate(keys_of("sampled", 1), f"request-{number}")
                    engine.end_request(f"request-{number}")
                assert daemon.stop() == 0
        assert 10 <= len(spans) <= 90, "of 200, a fifth"


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("listens", [pytest.param(True, marks=pytest.mark.long(seconds=20)), False])
def test_a_collector_that_hangs_or_is_away_holds_up_no_call_and_no_stop(listens: bool) -> None:
    with socket.socket() as hangs:
        hangs.bind(("127.0.0.1", 0))
        if listens:
            hangs.listen()
        with _daemon(f"http://127.0.0.1:{hangs.getsockname()[1]}/v1/traces") as daemon:
            started = time.monotonic()
            keys = keys_of("held up", 2)
            with RawEngine(daemon.socket, "one") as engine:
                engine.store(keys, "stored")
                for number in range(2000):  # more than a batch, so that it is being sent
                    engine.locate(keys, f"request-{number}")
                    engine.end_request(f"request-{number}")
                assert engine.load(keys) == [payload_of(key) for key in keys]
            wait_until(lambda: "traces: " in daemon.log, "it complains")
            began = time.monotonic()
            assert daemon.stop() == 0
            ended = time.monotonic()
            assert ended - began < 10 * patience(), "it waits for no answer"
            minutes = math.ceil((ended - started) / COMPLAINT_SECONDS)
            assert 1 <= daemon.log.count("traces: ") <= minutes, "one line a minute, however many batches"


def test_a_collector_that_is_away_is_complained_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complaints = Complaints(logging.getLogger("traces"), lambda: now)
    for second in range(150):
        now = 100.0 + second
        complaints.emit(logging.LogRecord("otel", logging.ERROR, "", 0, "away at %d", (second,), None))
    assert caplog.messages == ["traces: away at 0", "traces: away at 60", "traces: away at 120"]


@pytest.mark.requirement("S6")
def test_complaints_name_no_token(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as away:
        away.bind(("127.0.0.1", 0))
        endpoint = f"http://me:s3cret@127.0.0.1:{away.getsockname()[1]}/v1/traces?token=t0ken"

        async def run() -> None:
            tracing = Tracing(endpoint, 1.0, file="", version="1", log=logging.getLogger("test"))
            tracing.ended(RECORD)
            await tracing.close()

        asyncio.run(run())
        wait_until(lambda: "traces: " in caplog.text, "it complains")
    assert not any(secret in caplog.text for secret in ("s3cret", "t0ken"))


def test_without_the_extra_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"trace.endpoint: needs OpenTelemetry.*\.\[otel\]"):
        Tracing("http://127.0.0.1:1/v1/traces", 1.0, file="kvdepot.toml", version="1", log=logging.getLogger("test"))


def test_no_more_than_a_bounded_number_of_spans_waits_for_the_collector() -> None:
    async def run() -> None:
        with socket.socket() as hangs:
            hangs.bind(("127.0.0.1", 0))
            hangs.listen()
            url = f"http://127.0.0.1:{hangs.getsockname()[1]}/v1/traces"
            tracing = Tracing(url, 1.0, file="", version="1", log=logging.getLogger("test"))
            for _ in range(10_000):
                tracing.ended(RECORD)
            (processor,) = tracing._provider._active_span_processor._span_processors
            assert len(processor._batch_processor._queue) <= 2048  # type: ignore[attr-defined]
            await tracing.close()

    asyncio.run(run())
