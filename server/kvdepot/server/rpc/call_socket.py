"""An engine's calls over a socket of its scheduler, faster than over gRPC (docs/adr/0043).

The socket is created and closed with an attachment. Calls begin in the order in which they were sent, and are answered
when they end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any, Final

from kvdepot.core.errors import InvalidArgument, KvDepotError, NoRoom, NotReady
from kvdepot.proto.call_frames import Frame, Frames, encode_frame, encode_refusal
from kvdepot.proto.methods import BY_NUMBER
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
        """Return the client's end, which the caller closes. Raise OSError without descriptors."""
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
            self._log.error("call socket not connected: an engine uses gRPC instead", exc_info=error)
            ours.close()

    @property
    def idle(self) -> bool:
        """Return whether every begun call is answered, and the client has the answers, unless it is gone."""
        sent = self._transport is None or not self._transport.get_write_buffer_size()
        return sent and not self._waiting

    def refuse_new(self) -> None:
        """Answer further calls with "not ready". Calls in flight continue."""
        self._refusing = True

    def close(self) -> None:
        """Drop calls that have not begun, and answers that were not sent. Safe to call twice."""
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
            for frame in self._frames:
                self._begin(frame)
                if more := self._full or self._loop.time() >= until:
                    break
        except Exception as error:  # noqa: BLE001 - after something that is no frame nobody knows where the next one begins
            self._log.warning("call socket closed: %s", error)
            self.close()
        self._read_on(on=not more and not self._full)
        if more:
            self._next = self._loop.call_soon(self._begin_some)

    def _begin(self, frame: Frame) -> None:
        method = BY_NUMBER.get(frame.method)
        answered = partial(self._answered, frame.number, frame.method)  # not the body: it may be large
        self._waiting += 1
        if method is None:
            self._calls.refuse(InvalidArgument("this daemon does not know the call", advice="upgrade it"), answered)
        elif self._refusing:
            self._calls.refuse(NotReady("the daemon is stopping"), answered)
        elif self._waiting > _WAITING_MAX:
            busy = NoRoom(f"{_WAITING_MAX} calls are under way", advice="wait for their answers")
            self._calls.refuse(busy, answered)
        else:
            self._calls.start(method, frame.body, answered)

    def _answered(self, number: int, method: int, answer: bytes | KvDepotError) -> None:
        self._waiting -= 1
        try:
            if isinstance(answer, KvDepotError):
                frame = encode_refusal(number, answer)
            else:
                frame = encode_frame(number, method, answer)
        except Exception as error:  # noqa: BLE001 - LimitExceeded, or whatever it is: the caller is answered
            frame = encode_refusal(number, domain_error(error, self._log))
        if self._transport is not None:
            self._transport.write(frame)

    def _read_on(self, *, on: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
