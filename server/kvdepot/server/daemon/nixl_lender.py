"""The daemon's end of the process that lends the arena over NIXL: started, told when to serve, replaced (ADR 82).

It only reads, so nothing depends on its death: a lease is the server's of peers, and a reader compares checksums.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from kvdepot.core.data_mapping import DataParts, pack_parts
from kvdepot.server.io.peer_wire import FROM_LENDER, TO_LENDER, Lender, Serve
from kvdepot.server.io.proven_child import ProvenChild
from kvdepot.server.platform.backoff import Backoff

_MODULE: Final = "kvdepot.server.io.nixl_lender"
_NICENESS: Final = 5
"""As I/O workers: a load of another node waits for it."""
_DEATH_SECONDS: Final = 1.0


class NixlLender:
    """Everything runs on the loop's thread. Counts `peer_lenders.started` and `.crashed`."""

    def __init__(
        self, data: DataParts, *, loop: asyncio.AbstractEventLoop, log: logging.Logger,
        count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        """Build it without a process. `data`: of the arena."""
        self._data = data
        self._loop = loop
        self._log = log
        self._count = count
        self._child: ProvenChild | None = None
        self._serving = False
        self._started_at = 0.0
        self._backoff = Backoff()
        self._respawn: asyncio.TimerHandle | None = None
        self._closed = False
        self._replaced = False
        self._died = asyncio.Event()
        self.lender: Lender | None = None
        """From which readers may read now."""

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process, or try again later."""
        self._respawn = None
        try:
            self._child = ProvenChild(
                _MODULE,
                lambda socket_fd: (pack_parts(self._data), socket_fd, os.getpid()),
                tuple(fd for fd, _ in self._data),
                niceness=_NICENESS, loop=self._loop, listener=self,
            )  # fmt: skip
        except OSError as error:
            self._start_later(f"cannot be started: {error}")
            return
        self._started_at = self._loop.time()
        self._count("peer_lenders.started", 1)

    def serve(self, *, on: bool) -> None:
        """Serve reads while something is lent, and take no CPU time while nothing is."""
        if on != self._serving:
            self._serving = on
            self._tell()

    def replace(self) -> None:
        """Have another process lend, with another agent: what readers know of the one of before says nothing any more.

        Nothing else ends what NIXL has let a reader do (ADR 82).
        """
        if self._child is not None:
            self.lender = None
            self._replaced = True
            self._child.kill()

    async def close(self) -> None:
        """End the process, and wait for its death for a second."""
        self._closed = True
        self.lender = None
        if self._respawn is not None:
            self._respawn.cancel()
        if self._child is not None:
            self._died.clear()
            self._child.kill()
            try:
                await asyncio.wait_for(self._died.wait(), _DEATH_SECONDS)
            except TimeoutError:
                self._child.forget()

    def _tell(self) -> None:
        if self._child is not None and self.lender is not None:
            self._child.send(TO_LENDER.pack(Serve(self._serving)))

    def _start_later(self, why: str) -> None:
        seconds = self._backoff.next_seconds()
        self._log.warning("peers: the process that lends over NIXL %s; the next one starts in %.1f s", why, seconds)
        self._respawn = self._loop.call_later(seconds, self.start)

    # What it says (`ChildListener`)

    def take(self, received: bytearray) -> list[tuple[int, Lender]]:
        return list(FROM_LENDER.take(received))

    def handle(self, number: int, message: Lender) -> None:  # noqa: ARG002
        self.lender = message
        self._log.info("peers: RAM is lent over NIXL, by process %s", self.pid)
        self._tell()

    def broken(self, why: str) -> None:
        self._log.error("peers: the process that lends over NIXL %s: %s", self.pid, why)
        if self._child is not None:
            self._child.kill()

    def died(self, status: int) -> None:
        self._child, self.lender = None, None
        self._died.set()
        replaced, self._replaced = self._replaced, False
        if self._closed:
            return
        if replaced:
            self._log.info("peers: the process that lends over NIXL is replaced, because a peer is none any more")
            self.start()
            return
        self._count("peer_lenders.crashed", 1)
        self._backoff.ran(self._loop.time() - self._started_at)
        self._start_later(f"ended with {status}")
