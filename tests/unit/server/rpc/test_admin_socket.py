"""Two joined connections of an operator: nothing is lost, whichever side is there first."""

from __future__ import annotations

import asyncio

from kvdepot.server.rpc.admin_socket import _Side


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


def test_what_comes_before_the_other_side_is_there_is_sent_first() -> None:
    """asyncio of Python 3.11.2 adds the reader after `connection_made` has paused it."""
    inner, outer = _Side(lambda: None), _Side(lambda: None)
    inner.other, outer.other = outer, inner
    ours, theirs = Transport(), Transport()
    inner.connection_made(ours)
    inner.data_received(b"SETTINGS")
    outer.connection_made(theirs)
    assert theirs.written == b"SETTINGS"
    inner.data_received(b", more")
    outer.data_received(b"back")
    assert (theirs.written, ours.written) == (b"SETTINGS, more", b"back")
