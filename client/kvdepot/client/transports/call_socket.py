"""Calls over the socket that came with the attachment: one thread sends, waits and receives (docs/adr/0043)."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.transports.control import METHODS, decoded, not_encodable, refused
from kvdepot.core.errors import KvDepotError
from kvdepot.proto.call_frames import Frames, decode_response, encode_request

if TYPE_CHECKING:
    from kvdepot.client.transports.control import Answer, ControlCall

UNSENT_BYTES_MAX: Final = 8 << 20
"""Of calls that the daemon does not take: with more, a call fails at once."""
CALLS_UNSENT: Final = "calls_unsent"
"""The code of such a failure: it says nothing of a daemon that answers."""
_RECEIVE_BYTES: Final = 1 << 18
_ENDED: Final = CallFailure(FailureReason.UNAVAILABLE, "channel_closed", "the call socket has ended")


@dataclass(slots=True)
class _InFlight:
    method: str
    decode: Callable[[Any], Any]
    done: Callable[[Answer], None]
    deadline: float


class CallSocket:
    """A `Channel`. Everything runs on one thread, which waits for `fileno` and `deadline` in between."""

    def __init__(
        self,
        connection: socket.socket,
        clock: Callable[[], float],
        *,
        unwatch: Callable[[], None],
        broken: Callable[[], None],
    ) -> None:
        """`unwatch` is called before the socket is closed, `broken` when that was not by `close`."""
        connection.setblocking(False)
        self._socket = connection
        self._clock = clock
        self._unwatch = unwatch
        self._broken = broken
        self._frames = Frames()
        self._number = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._unsent: deque[tuple[int, memoryview]] = deque()
        self._unsent_bytes = 0
        self._begun = False  # a part of the first unsent frame has gone
        self._sends = True  # it has not failed to
        self._open = True

    def start(
        self, call: ControlCall, timeout_seconds: float, done: Callable[[Answer], None], *, wait_for_ready: bool = False
    ) -> None:
        del wait_for_ready  # it is connected, or over
        method, encode, decode = METHODS[type(call)]
        if not self._open or not self._sends:
            done(_ENDED)
            return
        self._number += 1
        try:
            frame = encode_request(self._number, method, encode(call))
        except (ValueError, KvDepotError) as error:
            done(not_encodable(call, error))
            return
        if self._unsent_bytes + len(frame) > UNSENT_BYTES_MAX:
            done(CallFailure(FailureReason.UNAVAILABLE, CALLS_UNSENT, "the daemon takes no calls"))
            return
        self._in_flight[self._number] = _InFlight(method, decode, done, self._clock() + timeout_seconds)
        self._unsent.append((self._number, memoryview(frame)))
        self._unsent_bytes += len(frame)
        self._send()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def open(self) -> bool:
        return self._open

    @property
    def unsent(self) -> bool:
        """The daemon has not taken everything yet: `work` when the socket is writable."""
        return bool(self._unsent)

    @property
    def deadline(self) -> float | None:
        """Of the next call that will have waited for long enough: `work` then."""
        return min((call.deadline for call in self._in_flight.values()), default=None)

    def work(self, ready: bool) -> None:
        """`ready`: the socket is."""
        if ready:
            self._receive()
            self._send()
        self._expire()

    def _send(self) -> None:
        """As much as the socket takes. Where it fails, answers that are there are still to be had, up to the end."""
        while self._unsent:
            number, frame = self._unsent[0]
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                return
            except OSError:
                self._sends = False
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
                return
            self._unsent_bytes -= sent
            self._begun = sent < len(frame)
            if self._begun:
                self._unsent[0] = number, frame[sent:]
            else:
                self._unsent.popleft()

    def _receive(self) -> None:
        """Take what is there: answers, or the end."""
        if not self._open:
            return
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset
            data = b""
        if not data:
            self.end()
            return
        self._frames.feed(data)
        try:
            for body in self._frames:
                self._answered(*decode_response(body))
        except KvDepotError:  # what is no frame leaves no place to go on at
            self.end()

    def _answered(self, number: int, method: str, answer: Any) -> None:
        call = self._in_flight.pop(number, None)
        if call is None:  # nobody waits for it any more
            return
        if isinstance(answer, KvDepotError):
            call.done(refused(answer))
        elif method != call.method:
            call.done(CallFailure(FailureReason.REFUSED, "malformed_reply", f"{method or 'nothing known'} is answered"))
        else:
            call.done(decoded(answer, call.decode))

    def _expire(self) -> None:
        """Fail the calls whose deadline has come. What of them has not been sent never is."""
        now = self._clock()
        expired = [number for number, call in self._in_flight.items() if call.deadline <= now]
        if not expired:
            return
        calls = [self._in_flight.pop(number) for number in expired]
        kept = deque(
            item for at, item in enumerate(self._unsent) if item[0] in self._in_flight or (self._begun and not at)
        )
        self._unsent, self._unsent_bytes = kept, sum(len(frame) for _, frame in kept)
        for call in calls:
            call.done(CallFailure(FailureReason.DEADLINE, "DEADLINE_EXCEEDED"))

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._unsent.clear()
        self._unwatch()
        self._socket.close()
        while self._in_flight:
            self._in_flight.popitem()[1].done(_ENDED)

    def end(self) -> None:
        """It is of no use any more: as `close`, and `broken` is told."""
        if self._open:
            self.close()
            self._broken()
