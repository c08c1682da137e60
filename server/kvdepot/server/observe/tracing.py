"""OpenTelemetry traces of requests: extra `otel`, off by default ([trace] endpoint).

A trace is made from the record of a request after its end, as `kvdepotctl explain` shows it. So no call waits for it.
It is sent in the background, where a trace can be late, refused or lost without effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvdepot.core.errors import ConfigError
from kvdepot.core.records import RequestRecord
from kvdepot.core.secrets import mask_secrets

KEY: Final = "trace.endpoint"
_EXTRA = "pip install '.[otel]' in a clone of kvdepot, or leave the key empty"
_EXPORT_SECONDS = 2.0
"""What one batch may take; also what a stop waits for the last one."""
COMPLAINT_SECONDS: Final = 60.0
_NANOSECONDS: Final = 1_000_000_000

Attributes = dict[str, str | int | float]


def require(file: str) -> None:
    """Raise ConfigError without the extra."""
    try:
        # By name: of a module that was imported before, only that would be looked at which is written last.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: F401
        from opentelemetry.sdk.trace import TracerProvider  # noqa: F401
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: F401
    except ImportError as error:
        raise ConfigError(file, KEY, f"needs OpenTelemetry: {error}", advice=_EXTRA) from error


class Tracing:
    """Sends to one collector. `ended` belongs to the loop's thread, and only puts into a bounded queue."""

    def __init__(self, endpoint: str, sample: float, *, file: str, version: str, log: logging.Logger) -> None:
        """Create an exporter of the share `sample` of requests to an OTLP/HTTP `endpoint`.

        Raise ConfigError without the extra.
        """
        require(file)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

        _have_complaints_go_to(log)
        self._in_context = trace.set_span_in_context
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "kvdepotd", "service.version": version}),
            sampler=TraceIdRatioBased(sample),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvdepot.server", version)

    def ended(self, record: RequestRecord) -> None:
        now = time.time_ns()

        def at(seconds_ago: float) -> int:
            return now - int(seconds_ago * _NANOSECONDS)

        root = self._tracer.start_span("request", start_time=at(record.began_seconds_ago), attributes=_said_of(record))
        context = self._in_context(root)
        if record.lookup is not None:
            root.add_event("located", dict(_looked_up(record)), timestamp=at(record.looked_up_seconds_ago))
        for load in record.loads:
            began = at(load.asked_seconds_ago)
            about: Attributes = {"kvdepot.outcome": load.outcome, "kvdepot.objects": load.objects}
            span = self._tracer.start_span("acquire", context, start_time=began, attributes=about)
            span.end(began + int(load.seconds * _NANOSECONDS))
        root.end(at(record.ended_seconds_ago or 0.0))

    async def close(self) -> None:
        """Send what is left. Takes no longer than one batch may, whatever the collector does."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop did not wait
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=end, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), _EXPORT_SECONDS)


def _said_of(record: RequestRecord) -> Attributes:
    found: Attributes = {
        "kvdepot.engine_id": record.engine_id,
        "kvdepot.request_id": record.request_id,
        "kvdepot.namespace": record.namespace_id.hex(),
        "kvdepot.lookups": record.lookups,
    }
    found |= {f"kvdepot.reserved.{outcome}": count for outcome, count in record.reserved.items()}
    if record.end is not None:
        found["kvdepot.local_tokens"] = record.end.local_tokens
        found["kvdepot.loaded_tokens"] = record.end.loaded_tokens
        found["kvdepot.engine_miss"] = record.end.miss
    return found


def _looked_up(record: RequestRecord) -> Iterator[tuple[str, str | int | float]]:
    assert record.lookup is not None
    for name in ("chunks", "chunk_tokens", "boundary_tokens", "offered_tokens", "offered_tier", "miss"):
        yield f"kvdepot.{name}", getattr(record.lookup, name)


def _have_complaints_go_to(log: logging.Logger) -> None:
    """Log the exporter's complaints at most once a minute: it complains of an absent collector at every batch."""
    theirs = logging.getLogger("opentelemetry")
    theirs.handlers = [Complaints(log)]
    theirs.propagate = False


class Complaints(logging.Handler):
    """Handler that logs the exporter's complaints, at most once a minute."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._clock = clock
        self._not_before = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if now >= self._not_before:
            self._not_before = now + COMPLAINT_SECONDS
            self._log.warning("traces: %s", mask_secrets(record.getMessage()))
