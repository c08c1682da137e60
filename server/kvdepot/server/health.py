"""Readiness, computed; and the small HTTP server that answers /metrics, /metrics/summary and /healthz."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

_REQUEST_BYTES_MAX = 8192
_REQUEST_SECONDS = 5.0
_CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str  # why not; or what is degraded, empty when nothing is


def readiness(
    *, serving: bool, stopping: bool, ready_bytes: int, growth_reason: str, draining: bool, tiers_reason: str = ""
) -> Readiness:
    """Ready means: a call now can be answered with something better than "no room"."""
    if stopping:
        return Readiness(False, "stopping")
    if not serving:
        return Readiness(False, "starting")
    if draining:
        return Readiness(False, "an operator drains it: `kvdepotctl resume` ends that")
    if ready_bytes <= 0:
        return Readiness(False, growth_reason or "no byte of the arena is populated yet")
    return Readiness(True, "; ".join(filter(None, (growth_reason, tiers_reason))))


class HttpListener:
    """HTTP/1.0, GET only, one request a connection; bounded in size, time and number."""

    def __init__(
        self, *, metrics: Callable[[], bytes], summary: Callable[[], str], health: Callable[[], Readiness]
    ) -> None:
        self._metrics = metrics
        self._summary = summary
        self._health = health
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """The address that was bound: port 0 takes a free one. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES_MAX)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _CONNECTIONS_MAX:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer's problem: it is closed
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n")
        if path == b"/metrics":
            return _response(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self._metrics())
        if path == b"/metrics/summary":
            return _response(HTTPStatus.OK, "text/plain; charset=utf-8", self._summary().encode() + b"\n")
        if path == b"/healthz":
            health = self._health()
            body = json.dumps({"ready": health.ready, "reason": health.reason}).encode() + b"\n"
            return _response(
                HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body
            )
        return _response(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /metrics/summary and /healthz are here\n")


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
