"""A TCP proxy in front of a server that stops passing bytes on, cuts answers, drops connections and strips headers."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

from tests.fakes.listener import Listener


class FaultyProxy(Listener):
    """Faults count from the time they are set, for connections that are open, too. `clear` ends them.

    `hangs`: nothing is passed on any more. `drops`: every connection is closed. `answer_bytes`: so many bytes of each
    answer arrive, then its connection ends. `held_at`: so many arrive, then nothing more until `clear`.
    `strips_conditions`: If-None-Match never reaches the server.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._target = port
        self._changed = threading.Condition()
        self.answers = 0
        """That came from the server so far."""
        self.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def clear(self) -> None:
        with self._changed:
            self.hangs = self.drops = self.strips_conditions = False
            self.answer_bytes: int | None = None
            self.held_at: int | None = None
            self.held = 0
            self._changed.notify_all()

    def wake(self) -> None:
        """Have connections that wait look at faults that were changed."""
        with self._changed:
            self._changed.notify_all()

    def __exit__(self, *raised: object) -> None:
        self.clear()
        super().__exit__(*raised)

    def accepted(self, connection: socket.socket) -> None:
        if self.drops:
            connection.close()
            return
        server = socket.create_connection(("127.0.0.1", self._target))
        for pump in (self._requests, self._answers):
            threading.Thread(target=self._pump, args=(pump, connection, server), daemon=True).start()

    @staticmethod
    def _pump(pump: object, client: socket.socket, server: socket.socket) -> None:
        assert callable(pump)
        with contextlib.suppress(OSError):
            pump(client, server)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):
            self._wait(lambda: not self.hangs)
            if self.strips_conditions:
                data = re.sub(rb"(?i)\r\nif-none-match: [^\r]*", b"", data)
            server.sendall(data)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        while data := server.recv(1 << 16):
            self._wait(lambda: not self.hangs)
            if self.drops:
                return
            if data.startswith(b"HTTP/1.1 "):
                passed = 0
                with self._changed:
                    self.answers += 1
            for limit, ends in ((self.answer_bytes, True), (self.held_at, False)):
                if limit is not None and passed + len(data) > limit:
                    client.sendall(data[: max(limit - passed, 0)])
                    data = data[max(limit - passed, 0) :]
                    passed = limit
                    if ends:
                        return
                    with self._changed:
                        self.held += 1
                        self._changed.notify_all()
                    self._wait(lambda: self.held_at is None)
            client.sendall(data)
            passed += len(data)

    def _wait(self, reached: object) -> None:
        assert callable(reached)
        with self._changed:
            self._changed.wait_for(reached)
