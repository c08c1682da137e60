"""Where the peers of a tier are: all addresses of a DNS name, or the lines of a file, looked up again and again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvdepot.server.platform.addresses import host_and_port
from kvdepot.server.platform.own_thread import in_own_thread

FILE_BYTES_MAX: Final = 1 << 20
_COMMENT: Final = "#"

Place = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class DnsName:
    """Each address of this name is a peer, as with a headless service of Kubernetes."""

    host: str
    port: int

    def find(self) -> tuple[Place, ...]:
        """Resolve the name. May take long. Raise OSError."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return tuple(sorted({(str(one[4][0]), self.port) for one in found}))


@dataclass(frozen=True, slots=True)
class PlacesFile:
    """Each line is the `host:port` of a peer. The text after `#` does not count."""

    path: Path

    def find(self) -> tuple[Place, ...]:
        """Read the file. May take long. Raise OSError, or ValueError for a line that is no address."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would wait
        with os.fdopen(fd, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        found = set()
        for number, line in enumerate(data.decode().splitlines(), 1):
            text = line.partition(_COMMENT)[0].strip()
            if not text:
                continue
            try:
                found.add(host_and_port(text))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return tuple(sorted(found))


def order_of(place: Place, arena_id: int) -> bytes:
    """Return what orders places for a daemon, by rendezvous hashing: each daemon has another order, and keeps it."""
    return blake2b(f"{arena_id:016x} {place[0]} {place[1]}".encode(), digest_size=8).digest()


class Finder:
    """Looks for places again and again. A resolver may hang, and so may the mount of a file.

    `found` or `failed` is called after each look, on the loop's thread. While a look hangs, `failed` is called again
    and again: otherwise nobody would know.
    """

    def __init__(
        self, find: Callable[[], tuple[Place, ...]], loop: asyncio.AbstractEventLoop, *, every_seconds: float,
        found: Callable[[tuple[Place, ...]], None], failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`find` may take long. It raises OSError or ValueError."""
        self._find = find
        self._loop = loop
        self._every_seconds = every_seconds
        self._found = found
        self._failed = failed
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = self._loop.create_task(self._look())

    def close(self) -> None:
        """Look no more. A look that hangs is left to itself."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while True:
            try:
                places = await self._places()
            except (OSError, ValueError) as error:
                self._failed(str(error) or type(error).__name__)
            else:
                self._found(places)
            await asyncio.sleep(self._every_seconds)

    async def _places(self) -> tuple[Place, ...]:
        """Look once, for as long as it takes: a second look would hang too, in a thread of its own."""
        look = self._loop.create_task(in_own_thread(self._find))
        try:
            while not (await asyncio.wait({look}, timeout=self._every_seconds))[0]:
                self._failed(f"no answer within {self._every_seconds:g} s")
            return look.result()
        finally:
            look.cancel()
