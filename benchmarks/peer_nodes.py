"""Two nodes whose daemons are peers, each in a network namespace of its own, and the wire between them alone.

The wire has a delay of 0.5 ms and at most 10 Gbit/s (`tests.rigs.network`). It is a process that copies each packet.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.server.io.peer_wire import Lane

from demo.daemon import Daemon
from tests.rigs.network import Network
from tests.rigs.patience import wait_until
from tests.rigs.peer_fleet import LENT
from tests.rigs.peer_network import PeerNetwork

SOURCE, READER = range(2)
PORT: Final = 7450
_LENGTH: Final = struct.Struct("!Q")
_PIECE_BYTES: Final = 1 << 20
_CONFIGURATION: Final = 'capacity = "1GiB"\n'
_READY_SECONDS: Final = 60.0


class BareWire:
    """A connection from the reader to the source, in this process: what it is asked for comes as zeros."""

    def __init__(self, network: Network) -> None:
        place = (network.address(SOURCE), PORT)
        with network.in_node(SOURCE, lambda: socket.create_server(place)) as listener:
            self._asking = network.in_node(READER, lambda: socket.create_connection(place))
            self._answering, _ = listener.accept()
        for end in (self._asking, self._answering):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_PIECE_BYTES)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def seconds(self, length: int) -> float:
        """Return how long so many bytes take, from the question to the last byte."""
        began = time.perf_counter()
        self._asking.sendall(_LENGTH.pack(length))
        while length:
            length -= self._asking.recv_into(self._buffer, min(length, _PIECE_BYTES))
        return time.perf_counter() - began

    def _answer(self) -> None:
        zeros = memoryview(bytes(_PIECE_BYTES))
        while asked := self._answering.recv(_LENGTH.size):
            (length,) = _LENGTH.unpack(asked)
            for at in range(0, length, _PIECE_BYTES):
                self._answering.sendall(zeros[: length - at])

    def close(self) -> None:
        self._asking.close()
        self._thread.join()
        self._answering.close()


@dataclass(frozen=True, slots=True)
class PeerNodes:
    source: Daemon
    reader: Daemon
    """It has nothing, and one tier."""
    wire: BareWire
    lane: Lane

    def loaded_bytes(self) -> int:
        """Return what the reader has loaded, over this lane."""
        status = self.reader.status()
        (tier,) = (tier for tier in status.tiers if tier.name.startswith("peer"))
        return int(status.counters.get(f"peer_loaded_bytes.{tier.name}/{self.lane}", 0))


@contextmanager
def peer_nodes(folder: Path, lane: Lane) -> Iterator[PeerNodes]:
    """Start both daemons. Raise NetworkError if there are no namespaces here."""
    nixl = lane is Lane.NIXL
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        peers = PeerNetwork(folder, network)
        listening = peers.listening(SOURCE, lends=nixl)
        source = stack.enter_context(
            Daemon(_CONFIGURATION + peers.tls(), of_daemon=listening, program=peers.program(SOURCE))
        )
        if nixl:
            wait_until(lambda: LENT in source.log.read_text(), LENT)
        tier = peers.tiers(READER, SOURCE, deadline="10s", borrows=nixl)
        reader = stack.enter_context(Daemon(_CONFIGURATION + peers.tls() + tier, program=peers.program(READER)))
        reader.wait(lambda status: status.tiers[1].state == "ready", _READY_SECONDS, "ready to load from its peer")
        wire = BareWire(network)
        stack.callback(wire.close)
        yield PeerNodes(source, reader, wire, lane)
