"""A proxy between client and daemon that loses chosen replies: the daemon has acted, the client never hears of it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any, Self

import grpc

from tests.fakes.attach_relay import AttachRelay
from tests.rigs.patience import patient


class Loss(Enum):
    CUT = "cut"  # the connection breaks: UNAVAILABLE
    SILENCE = "silence"  # nothing comes: the client's deadline
    REQUEST = "request"  # the daemon never saw it


class ReplyDropper(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not subscriptable at run time
    """Serves gRPC on a socket of its own, and attachments beside it; without `calls` there are no call sockets."""

    def __init__(self, daemon_socket: Path, *, calls: bool = True) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvp", dir="/tmp"))
        self.socket = self.directory / "p.sock"
        (self.directory / "p.sock.admin").symlink_to(f"{daemon_socket}.admin")  # operators lose nothing
        self._channel = grpc.insecure_channel(f"unix:{daemon_socket}")
        self._drop: dict[str, tuple[Loss, int]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.dropped: list[str] = []
        self.calls: list[str] = []  # methods, over call sockets
        self._numbers: dict[int, Loss] = {}  # of calls over them whose answer is to be lost
        self._attachments = AttachRelay(
            self.directory / "p.sock.attach", f"{daemon_socket}.attach", calls=calls,
            passes=self._passes, answers=self._answers,
        )  # fmt: skip
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    def drop(self, method: str, loss: Loss, count: int = 1) -> None:
        """Lose the next `count` replies of a method."""
        with self._lock:
            self._drop[method] = (loss, count)

    def _lost(self, method: str) -> Loss | None:
        with self._lock:
            loss, left = self._drop.get(method, (None, 0))
            if loss is None or not left:
                return None
            self._drop[method] = (loss, left - 1)
            self.dropped.append(method)
            return loss

    def _passes(self, method: str, number: int) -> bool:
        self.calls.append(method)
        loss = self._lost(method)
        if loss in (Loss.CUT, Loss.SILENCE):
            self._numbers[number] = loss
        return loss is not Loss.REQUEST

    def _answers(self, number: int) -> bool | None:
        loss = self._numbers.pop(number, None)
        return None if loss is Loss.CUT else loss is None

    def service(self, handler_call_details: Any) -> Any:
        path: str = handler_call_details.method
        forward = self._channel.unary_unary(path, bytes, bytes)

        def relay(request: bytes, context: Any) -> bytes:
            return self._relay(path.rsplit("/", 1)[1], forward, request, context)

        return grpc.unary_unary_rpc_method_handler(relay)

    def _relay(self, method: str, forward: Callable[..., Any], request: bytes, context: Any) -> bytes:
        loss = self._lost(method)
        if loss is not Loss.REQUEST:
            try:
                reply: bytes = forward(request, timeout=patient(10))
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())
        if loss is Loss.CUT:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy lost the reply")
        if loss is not None:
            while context.is_active() and not self._closing.wait(0.02):
                pass
            context.abort(grpc.StatusCode.CANCELLED, "the proxy lost it")
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._attachments.close()
        self._server.stop(0.2).wait()
        self._channel.close()
        shutil.rmtree(self.directory, ignore_errors=True)
