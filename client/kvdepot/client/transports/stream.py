"""Extents by gRPC streams, for a process that cannot map the arena: through the proxy that it got at its attachment.

A batch is one call, so each batch's bytes are right or not there before one of them is copied on. Bytes travel
through memory of this process: what comes late touches no KV block.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import grpc
from kvdepot.client.copy.base import CopyBatch, Direction, IndeterminateError
from kvdepot.client.copy.staging import Staging, staged
from kvdepot.client.transports.control import CHANNEL_OPTIONS
from kvdepot.core.calls import DataCall
from kvdepot.core.errors import KvDepotError
from kvdepot.core.limits import PIECE_BYTES_MAX
from kvdepot.proto import codec_data, status
from kvdepot.proto.v1 import data_pb2_grpc

if TYPE_CHECKING:
    from kvdepot.client.copy.base import BlockCopier
    from kvdepot.client.extents import Extents

STORE_SECONDS_MAX: Final = 10.0
"""Of one batch, some tens of milliseconds when all is well; loads do not wait for it."""
STALL_SECONDS: Final = 2.0
"""A proxy that lets a deadline pass and has said nothing for so long is given up."""
_WAIT_SECONDS: Final = 0.005
"""How soon a load that comes in while a store travels is begun."""


class StreamArena:
    """One proxy. For one copying thread, except `end`, `ended` and `proxy_dead`.

    `on_end` is called when this side gives the proxy up; the attachment then gets another.
    """

    def __init__(
        self,
        *,
        arena_id: int,
        size_bytes: int,
        target: str,
        session: bytes,
        lifeline: socket.socket,
        on_end: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        """Take over `lifeline`, whose other end only the proxy has."""
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        self.lifeline = lifeline
        self.ended = False
        self._session = session
        self._on_end = on_end
        self._log = log
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = data_pb2_grpc.DataStub(self._channel)  # type: ignore[no-untyped-call]
        self._loading, self._storing = Staging(), Staging()
        self._silent_since: float | None = None  # a call waits, and the proxy has said nothing
        self._told = False

    def connect(self, timeout_seconds: float) -> None:
        """Connect. Raise OSError if the proxy's socket cannot be reached, as if only the daemon's socket is mounted."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout_seconds)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError("the proxy's socket cannot be reached; mount the folder of the daemon's") from error

    @property
    def pinnable(self) -> memoryview:
        return memoryview(b"")

    def check(self, rows: Sequence[int], granted: Sequence[int]) -> bool:  # noqa: ARG002 - as an ArenaMap's
        """Whether it is worth asking: the proxy checks generations, before and after it touches an extent."""
        return not self.ended

    def intact(self, extents: Extents, checksums: bytes) -> bool | None:  # noqa: ARG002 - nothing is mapped
        """See Arena."""
        return None

    def load(
        self, copier: BlockCopier, extents: Extents, batch: CopyBatch, timeout_seconds: float = STORE_SECONDS_MAX
    ) -> bool:
        """Fetch a batch and copy it on. False, and nothing copied, unless the proxy vouches for every byte in time."""
        if not len(batch):
            return True
        there = staged(batch, extents)
        if not self._fetch(there.extents, self._loading.reserve(batch.size_bytes), timeout_seconds):
            return False
        copier.copy(self._loading, there.batch, Direction.LOAD)
        copier.wait()  # the next batch comes into the same memory
        return True

    def verify(self, copier: BlockCopier, batch: CopyBatch) -> bool:
        """See Arena: compared with the memory by way of which the bytes came."""
        return copier.verify(self._loading, batch.end_to_end())

    def store(
        self, copier: BlockCopier, extents: Extents, batch: CopyBatch, meanwhile: Callable[[], None] = lambda: None
    ) -> bool:
        """Copy a batch and send it. True once the proxy has every byte in place; False: it has not, and will not.

        `meanwhile` is called now and then while the bytes travel. Raises IndeterminateError if the proxy may still
        write.
        """
        if not len(batch):
            return True
        there = staged(batch, extents)
        memory = self._storing.reserve(batch.size_bytes)
        copier.copy(self._storing, there.batch, Direction.STORE)
        copier.wait()
        try:
            call = self._stub.Store.future(self._messages(there.extents, memory), timeout=STORE_SECONDS_MAX)
        except ValueError:  # the channel was closed: nothing was sent
            return False
        done = threading.Event()
        call.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(_WAIT_SECONDS):
                meanwhile()
        except Exception as error:
            self.end()
            raise IndeterminateError(self) from error
        return self._stored(call)

    def end(self) -> None:
        """Give up the proxy. It ends on its own; if it does not run, the daemon ends it. On any thread."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(OSError):
            self.lifeline.shutdown(socket.SHUT_WR)  # not our reading side, which will tell of its death
        self._channel.close()
        self._on_end()

    @property
    def proxy_dead(self) -> bool:
        """Whether the kernel has closed the proxy's end, which no living thread of it does. Any thread."""
        poll = select.poll()
        poll.register(self.lifeline, 0)
        return bool(poll.poll(0))

    def _fetch(self, extents: bytes, memory: memoryview, timeout_seconds: float) -> bool:
        at = 0
        self._silent_since = self._silent_since or time.monotonic()  # before the call's own time begins
        try:
            call = self._stub.Load(
                codec_data.encode_load_call(DataCall(self._session, extents)), timeout=max(timeout_seconds, 0.0)
            )
        except ValueError:  # the channel was closed
            return False
        try:
            for message in call:
                self._silent_since = None
                data = codec_data.decode_load_piece(message)
                if data is None:
                    return at == len(memory)
                if at + len(data) > len(memory):
                    break
                memory[at : at + len(data)] = data
                at += len(data)
        except grpc.RpcError as error:
            self._failed("load", error)
        except KvDepotError as error:
            self._tell("load", error)
        finally:
            call.cancel()
        return False

    def _messages(self, extents: bytes, memory: memoryview) -> Iterator[Any]:
        yield codec_data.encode_store_call(DataCall(self._session, extents))
        for at in range(0, len(memory), PIECE_BYTES_MAX):
            yield codec_data.encode_store_piece(bytes(memory[at : at + PIECE_BYTES_MAX]))

    def _stored(self, call: Any) -> bool:
        if call.code() is grpc.StatusCode.OK:
            return True
        refused = self._failed("store", call)
        if not refused:
            self.end()
            raise IndeterminateError(self)
        return False

    def _failed(self, what: str, call: Any) -> bool:
        """Whether the proxy itself refused, and so is done with the call."""
        error = status.from_status(call.code(), call.details(), call.trailing_metadata())
        refused = not isinstance(error, status.RefusedByDaemon)
        self._tell(what, error)
        if refused:
            self._silent_since = None
        elif self._silent_since is not None and time.monotonic() - self._silent_since >= STALL_SECONDS:
            self.end()
        return refused

    def _tell(self, what: str, error: Exception) -> None:
        self._log.log(
            logging.DEBUG if self._told else logging.WARNING, "kvdepot: a %s by stream failed: %s", what, error
        )
        self._told = True
