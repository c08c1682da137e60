"""A server that speaks as much of S3 as an object tier needs, and keeps objects in memory.

Run it as `python -m benchmarks.s3_memory PORT`. No real server is as fast: it shows what a client can do. It has GET
with a range, HEAD, PUT with `If-None-Match`, and DeleteObjects. It listens on the loopback device, and trusts all.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from typing import Final

_HEAD_BYTES_MAX: Final = 64 << 10
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")
_KEY: Final = re.compile(r"<Key>([^<]*)</Key>")
_DATE: Final = "Wed, 25 Nov 2026 10:00:00 GMT"
_NO_BODY: Final = memoryview(b"")


class Connection:
    """One client, served until it closes."""

    def __init__(self, client: socket.socket, objects: dict[str, memoryview]) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client = client
        self._objects = objects
        self._read_ahead = b""

    def serve(self) -> None:
        with self._client, contextlib.suppress(ConnectionError):  # a client may be killed
            while (request := self._request()) is not None:
                self._answer(*request)

    def _request(self) -> tuple[str, str, dict[str, str], memoryview] | None:
        while b"\r\n\r\n" not in self._read_ahead:
            received = self._client.recv(_HEAD_BYTES_MAX)
            if not received:
                return None
            self._read_ahead += received
        head, _, rest = self._read_ahead.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        verb, path, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        length = int(headers.get("content-length", "0"))
        body = memoryview(bytearray(length))
        body[: len(rest)] = rest[:length]
        self._read_ahead = rest[length:]
        at = min(len(rest), length)
        while at < length:
            count = self._client.recv_into(body[at:])
            if not count:
                return None
            at += count
        return verb, path, headers, body

    def _answer(self, verb: str, path: str, headers: dict[str, str], body: memoryview) -> None:
        found = self._objects.get(path)
        if verb == "POST":  # DeleteObjects
            bucket = path.partition("?")[0]
            for key in _KEY.findall(body.tobytes().decode()):
                self._objects.pop(f"{bucket}/{key}", None)
            self._send("200 OK", memoryview(b"<DeleteResult/>"))
        elif verb == "PUT":
            if found is not None and "if-none-match" in headers:
                self._send("412 Precondition Failed")
            else:
                self._objects[path] = body
                self._send("200 OK")
        elif found is None:
            self._send("404 Not Found")
        elif wanted := _RANGE.fullmatch(headers.get("range", "")):
            first, last = int(wanted[1]), min(int(wanted[2]), len(found) - 1)
            part = found[first : last + 1]
            self._send("206 Partial Content", part, f"Content-Range: bytes {first}-{last}/{len(found)}\r\n")
        else:
            self._send("200 OK", found, headless=verb == "HEAD")

    def _send(self, status: str, body: memoryview = _NO_BODY, more: str = "", *, headless: bool = False) -> None:
        head = f'HTTP/1.1 {status}\r\nETag: "1"\r\nLast-Modified: {_DATE}\r\n{more}Content-Length: {len(body)}\r\n\r\n'
        self._client.sendall(head.encode())
        if not headless:
            self._client.sendall(body)


def main(port: int) -> None:
    objects: dict[str, memoryview] = {}
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=Connection(client, objects).serve, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
