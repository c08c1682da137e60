"""Readiness, and the small HTTP server of the live page, /metrics, /metrics/summary and /healthz."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPMethod, HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from kvdepot.server.observe.live_page import FIGURES_PATH, HEADERS, page
from kvdepot.server.platform.accepting import Acceptor, SpareDescriptors, silent_max
from kvdepot.server.platform.addresses import url_address
from kvdepot.server.platform.listening import bind_all
from kvdepot.server.platform.logs import LogThrottle

_REQUEST_BYTES_MAX = 8192
_HEAD_SECONDS = 1.0
"""Until the request is there. A client sends it at once."""
_REQUEST_SECONDS = 5.0
_CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the daemon serves, and the reason if it does not."""

    ready: bool
    reason: str  # why not; or what is degraded, empty when nothing is


def readiness(
    *, serving: bool, stopping: bool, ready_bytes: int, growth_reason: str, draining: bool, tiers_reason: str = ""
) -> Readiness:
    """Return the readiness. Ready means that a call can be answered with something better than "no room"."""
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
    """HTTP/1.0, GET and HEAD, one request a connection; bounded in size, time and number.

    With one connection too many the oldest without a request ends, so peers that say nothing keep nobody out.
    """

    def __init__(
        self, *, metrics: Callable[[], bytes], summary: Callable[[], str], health: Callable[[], Readiness],
        log: logging.Logger, spare: SpareDescriptors | None = None, figures: Callable[[], dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """`figures`: what the live page shows; None: there is no page."""
        self._answers: dict[bytes, Callable[[], _Answer]] = {
            b"/metrics": lambda: (HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", metrics()),
            b"/metrics/summary": lambda: (HTTPStatus.OK, "text/plain; charset=utf-8", summary().encode() + b"\n"),
            b"/healthz": lambda: _health(health()),
        }
        self._headers: dict[bytes, str] = {}
        if figures is not None:
            html, policy = page()
            self._answers[b"/"] = lambda: (HTTPStatus.OK, "text/html; charset=utf-8", html)
            self._answers[FIGURES_PATH] = lambda: (HTTPStatus.OK, "application/json", json.dumps(figures()).encode())
            self._headers = {b"/": HEADERS + policy, FIGURES_PATH: HEADERS}
        self._log = log
        self._spare = spare
        self._connections_max = silent_max(_CONNECTIONS_MAX)
        self._listeners: list[Acceptor] = []
        self._connections: dict[asyncio.Task[None], bool] = {}  # oldest first; True: its request is there

    async def listen(self, host: str, port: int) -> str:
        """Listen, and return the bound address for a URL: port 0 takes a free one. Raise OSError."""
        loop = asyncio.get_running_loop()
        sockets = await loop.run_in_executor(None, bind_all, host, port)  # names may have to be looked up
        for listener in sockets:
            self._listeners.append(
                Acceptor(
                    listener, self._accepted, name="metrics", loop=loop, log=self._log, throttle=LogThrottle(loop.time),
                    spare=self._spare,
                )
            )  # fmt: skip
        return url_address(*sockets[0].getsockname()[:2])

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.cancel()

    def _accepted(self, peer: socket.socket) -> None:
        while len(self._connections) >= self._connections_max:
            silent = (connection for connection, has_request in self._connections.items() if not has_request)
            oldest = next(silent, None) or next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        connection = asyncio.ensure_future(self._serve(peer))
        self._connections[connection] = False
        connection.add_done_callback(lambda ended: self._connections.pop(ended, None))

    async def _serve(self, peer: socket.socket) -> None:
        """Serve one connection. An error closes it and affects nothing else."""
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                reader, writer = await asyncio.open_connection(sock=peer, limit=_REQUEST_BYTES_MAX)
                transport = writer.transport
                writer.transport.set_write_buffer_limits(0)  # `drain` waits for all of it
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            else:
                peer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        connection = asyncio.current_task()
        if connection in self._connections:  # else one too many came meanwhile
            self._connections[connection] = True
        method, target, version, *more = [*head.partition(b"\r\n")[0].split(b" "), b"", b""]
        if not version.startswith(b"HTTP/") or any(more):
            return _response(HTTPStatus.BAD_REQUEST)
        make = self._answers.get(_path(target))
        if make is None:
            return _response(HTTPStatus.NOT_FOUND, text=f"{', '.join(map(bytes.decode, self._answers))} are here")
        if method not in (b"GET", b"HEAD"):
            known = method.decode("latin-1") in HTTPMethod.__members__
            status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_IMPLEMENTED
            return _response(status, text="GET and HEAD only", more="Allow: GET, HEAD\r\n")
        status, kind, body = make()
        headers = self._headers.get(_path(target), "")
        return _response(status, kind, body, more=headers, head_only=method == b"HEAD")


_Answer = tuple[HTTPStatus, str, bytes]


def _health(health: Readiness) -> _Answer:
    body = json.dumps({"ready": health.ready, "reason": health.reason}).encode() + b"\n"
    return HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE, "application/json", body


def _path(target: bytes) -> bytes:
    """Return the path of a request target in origin form, or in the absolute form of proxies (RFC 9112)."""
    scheme, slashes, rest = target.partition(b"://")
    if slashes and scheme.lower() in (b"http", b"https"):
        target = b"/" + rest.partition(b"?")[0].partition(b"/")[2]
    return unquote_to_bytes(target.partition(b"?")[0])


def _response(
    status: HTTPStatus, kind: str = "text/plain; charset=utf-8", body: bytes = b"", *, text: str = "", more: str = "",
    head_only: bool = False,
) -> bytes:  # fmt: skip
    """Return a response. A refusal without a text has that of its status."""
    body = body or f"{text or status.phrase}\n".encode()
    head = (
        f"HTTP/1.0 {status.value} {status.phrase}\r\nDate: {formatdate(usegmt=True)}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
