"""Which connections of readers a source has, where more want to have one than may."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from kvdepot.server.io import peer_connections
from kvdepot.server.io.peer_connections import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_HOST_MAX,
    NEW_MAX,
    Connection,
    Connections,
)


class Source:
    """Its connections, and a clock of the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connections = Connections(lambda: self.now)
        self.ends: dict[Connection, socket.socket] = {}
        self.streams: dict[Connection, socket.socket] = {}

    def connected(self, host: str) -> Connection:
        one = self.connections.enter(host)
        assert one is not None
        self.streams[one], self.ends[one] = socket.socketpair()
        return one

    def answered(self, host: str) -> Connection:
        one = self.connected(host)
        assert self.waits(one)
        return one

    def waits(self, one: Connection) -> bool:
        return self.connections.waits(one, self.streams[one])

    def is_open(self, one: Connection) -> bool:
        self.ends[one].setblocking(False)
        try:
            return self.ends[one].recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        for end in (*self.ends.values(), *self.streams.values()):
            end.close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


def fill(source: Source) -> list[Connection]:
    """Connect each a second after the one before, and have all answered."""
    found = []
    for number in range(CONNECTIONS_MAX):
        found.append(source.answered(f"10.0.0.{number}"))
        source.now += 1.0
    return found


def test_the_one_that_has_waited_longest_makes_room(source: Source) -> None:
    found = fill(source)
    source.connections.works(found[0])
    assert source.waits(found[0]), "it has asked again"
    source.answered("10.0.1.1")
    assert not source.is_open(found[1]) and all(map(source.is_open, (found[0], *found[2:])))
    source.answered("10.0.1.2")
    assert not source.is_open(found[2])


def test_nobody_makes_room_who_asks_or_is_answered_or_has_waited_briefly(source: Source) -> None:
    found = fill(source)
    for one in found[:-1]:
        source.connections.works(one)
    source.now += peer_connections.IDLE_SECONDS_MIN - 1.5
    other = source.connected("10.0.1.1")
    assert not source.waits(other) and all(map(source.is_open, found))
    source.connections.leave(found[0])
    assert source.waits(other)


def test_a_new_connection_takes_no_place_of_one_that_was_answered(source: Source) -> None:
    found = fill(source)
    new = [source.connected(f"10.0.1.{number}") for number in range(NEW_MAX)]
    assert source.connections.enter("10.0.2.1") is None
    assert all(map(source.is_open, found))
    source.connections.leave(new[0])
    assert source.connections.enter("10.0.2.1") is not None


def test_a_host_has_its_own_limits_and_makes_room_for_itself_alone(source: Source) -> None:
    other = source.answered("10.0.0.2")
    source.now += 1.0
    own = []
    for _ in range(CONNECTIONS_PER_HOST_MAX):
        own.append(source.answered("10.0.0.1"))
        source.now += 1.0
    source.answered("10.0.0.1")
    assert source.is_open(other) and not source.is_open(own[0])
    for _ in range(CONNECTIONS_PER_HOST_MAX):
        source.connected("10.0.0.1")
    assert source.connections.enter("10.0.0.1") is None and source.connections.enter("10.0.0.2") is not None


def test_a_stream_is_not_shut_down_once_its_connection_works_or_ends(source: Source) -> None:
    found = fill(source)
    source.connections.works(found[0])
    source.streams[found[0]].close()
    source.connections.leave(found[0])
    source.answered("10.0.1.1")
    source.answered("10.0.1.2")
    assert not source.is_open(found[1])
