"""The HTTP listener: what a scraper, a probe and a proxy ask (RFC 9110, 9112), and peers that say nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from kvdepot.server.observe import health
from kvdepot.server.observe.health import HttpListener, Readiness
from kvdepot.server.platform.addresses import host_and_port, url_address

BODY = b"# HELP kvdepot_x\n"


@pytest.fixture(autouse=True)
def _late_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine sends no head late."""
    monkeypatch.setattr(health, "_HEAD_SECONDS", 600.0)


@asynccontextmanager
async def listening(
    metrics: Callable[[], bytes] = lambda: BODY, figures: Callable[[], dict[str, Any]] | None = None
) -> AsyncIterator[tuple[str, int]]:
    listener = HttpListener(
        metrics=metrics, summary=lambda: "fine", health=lambda: Readiness(ready=True, reason=""),
        log=logging.getLogger("http"), figures=figures,
    )  # fmt: skip
    try:
        yield host_and_port(await listener.listen("127.0.0.1", 0))
    finally:
        listener.close()


async def ask(address: tuple[str, int], request: bytes) -> tuple[bytes, bytes]:
    """The head and the body of the answer."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", 200, BODY),
        (b"HEAD /metrics HTTP/1.1", 200, b""),
        (b"GET http://node-7:9421/metrics HTTP/1.1", 200, BODY),
        (b"GET HTTP://[::1]:9421/metrics?x=/healthz HTTP/1.1", 200, BODY),
        (b"HEAD http://node/healthz HTTP/1.0", 200, b""),
        (b"GET /%6detrics?a=b HTTP/1.1", 200, BODY),
        (b"GET http://node HTTP/1.1", 404, None),
        (b"GET http://node?/metrics HTTP/1.1", 404, None),
        (b"GET /nothing HTTP/1.1", 404, None),
        (b"POST /nothing HTTP/1.1", 404, None),
        (b"POST /metrics HTTP/1.1", 405, None),
        (b"OPTIONS /healthz HTTP/1.1", 405, None),
        (b"DELETE http://node/metrics/summary HTTP/1.1", 405, None),
        (b"get /metrics HTTP/1.1", 501, None),
        (b"BREW /metrics HTTP/1.1", 501, None),
        (b"GET /metrics", 400, None),
        (b"GET /met rics HTTP/1.1", 400, None),
        (b"", 400, None),
        (b"\xff\xfe", 400, None),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1", 431, None),
    ],
)
def test_answers(line: bytes, status: int, body: bytes | None) -> None:
    async def run() -> tuple[bytes, bytes]:
        async with listening() as address:
            return await ask(address, line + b"\r\nHost: x\r\n\r\n")

    head, found = asyncio.run(run())
    fields = dict(field.split(b": ", 1) for field in head.split(b"\r\n")[1:])
    assert head.split(b"\r\n")[0].split(b" ")[1] == str(status).encode()
    assert body is None or found == body
    whole = len(BODY) if b"metrics" in line and status == 200 else len(found) or None
    assert whole is None or int(fields[b"Content-Length"]) == whole
    assert fields[b"Date"].endswith(b" GMT")
    assert (fields.get(b"Allow") == b"GET, HEAD") == (status in (405, 501))


def test_a_head_request_is_told_the_length_of_the_body_it_does_not_get() -> None:
    async def run() -> list[tuple[bytes, bytes]]:
        async with listening() as address:
            return [await ask(address, method + b" /metrics/summary HTTP/1.1\r\n\r\n") for method in (b"GET", b"HEAD")]

    (got, body), (head, none) = asyncio.run(run())
    assert (body, none) == (b"fine\n", b"")
    assert got.split(b"Content-Type")[1] == head.split(b"Content-Type")[1]


@pytest.mark.requirement("O5")
def test_the_live_page_is_off_without_figures_and_allows_only_itself_with_them() -> None:
    async def run(figures: Callable[[], dict[str, Any]] | None) -> list[tuple[bytes, bytes]]:
        async with listening(figures=figures) as address:
            lines = (b"GET / HTTP/1.1", b"GET /live.json?x HTTP/1.1", b"POST / HTTP/1.1", b"HEAD / HTTP/1.1")
            return [await ask(address, line + b"\r\n\r\n") for line in lines]

    assert [head.split()[1] for head, _ in asyncio.run(run(None))] == [b"404"] * 4
    (page, html), (live, found), (post, _), (head, nothing) = asyncio.run(run(lambda: {"a": "</script>\r\n"}))
    assert [one.split()[1] for one in (page, live, post, head)] == [b"200", b"200", b"405", b"200"]
    assert json.loads(found) == {"a": "</script>\r\n"}
    assert nothing == b""
    (policy,) = (field for field in page.split(b"\r\n") if field.startswith(b"Content-Security-Policy: "))
    assert policy.startswith(b"Content-Security-Policy: default-src 'none'; ")
    assert b"unsafe" not in policy
    assert b"frame-ancestors 'none'" in policy
    for one in (page, live):
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in one
        assert b"\r\nCache-Control: no-store\r\n" in one
        assert b"Access-Control" not in one
    assert b"://" not in html, "the page has no address of another host"
    assert b"innerHTML" not in html


def test_peers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_CONNECTIONS_MAX", 4)

    async def run() -> tuple[bytes, int]:
        async with listening() as address:
            silent = [await asyncio.open_connection(*address) for _ in range(20)]
            head, _ = await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n")
            ended = 0
            for reader, writer in silent:
                try:
                    ended += await asyncio.wait_for(reader.read(1), 0.05) == b""
                except (TimeoutError, ConnectionResetError) as error:
                    ended += isinstance(error, ConnectionResetError)
                writer.close()
            return head, ended

    head, ended = asyncio.run(run())
    assert b" 200 " in head
    assert ended >= 16


def test_half_a_request_ends_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_HEAD_SECONDS", 0.1)
    monkeypatch.setattr(health, "_REQUEST_SECONDS", 600.0)

    async def run() -> bytes:
        async with listening() as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            try:
                return await asyncio.wait_for(reader.read(), 60)
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

    assert asyncio.run(run()) == b""


def test_half_requests_that_are_renewed_end_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scraper that reads slowly gets all of a large answer, and a probe gets its own."""
    monkeypatch.setattr(health, "_CONNECTIONS_MAX", 4)
    monkeypatch.setattr(health, "_REQUEST_SECONDS", 600.0)
    body = b"x" * (16 << 20)

    async def run() -> tuple[bytes, int]:
        async with listening(lambda: body) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            received = 0
            half = []
            for _ in range(20):
                half.append(await asyncio.open_connection(*address))
                half[-1][1].write(b"GET /healthz HTTP/1.1\r\n")
            head, _ = await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n")
            while part := await asyncio.wait_for(reader.read(1 << 20), 60):
                received += len(part)
            for _, one in (*half, (reader, writer)):
                one.close()
            return head, received

    head, received = asyncio.run(run())
    assert b" 200 " in head
    assert received == len(body)


def test_a_scraper_that_does_not_read_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_REQUEST_SECONDS", 0.2)

    async def run() -> int:
        tasks = len(asyncio.all_tasks())
        async with listening(lambda: b"x" * (16 << 20)) as address:
            with closing(socket.create_connection(address)) as peer:
                peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                await asyncio.sleep(0.1)
                assert len(asyncio.all_tasks()) > tasks
                for _ in range(100):
                    if len(asyncio.all_tasks()) == tasks:
                        break
                    await asyncio.sleep(0.05)
                return len(asyncio.all_tasks()) - tasks

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize(
    ("address", "host", "port", "text"),
    [
        ("127.0.0.1:1", "127.0.0.1", 1, "127.0.0.1:1"),
        ("[::1]:19433", "::1", 19433, "[::1]:19433"),
        ("::1:19433", "::1", 19433, "[::1]:19433"),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1, "[fe80::1%25eth0]:1"),
        ("node-7:65535", "node-7", 65535, "node-7:65535"),
    ],
)
def test_addresses_are_read_and_printed(address: str, host: str, port: int, text: str) -> None:
    assert host_and_port(address) == (host, port)
    assert url_address(host, port) == text
