"""The process that sends to peers, without a process: how long a reader can keep what it borrowed."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from kvdepot.server.io import peer_server
from kvdepot.server.io.peer_wire import ALPN_NIXL, Ended, Granted, Lender, Sent


class Dripping:
    """A reader's connection of which one byte comes, and then no more. It notes how long each wait may take."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._bytes = [b"\x01"]

    def selected_alpn_protocol(self) -> str:
        return ALPN_NIXL

    def settimeout(self, seconds: float) -> None:
        self.waits.append(seconds)

    def send(self, data: memoryview) -> int:
        return len(data)

    def recv_into(self, buffer: memoryview) -> int:
        if not self._bytes:
            raise TimeoutError
        buffer[:1] = self._bytes.pop()
        return 1


@pytest.mark.requirement("B5")
def test_a_question_that_begins_within_a_lease_and_does_not_end_keeps_it_no_longer() -> None:
    """The daemon would kill the process, and every other lease would end with it."""
    connection, daemon = Dripping(), Mock()
    reader = peer_server._Reader(connection, (), daemon, memoryview(b""), asks=Mock(), unanswered=Mock())  # type: ignore[arg-type]
    seconds = peer_server.QUESTION_SECONDS / 10
    lease = Granted(7, 0, 1, seconds, ((0, 4096),), Lender(b"", 0, 0))
    assert not reader._lend(lease, time.monotonic() + seconds)
    assert max(connection.waits) <= seconds
    daemon.tell.assert_called_once_with(Ended(7, Sent.LATE, 0))
