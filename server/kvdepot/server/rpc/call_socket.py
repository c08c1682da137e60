"""An engine's calls over a socket that only its scheduler has: as over gRPC, in less time (docs/adr/0043).

Made with an attachment, and gone with it. Calls are begun in the order in which they were
sent, and answered when they are done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any, Final

from kvdepot.core.errors import InvalidArgument, NoRoom, NotReady
from kvdepot.proto.call_frames import Frames, decode_request, encode_response
from kvdepot.server.rpc.answer import domain_error
from kvdepot.server.rpc.depot_calls import DepotCalls

_TURN_SECONDS: Final = 0.001
"""Of the loop's time: then others have theirs."""
_WAITING_MAX: Final = 1024
"""Calls begun and not answered; a client has 256 lookups, reservations and loads under way at most."""
_UNSENT_BYTES_MAX: Final = 8 << 20
"""Of answers that the client does not take: with more, nothing is read from it."""


class CallSocket(asyncio.Protocol):
    """The daemon's end. Everything runs on the loop's thread."""

    def __init__(self, calls: DepotCalls, *, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        self._calls = calls
        self._loop = loop
        self._log = log
        self._frames = Frames()
        self._ours: socket.socket | None = None  # until there is a transport, which closes it
        self._closed = False
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[Any] | None = None
        self._next: asyncio.Handle | None = None  # a turn that is due
        self._waiting = 0
        self._full = False
        self._refusing = False

    def open(self) -> socket.socket:
        """The client's end, the caller's to close. Raises OSError where no descriptors are left."""
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._connecting = self._loop.create_task(self._connect())
        return theirs

    async def _connect(self) -> None:
        ours, self._ours = self._ours, None
        assert ours is not None
        try:
            await self._loop.connect_accepted_socket(lambda: self, ours)
        except Exception as error:  # noqa: BLE001 - whatever it is; the client sees the end, and its calls go over gRPC
            self._log.error("an engine's call socket cannot be connected", exc_info=error)
            ours.close()

    @property
    def idle(self) -> bool:
        """Every call that was begun is answered, and the client has the answers, as far as it is there."""
        sent = self._transport is None or not self._transport.get_write_buffer_size()
        return sent and not self._waiting

    def refuse_new(self) -> None:
        """From now on calls are answered "not ready"; those under way go on."""
        self._refusing = True

    def close(self) -> None:
        """What came and was not begun never is, what is not answered never is. Safe to call twice."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._ours is not None:  # before the first step of that
            self._ours.close()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._closed:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        self._begin_some()

    def pause_writing(self) -> None:
        self._full = True
        self._read_on(on=False)

    def resume_writing(self) -> None:
        self._full = False
        self._begin_some()

    def connection_lost(self, error: Exception | None) -> None:
        del error  # the client's end is closed, or reset: all the same
        self._transport = None

    # --- calls ---

    def _begin_some(self) -> None:
        """Begin what has come, a turn's worth of it, and read on when nothing is left."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._transport is None or self._full:
            return
        until, more = self._loop.time() + _TURN_SECONDS, False
        try:
            for body in self._frames:
                self._begin(body)
                if more := self._full or self._loop.time() >= until:
                    break
        except Exception as error:  # noqa: BLE001 - what is no frame leaves no place to go on at
            self._log.warning("an engine's call socket is closed: %s", error)
            self.close()
        self._read_on(on=not more and not self._full)
        if more:
            self._next = self._loop.call_soon(self._begin_some)

    def _begin(self, body: bytes) -> None:
        """Raises InvalidArgument."""
        number, method, message = decode_request(body)
        answered = partial(self._answered, number, method)
        self._waiting += 1
        if not method:
            self._calls.refuse(InvalidArgument("this daemon does not know the call", advice="upgrade it"), answered)
        elif self._refusing:
            self._calls.refuse(NotReady("the daemon is stopping"), answered)
        elif self._waiting > _WAITING_MAX:
            busy = NoRoom(f"{_WAITING_MAX} calls are under way", advice="wait for their answers")
            self._calls.refuse(busy, answered)
        else:
            self._calls.start(method, message, answered)

    def _answered(self, number: int, method: str, answer: Any) -> None:
        self._waiting -= 1
        try:
            frame = encode_response(number, method, answer)
        except Exception as error:  # noqa: BLE001 - LimitExceeded, or whatever it is: the caller is answered
            frame = encode_response(number, method, domain_error(error, self._log))
        if self._transport is not None:
            self._transport.write(frame)

    def _read_on(self, *, on: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
