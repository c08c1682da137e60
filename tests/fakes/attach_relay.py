"""Between a client and the daemon's attachment socket: passes attachments on, and stands in the middle of call sockets.

The daemon takes this process for the one that attaches: only for clients within it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvdepot.proto.call_frames import Frame, Frames, encode_frame
from kvdepot.proto.methods import BY_NUMBER
from kvdepot.proto.v1 import depot_pb2 as pb

from tests.rigs.patience import patient

_POLL_SECONDS = 0.05


class AttachRelay:
    """`passes(method, number)` is asked for each request, `answers(number)` for each response: False drops it.

    None of the latter ends the call socket. Without `calls` nobody gets a call socket, as from a daemon that has none.
    """

    def __init__(
        self,
        path: Path,
        daemon_path: str,
        *,
        calls: bool,
        passes: Callable[[str, int], bool],
        answers: Callable[[int], bool | None],
    ) -> None:
        self._daemon_path = daemon_path
        self._calls = calls
        self._passes = passes
        self._answers = answers
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen(16)
        self._listener.settimeout(_POLL_SECONDS)
        self._begin(self._accept)

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                self._begin(self._attach, self._listener.accept()[0])

    def _attach(self, client: socket.socket) -> None:
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with client, daemon:
            client.setblocking(True)
            try:
                daemon.connect(self._daemon_path)
            except OSError:
                return
            request = pb.AttachRequest.FromString(client.recv(8192))
            request.calls = request.calls and self._calls
            daemon.send(request.SerializeToString())
            answer, descriptors, _, _ = socket.recv_fds(daemon, 8192, 3)
            if request.calls:
                ours, theirs = socket.socketpair()
                upstream = socket.socket(fileno=descriptors.pop())
                with theirs:
                    socket.send_fds(client, [answer], [*descriptors, theirs.fileno()])
                self._begin(self._relay, ours, upstream)
            else:
                socket.send_fds(client, [answer], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            self._hold(client, daemon)

    def _hold(self, *connections: socket.socket) -> None:
        """Until one of them ends."""
        with selectors.DefaultSelector() as selector:
            for connection in connections:
                selector.register(connection, selectors.EVENT_READ)
            while not self._closing.is_set() and not selector.select(_POLL_SECONDS):
                pass

    def _relay(self, client: socket.socket, daemon: socket.socket) -> None:
        requests, responses = Frames(), Frames()
        with client, daemon, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
            selector.register(client, selectors.EVENT_READ)
            selector.register(daemon, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.fileobj is client:
                        alive = self._forward(client, requests, daemon, self._request)
                    else:
                        alive = self._forward(daemon, responses, client, self._response)
                    if not alive:
                        return

    def _forward(
        self, source: socket.socket, frames: Frames, target: socket.socket, passes: Callable[[Frame], bool | None]
    ) -> bool:
        data = source.recv(1 << 16)
        frames.feed(data)
        for frame in frames:
            verdict = passes(frame)
            if verdict is None:
                return False
            if verdict:
                target.sendall(encode_frame(*frame))
        return bool(data)

    def _request(self, frame: Frame) -> bool:
        return self._passes(BY_NUMBER[frame.method].name, frame.number)

    def _response(self, frame: Frame) -> bool | None:
        return self._answers(frame.number)

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(patient(5))
        self._listener.close()
