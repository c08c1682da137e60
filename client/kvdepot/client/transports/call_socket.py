"""Calls over the socket that came with the attachment: one thread sends, waits and receives (docs/adr/0043)."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.client.transports.control import decoded, not_encodable, refused
from kvdepot.core.errors import KvDepotError
from kvdepot.proto.call_frames import REFUSAL, Frame, Frames, decode_refusal, encode_frame
from kvdepot.proto.methods import BY_CALL, Method

if TYPE_CHECKING:
    from kvdepot.client.inbox import Inbox
    from kvdepot.client.transports.control import Answer

UNSENT_BYTES_MAX: Final = 8 << 20
"""Of calls that the daemon does not take: with more, a call fails at once."""
CALLS_UNSENT: Final = "calls_unsent"
"""The code of such a failure: it says nothing of a daemon that answers."""
_RECEIVE_BYTES: Final = 1 << 18
_ENDED: Final = CallFailure(FailureReason.UNAVAILABLE, "channel_closed", "the call socket has ended")


@dataclass(slots=True)
class _InFlight:
    method: Method[Any, Any]
    done: Callable[[Answer], None]
    deadline: float


class CallSocket:
    """A `Channel`. Everything runs on one thread, which waits in between."""

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

    def start(self, call: object, timeout_seconds: float, done: Callable[[Answer], None]) -> None:
        method = BY_CALL[type(call)]
        if not self._open or not self._sends:
            done(_ENDED)
            return
        self._number += 1
        try:
            frame = encode_frame(self._number, method.number, method.call.encode(call).SerializeToString())
        except (ValueError, KvDepotError) as error:
            done(not_encodable(call, error))
            return
        if self._unsent_bytes + len(frame) > UNSENT_BYTES_MAX:
            done(CallFailure(FailureReason.UNAVAILABLE, CALLS_UNSENT, "the daemon takes no calls"))
            return
        self._in_flight[self._number] = _InFlight(method, done, self._clock() + timeout_seconds)
        self._unsent.append((self._number, memoryview(frame)))
        self._unsent_bytes += len(frame)
        self._send()

    def watch(self, inbox: Inbox[Any]) -> float:
        """Return when the next call has waited for long enough."""
        if not self._open:
            return inf
        try:
            inbox.watch(self._socket.fileno(), writable=bool(self._unsent))
        except OSError:  # the kernel has no memory for it
            self.end()
            return inf
        return min((call.deadline for call in self._in_flight.values()), default=inf)

    def work(self, ready: bool) -> None:
        if ready:
            self._receive()
            self._send()
        self._expire()

    def _send(self) -> None:
        """Send as much as the socket takes. After a failure, answers can still be received up to the end."""
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
            for frame in self._frames:
                self._answered(frame)
        except KvDepotError:  # after bytes that are no frame, there is no place to continue
            self.end()

    def _answered(self, frame: Frame) -> None:
        """Complete a call. Raise InvalidArgument for a refusal that cannot be read."""
        refusal = decode_refusal(frame.body) if frame.method == REFUSAL else None
        call = self._in_flight.pop(frame.number, None)
        if call is None:  # nobody waits for it any more
            return
        if refusal is not None:
            call.done(refused(refusal))
        elif frame.method != call.method.number:
            call.done(CallFailure(FailureReason.REFUSED, "malformed_reply", f"method {frame.method} is answered"))
        else:
            call.done(decoded(frame.body, call.method))

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
        """Close a socket that has failed, and call `broken`."""
        if self._open:
            self.close()
            self._broken()
