"""A TCP server of a test that is in the test's own process."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from typing import Self


class Listener(ABC):
    """Listens at `port` of loopback from its creation on, and accepts within its context."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    @abstractmethod
    def accepted(self, connection: socket.socket) -> None:
        """Begin to serve a connection. With an OSError nothing is accepted any more."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.accepted(self._listener.accept()[0])
