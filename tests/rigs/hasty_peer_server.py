"""The process that sends to peers, with few places and the patience that a test says. Started in the place of it."""

from __future__ import annotations

import os
import threading
from typing import Any

from kvdepot.server.io import peer_connections, peer_server
from kvdepot.server.io.lifeline import exit_code

PLACES = 3
ASKING = "ASKING_SECONDS"
"""For how long a question may take, as an environment variable. Else longer than any busy machine needs."""
ANSWERING = "ANSWER_SECONDS"
"""For how long an answer of the daemon is waited for, as an environment variable. Else longer than any test takes."""
IDLE = "IDLE_SECONDS"
"""After how long a connection makes room, as an environment variable. Else longer than any test takes."""
THREADLESS = "THREADLESS_CONNECTIONS"
"""For how many connections there is no thread, as an environment variable."""


def _main(arguments: list[str]) -> int:
    seconds = float(os.environ.get(ASKING, "600"))
    peer_server.FIRST_SECONDS = peer_server.QUESTION_SECONDS = seconds  # type: ignore[misc]
    peer_server.ANSWER_SECONDS = float(os.environ.get(ANSWERING, "600"))  # type: ignore[misc]
    peer_server.LOOK_SECONDS = 0.1  # type: ignore[misc]
    peer_connections.CONNECTIONS_PER_HOST_MAX = PLACES  # type: ignore[misc]
    peer_connections.IDLE_SECONDS_MIN = float(os.environ.get(IDLE, "600"))  # type: ignore[misc]
    left = int(os.environ.get(THREADLESS, "0"))
    start = threading.Thread.start

    def start_or_refuse(self: Any) -> None:
        nonlocal left
        if left and self.name.endswith("(_connected)"):
            left -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = start_or_refuse  # type: ignore[method-assign]
    return peer_server.main(arguments)


if __name__ == "__main__":
    os._exit(exit_code(_main))
