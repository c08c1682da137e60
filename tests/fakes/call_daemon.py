"""The daemon's end of a call socket, with calls that a test answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from kvdepot.core.calls import (
    LocateReply,
)
from kvdepot.core.errors import (
    KvDepotError,
)
from kvdepot.proto.call_frames import (
    REFUSAL,
    Frame,
    Frames,
    decode_refusal,
    encode_frame,
)
from kvdepot.proto.methods import BY_NUMBER, DEPOT, Method
from kvdepot.server.rpc import call_socket as server_end

LOG = logging.getLogger("call socket")


class Calls:
    """Answers at once what the test says, or keeps the call."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.kept: list[Callable[[Any], None]] = []
        self.keeping: asyncio.Queue[None] = asyncio.Queue()
        self.answer: Any = LocateReply(16, "ram")
        self.seconds = 0.0

    def start(self, method: Method[Any, Any], message: bytes, done: Callable[[Any], None]) -> None:
        del message
        self.begun.append(method.name)
        if self.seconds:
            time.sleep(self.seconds)

        def answered(answer: object) -> None:
            refused = isinstance(answer, KvDepotError)
            done(answer if refused else method.reply.encode(answer).SerializeToString())

        if self.answer is None:
            self.kept.append(answered)
            self.keeping.put_nowait(None)
        else:
            answered(self.answer)

    def refuse(self, error: KvDepotError, done: Callable[[Any], None]) -> None:
        done(error)


class Daemon:
    def __init__(self) -> None:
        self.calls = Calls()
        calls: Any = self.calls
        self.end = server_end.CallSocket(calls, loop=asyncio.get_running_loop(), log=LOG)
        self.client = self.end.open()
        self.client.setblocking(False)
        self.frames = Frames()

    def send(self, *numbers: int, method: str = "Locate") -> None:
        self.client.sendall(b"".join(encode_frame(number, DEPOT[method].number, b"") for number in numbers))

    @staticmethod
    def read(frame: Frame) -> object:
        if frame.method == REFUSAL:
            return decode_refusal(frame.body)
        return BY_NUMBER[frame.method].reply.parse(frame.body)

    async def kept(self, count: int) -> None:
        while len(self.calls.kept) < count:
            await asyncio.wait_for(self.calls.keeping.get(), 30)

    async def answers(self, count: int) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        loop = asyncio.get_running_loop()
        while len(found) < count:
            data = await asyncio.wait_for(loop.sock_recv(self.client, 1 << 20), 30)
            if not data:
                break
            self.frames.feed(data)
            found += [(frame.number, self.read(frame)) for frame in self.frames]
        return found
