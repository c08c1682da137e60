"""Two joined connections of an operator: nothing is lost, whichever side is there first."""

from __future__ import annotations

import asyncio

from kvdepot.server.rpc.admin_socket import _Side


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.closed
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


def joined() -> tuple[_Side, _Side]:
    inner, outer = _Side(lambda: None), _Side(lambda: None)
    inner.other, outer.other = outer, inner
    return inner, outer


def test_what_comes_before_the_other_side_is_there_is_sent_first() -> None:
    """asyncio of Python 3.11.2 adds the reader after `connection_made` has paused it."""
    inner, outer = joined()
    ours, theirs = Transport(), Transport()
    inner.connection_made(ours)
    inner.data_received(b"SETTINGS")
    outer.connection_made(theirs)
    assert theirs.written == b"SETTINGS"
    inner.data_received(b", more")
    outer.data_received(b"back")
    assert (theirs.written, ours.written) == (b"SETTINGS, more", b"back")


def test_a_side_is_read_only_while_the_other_one_takes_what_it_says() -> None:
    inner, outer = joined()
    ours, theirs = Transport(), Transport()
    inner.connection_made(ours)
    outer.connection_made(theirs)
    assert (ours.reads, theirs.reads) == (False, False), "not before both are there"
    for side in (inner, outer):
        side.begin()
    assert (ours.reads, theirs.reads) == (True, True)
    outer.pause_writing()
    assert (ours.reads, theirs.reads) == (False, True)
    outer.resume_writing()
    assert (ours.reads, theirs.reads) == (True, True)


def test_a_side_that_closes_is_not_read_any_more() -> None:
    inner, outer = joined()
    ours, theirs = Transport(), Transport()
    inner.connection_made(ours)
    inner.close()
    assert ours.closed
    outer.close()
    outer.connection_made(theirs)
    assert theirs.closed, "also where it was closed before it was there"
    inner.begin()
    outer.resume_writing()
    assert not ours.reads


def test_a_side_that_the_other_one_has_left_before_it_was_there_ends_after_what_was_said() -> None:
    """A caller would wait for ever where nobody is on the other side any more."""
    inner, outer = _Side(lambda: outer.close()), _Side(lambda: None)
    inner.other, outer.other = outer, inner
    ours, theirs = Transport(), Transport()
    inner.connection_made(ours)
    inner.data_received(b"GOAWAY")
    inner.connection_lost(None)
    outer.connection_made(theirs)
    assert (theirs.written, theirs.closed) == (b"GOAWAY", True)
